"""The dataflow of one forward pass: which units of a model feed which, found by running its own code without values.

A *unit* is a block, or another child of the modules that hold the blocks: an embedding, a last norm, a head. Units run
on the meta device and return `Placeholder`s. The code between units (adding positions, pooling, choosing a mask) is
followed too: every tensor it makes has *sources*, the units' outputs and the model's own parameters it was made from.

torch.export finds the same in seconds instead of some 13 ms per GPT block, and refuses code that looks at the values of
its inputs, which here are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.blueprint import Blueprint
from weft.comm.failures.user_traceback import place_in_user_code
from weft.errors import ModelError
from weft.parallel.tracing.meta_copy import freeze_batch_norms
from weft.parallel.tracing.meta_kernels import call_in_unit
from weft.parallel.tracing.placeholder import (
    Placeholder,
    absorb,
    is_in_place,
    is_placeholder,
    storage_id,
    tensor_leaves,
    to_meta,
)
from weft.parallel.wrapping.host_random import HostRandom
from weft.parallel.wrapping.replacements import Replacements, reentrant_checkpoints
from weft.parallel.wrapping.wrap import wrap_forward
from weft.plan.model_refusals import (
    BLOCKS_THAT_ASK_FOR_VALUES,
    BUFFERS_OF_EVERY_STAGE,
    HIDDEN_OUTPUTS,
    VALUES_BESIDE_OUTPUTS,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)

WRITTEN = -1
"""As `Value.leaf`: whatever the unit wrote into its arguments, which cannot be sent to another stage."""


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """One tensor among the outputs of a unit."""

    place: int
    """Position of the call among all calls."""
    unit: str
    leaf: int
    """Leaf of the output's tree, or `WRITTEN`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Metadata of a value, the same in every microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a unit."""

    place: int
    unit: str
    number: int
    """Number of earlier calls of the same unit."""
    needs: frozenset[Value]
    """Outputs of other units that its arguments were made from."""
    parameters: frozenset[str]
    """The model's own parameters that its arguments were made from."""
    outputs: tuple[Any, ...]
    """Leaves of the output's tree, with a `Placeholder` for each tensor."""
    tree: TreeSpec
    arguments: tuple[Any, Any]
    """Positional and keyword arguments with meta tensors, enough to call the unit alone."""

    def output(self, values: Mapping[Value, torch.Tensor]) -> Any:
        """The output as the model's code sees it, with the values known on this stage."""
        leaves = [values.get(Value(self.place, self.unit, leaf), made) for leaf, made in enumerate(self.outputs)]
        return tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The dataflow of one forward pass."""

    calls: tuple[Call, ...]
    """In order."""
    forms: Mapping[Value, Form]
    output_needs: frozenset[Value]
    output_parameters: frozenset[str]
    written: Mapping[Value, int]
    """Values that are written into after they were made, each with the id of its storage."""
    is_random: bool
    """True if an operator draws random numbers, or the code does from numpy or the standard library."""
    kept_by_units: tuple[str, ...]
    """Attributes in which units keep tensors that they made in the pass, by their full names."""
    by_name: Mapping[tuple[str, int], Call] = field(repr=False)
    """Calls by unit and number."""


def find_units(model: nn.Module, blueprint: Blueprint) -> tuple[str, ...]:
    """The modules that each run on one stage, in the order of registration.

    A child without parameters or persistent buffers (dropout, a table of rotations) is no unit: it runs on every stage
    whose code needs it.
    """
    paths = [block.split(".") for block in blueprint.blocks]
    holders = {"", *(".".join(parts[:end]) for parts in paths for end in range(len(parts)))}
    return tuple(
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in holders and name not in holders
        if name in blueprint.blocks or _has_state(module)
    )


def _has_state(module: nn.Module) -> bool:
    persistent = (n not in part._non_persistent_buffers_set for part in module.modules() for n in part._buffers)
    return any(True for _ in module.parameters()) or any(persistent)


def follow(meta_copy: nn.Module, units: Sequence[str], call: Callable[[nn.Module], Any], device: torch.device) -> Flow:
    """Follow one forward pass of a `make_meta_copy`. `call` calls a model with a batch, with or without values."""
    freeze_batch_norms(meta_copy)  # here: the copy may have been put into training mode since it was made
    follower = _Follower(meta_copy, units, device)
    kept = [(buffer, buffer.clone()) for buffer in meta_copy.buffers() if not buffer.is_meta]
    ours = torch.random.fork_rng([device] if device.type == "cuda" else [])
    around, host = Replacements(reentrant_checkpoints()), HostRandom()
    with ours, around, host.kept(), follower.watching(), torch.no_grad(), _Randomness() as randomness, follower:
        output = call(meta_copy)
    for buffer, before in kept:  # buffers and random states are the user's own
        buffer.copy_(before)
    now = {name: id(buffer) for name, buffer in meta_copy.named_buffers()}
    changed = [n for number, n in follower.buffers.items() if number in follower.written_into or now.get(n) != number]
    if changed:  # each stage that runs this code would change its own replica
        raise ModelError([BUFFERS_OF_EVERY_STAGE.message(name=name) for name in changed])
    follower.refuse_values_beside(output)
    needs, parameters = _by_kind(follower.sources(output))
    return Flow(
        calls=tuple(follower.calls),
        forms=follower.forms,
        output_needs=needs,
        output_parameters=parameters,
        written={v: storage_id(made) for v, (made, n) in follower.versions.items() if made.meta._version > n},
        is_random=randomness.is_random or host.is_used,
        kept_by_units=tuple(follower.kept_by_units(meta_copy)),
        by_name={(made.unit, made.number): made for made in follower.calls},
    )


Sources = frozenset[Value | str]
"""Outputs of units, and names of the model's own parameters."""


def _by_kind(sources: Sources) -> tuple[frozenset[Value], frozenset[str]]:
    names = frozenset(one for one in sources if isinstance(one, str))
    return frozenset(one for one in sources if isinstance(one, Value)), names


class _Follower(TorchFunctionMode):
    """Intercepts every torch function called between units, and records the sources of each tensor."""

    def __init__(self, meta_copy: nn.Module, units: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self._units = {name: meta_copy.get_submodule(name) for name in units}
        self._trained = {n for n, unit in self._units.items() if any(p.requires_grad for p in unit.parameters())}
        self._device = device
        self._sources: dict[int, Sources] = {}
        self._alive: list[torch.Tensor] = []  # ids are unique among live tensors only
        self._writes: dict[int, list[Sources]] = {}  # by storage, in order
        self._num_writes: dict[int, int] = {}  # by tensor: writes that its sources include
        self.versions: dict[Value, tuple[Placeholder, int]] = {}
        self._requires_grad: set[Value | str] = set()
        inside = {id(buffer) for unit in self._units.values() for buffer in unit.buffers()}
        self.buffers = {
            id(buffer): f"{path}.{name}" if path else name
            for path, module in meta_copy.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in inside and name not in module._non_persistent_buffers_set
        }
        """Names of persistent buffers outside units, by id."""
        self.written_into: set[int] = set()
        self._counts = dict.fromkeys(units, 0)
        self._in_unit: str | None = None
        self._made_in: dict[int, str] = {}
        """The unit inside of which each tensor was made, by the tensor's id; none of these is an output."""
        self.calls: list[Call] = []
        self.forms: dict[Value, Form] = {}
        for name, parameter in meta_copy.named_parameters():
            self._remember(parameter, frozenset({name}))
            if parameter.requires_grad:
                self._requires_grad.add(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = tensor_leaves((args, kwargs))
        if (
            self._in_unit is not None
        ):  # on meta tensors, also where the unit makes a mask without a device, which has values
            if any(tensor.is_meta for tensor in operands) and any(not t.is_meta and t.dim() for t in operands):
                args, kwargs = tree_map(to_meta, args), tree_map(to_meta, dict(kwargs or {}))
            inside = call_in_unit(func, args, kwargs or {})
            self._note_inside(inside, operands, self._in_unit)
            return inside
        self.refuse_values_beside(operands)
        if any(is_placeholder(operand) for operand in operands):
            result = absorb(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        sources = self.sources(operands)
        into = operands[:1] if is_in_place(getattr(func, "__name__", "")) else tree_leaves((kwargs or {}).get("out"))
        self.written_into.update(id(tensor) for tensor in into)
        if sources:
            for tensor in into:
                if isinstance(tensor, torch.Tensor):
                    self._write(tensor, sources)
            for leaf in tensor_leaves(result):
                self._remember(leaf, sources)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which calls of units are recorded and run on the meta device."""
        why = "runs the unit on the meta device, and records the call"
        undo = [
            wrap_forward(unit, self._make_stand_in(name, unit.forward), by="tracing", why=why)
            for name, unit in self._units.items()
        ]
        try:
            yield
        finally:
            while undo:
                undo.pop()()

    def sources(self, tree: Any) -> Sources:
        found: list[Sources] = []
        for leaf in tensor_leaves(tree):
            found.append(self._sources.get(id(leaf), frozenset()))
            found += self._writes.get(storage_id(leaf), [])[self._num_writes.get(id(leaf), 0) :]
        return frozenset().union(*found)

    def _remember(self, tensor: torch.Tensor, sources: Sources) -> None:
        if id(tensor) not in self._sources:
            self._alive.append(tensor)
            self._num_writes[id(tensor)] = len(self._writes.get(storage_id(tensor), ()))
        self._sources[id(tensor)] = self._sources.get(id(tensor), frozenset()) | sources

    def _write(self, tensor: torch.Tensor, sources: Sources) -> None:
        """Add sources to all existing tensors that share a tensor's storage."""
        self._alive.append(tensor)
        self._writes.setdefault(storage_id(tensor), []).append(sources)

    def _make_stand_in(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.refuse_values_beside((args, kwargs))
            self._in_unit = name
            try:
                return self._note(name, forward, args, kwargs)
            finally:
                self._in_unit = None

        return stand_in

    def _note_inside(self, result: Any, operands: list[torch.Tensor], unit: str) -> None:
        for leaf in [result] if isinstance(result, torch.Tensor) else tensor_leaves(result):
            if leaf.is_meta and not any(leaf is operand for operand in operands):
                self._made_in[id(leaf)] = unit
                self._alive.append(leaf)

    def refuse_values_beside(self, tree: Any) -> None:
        """Refuse tensors that a unit has made and not returned: other stages would not have them."""
        for leaf in tensor_leaves(tree):
            if id(leaf) in self._made_in and id(leaf) not in self._sources:
                raise ModelError(VALUES_BESIDE_OUTPUTS.message(name=self._made_in[id(leaf)]))

    def kept_by_units(self, meta_copy: nn.Module) -> Iterator[str]:
        for path, module in meta_copy.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) in self._made_in:
                    yield f"{path}.{name}" if path else name

    def _note(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        sources = self.sources((args, kwargs))
        needs, parameters = _by_kind(sources)
        arguments = tree_map(to_meta, (args, kwargs))
        given = [
            (leaf, meta, meta._version)
            for leaf, meta in zip(tree_leaves((args, kwargs)), tree_leaves(arguments), strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        before_call = tree_leaves(arguments)
        try:
            output = forward(*arguments[0], **arguments[1])
        except Exception as error:
            said = f"{type(error).__name__}: {error}{place_in_user_code(error)}"
            raise ModelError(BLOCKS_THAT_ASK_FOR_VALUES.message(name=name, error=said)) from error
        known = set(map(id, before_call))
        if any(isinstance(one, torch.Tensor) and id(one) not in known for one in tree_leaves(arguments)):
            raise ModelError(VALUES_BESIDE_OUTPUTS.message(name=name))
        leaves, tree = tree_flatten(output)
        place, number = len(self.calls), self._counts[name]
        self._counts[name] += 1
        for argument, meta, before in given:
            if meta._version > before:
                self._write(argument, frozenset({Value(place, name, WRITTEN)}))
        learns = not self._requires_grad.isdisjoint(sources) or name in self._trained
        outputs: list[Any] = []
        for leaf, found in enumerate(leaves):
            if isinstance(found, torch.Tensor):
                value, made = Value(place, name, leaf), Placeholder(to_meta(found), self._device)
                requires_grad = learns and made.dtype.is_floating_point
                self.forms[value] = Form(shape=tuple(made.shape), dtype=made.dtype, requires_grad=requires_grad)
                if requires_grad:
                    self._requires_grad.add(value)
                self._remember(made, frozenset({value}))
                self.versions[value] = made, made.meta._version
                outputs.append(made)
            elif isinstance(found, _PLAIN):
                outputs.append(found)
            else:
                kind, instead = type(found).__name__, "tuples, lists or dicts"
                asked = "[axes] pipeline > 1"
                raise ModelError(HIDDEN_OUTPUTS.message(block=f'"{name}"', kind=kind, asked=asked, instead=instead))
        self.calls.append(
            Call(
                place=place,
                unit=name,
                number=number,
                needs=needs,
                parameters=parameters,
                outputs=tuple(outputs),
                tree=tree,
                arguments=arguments,
            )
        )
        return tree_unflatten(outputs, tree)


class _Randomness(TorchDispatchMode):
    """Detects operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            # Attention is tagged as random even without dropout.
            self.is_random |= "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0
        return func(*args, **(kwargs or {}))
