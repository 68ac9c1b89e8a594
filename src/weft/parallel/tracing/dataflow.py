"""What flows through a model: which of its units feed which, found by following one batch through its own code.

A *unit* is a block, or another child of the modules that hold the blocks: an embedding, a last norm, a head. What the
model's code does between units (adding positions, pooling, choosing a mask) is followed too: of every tensor it makes
it is known from which units' outputs, and from which of the model's own parameters, it was made. Nothing is computed:
units run on the meta device, and what depends on them is `Placeholder`.

torch.export would find the same, and takes seconds where this takes some 13 ms a GPT block; it also refuses code that
looks at its inputs' values, which here are real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.parallel.tracing.placeholder import Placeholder, absorb, is_in_place, is_placeholder, to_meta
from weft.parallel.wrapping.wrap import wrap_forward
from weft.plan.model_refusals import BLOCKS_THAT_ASK_FOR_VALUES, BUFFERS_OF_EVERY_STAGE, HIDDEN_OUTPUTS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


WRITTEN = -1


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """One tensor among the outputs of a unit."""

    place: int
    """Of the call in the order of all calls."""
    unit: str
    leaf: int
    """Of the output's tree; `WRITTEN` for what the unit wrote into its arguments, which cannot travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What all tensors at one place have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a unit."""

    place: int
    unit: str
    number: int
    """Calls of the same unit before this one."""
    needs: frozenset[Value]
    """Outputs of other units that its arguments were made from."""
    parameters: frozenset[str]
    """The model's own parameters that its arguments were made from."""
    outputs: tuple[Any, ...]
    """Leaves of the output's tree: an `Placeholder` for each tensor, other leaves as they are."""
    tree: TreeSpec
    arguments: tuple[Any, Any]
    """Positional and by name, with meta tensors: what it takes to call the unit alone."""

    def output(self, values: Mapping[Value, torch.Tensor]) -> Any:
        """The output as its caller would see it, with the values that are known here."""
        leaves = [
            values.get(Value(self.place, self.unit, leaf), stand_in) for leaf, stand_in in enumerate(self.outputs)
        ]
        return tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one forward pass of a model does."""

    calls: tuple[Call, ...]
    """In order."""
    forms: Mapping[Value, Form]
    output_needs: frozenset[Value]
    output_parameters: frozenset[str]
    written: Mapping[Value, int]
    """Values that something is written into after they were made, and what tells the memory of one from another's."""
    is_random: bool
    """Some operator draws random numbers."""
    by_name: Mapping[tuple[str, int], Call] = field(repr=False)
    """Of every unit and number of its call."""


def find_units(model: nn.Module, blueprint: Blueprint) -> tuple[str, ...]:
    """The modules that run on one stage or another as a whole, in the order of registration.

    A child without parameters or state of its own (dropout, a table of rotations) is no unit: it runs wherever the
    model's code needs it.
    """
    holders = {""}
    for block in blueprint.blocks:
        parts = block.split(".")
        holders |= {".".join(parts[:end]) for end in range(len(parts))}
    units = []
    for name, module in model.named_modules():
        is_child = name != "" and name.rpartition(".")[0] in holders and name not in holders
        if is_child and (name in blueprint.blocks or _has_state(module)):
            units.append(name)
    return tuple(units)


def _has_state(module: nn.Module) -> bool:
    if any(True for _ in module.parameters()):
        return True
    return any(name not in part._non_persistent_buffers_set for part in module.modules() for name in part._buffers)


def make_meta_copy(
    model: nn.Module, units: Sequence[str], device: torch.device, dtypes: Mapping[str, torch.dtype] | None = None
) -> nn.Module:
    """A copy of a model whose parameters, and buffers inside units, have no memory; other buffers are the model's.

    Those are on the `device` where batches are: code between units may use both together.
    `dtypes`: of parameters by name, where they compute in another than their own.
    """
    memo: dict[int, Any] = {id(buffer): buffer if buffer.is_meta else buffer.to(device) for buffer in model.buffers()}
    for name in units:
        memo |= {id(buffer): to_meta(buffer) for buffer in model.get_submodule(name).buffers()}
    for name, parameter in model.named_parameters():
        bare = to_meta(parameter.detach()).to((dtypes or {}).get(name, parameter.dtype))
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def follow(meta_copy: nn.Module, units: Sequence[str], call: Callable[[nn.Module], Any], device: torch.device) -> Flow:
    """Follow one forward pass of a twin. `call` calls the model with a batch, which may have values or none."""
    for module in meta_copy.modules():
        if isinstance(module, _BatchNorm):
            module.eval()  # shapes are the same, and one sample of many on all data ranks is no reason to refuse
    follower = _Follower(meta_copy, units, device)
    kept = [(buffer, buffer.clone()) for buffer in meta_copy.buffers() if not buffer.is_meta]
    ours = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with ours, follower.watching(), torch.no_grad(), _Randomness() as randomness, follower:
        output = call(meta_copy)
    _refuse_written_buffers(meta_copy, follower)
    for buffer, before in kept:  # they and random states are the user's own, and this was no step
        buffer.copy_(before)
    needs, parameters = follower.roots(output)
    return Flow(
        calls=tuple(follower.calls),
        forms=follower.forms,
        output_needs=needs,
        output_parameters=parameters,
        written=follower.written(),
        is_random=randomness.is_random,
        by_name={(made.unit, made.number): made for made in follower.calls},
    )


def _refuse_written_buffers(meta_copy: nn.Module, follower: _Follower) -> None:
    """State of the model itself that its own code changes would change on every stage, or on some, at its own pace."""
    now = {name: id(buffer) for name, buffer in meta_copy.named_buffers()}
    changed = [n for number, n in follower.buffers.items() if number in follower.written_into or now.get(n) != number]
    if changed:
        raise ModelError([BUFFERS_OF_EVERY_STAGE.message(name=name) for name in changed])


Roots = tuple[frozenset[Value], frozenset[str]]
_NONE: Roots = (frozenset(), frozenset())


class _Follower(TorchFunctionMode):
    """Sees every function of torch that is called between units, and knows what each tensor was made from."""

    def __init__(self, meta_copy: nn.Module, units: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self._units = {name: meta_copy.get_submodule(name) for name in units}
        self._trained = {n for n, unit in self._units.items() if any(p.requires_grad for p in unit.parameters())}
        self._device = device
        self._roots: dict[int, Roots] = {}
        self._alive: list[torch.Tensor] = []  # an id means nothing once its tensor is gone
        self._writes: dict[int, list[Roots]] = {}  # by memory, in order
        self._num_writes: dict[int, int] = {}  # of each tensor: those that its roots know of
        self._versions: dict[Value, tuple[Placeholder, int]] = {}
        self._requires_grad: set[Value | str] = set()
        inside = {id(buffer) for unit in self._units.values() for buffer in unit.buffers()}
        self.buffers = {
            id(buffer): f"{path}.{name}" if path else name
            for path, module in meta_copy.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in inside and name not in module._non_persistent_buffers_set
        }
        """State of the model itself, outside its units."""
        self.written_into: set[int] = set()
        self._counts = dict.fromkeys(units, 0)
        self._is_in_unit = False
        self.calls: list[Call] = []
        self.forms: dict[Value, Form] = {}
        for name, parameter in meta_copy.named_parameters():
            self._remember(parameter, (frozenset(), frozenset({name})))
            if parameter.requires_grad:
                self._requires_grad.add(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._is_in_unit:  # whose own functions are nobody's business here
            return _without_values(func, args, kwargs or {}, operands)
        if any(is_placeholder(operand) for operand in operands):
            result = absorb(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        roots = self.roots(operands)
        into = operands[:1] if is_in_place(getattr(func, "__name__", "")) else tree_leaves((kwargs or {}).get("out"))
        self.written_into.update(id(tensor) for tensor in into)
        if roots != _NONE:
            for tensor in into:
                if isinstance(tensor, torch.Tensor):
                    self._write(tensor, roots)
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._remember(leaf, roots)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Units do not run, but are noted, inside."""
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

    def roots(self, tree: Any) -> Roots:
        """All that the tensors of a tree were made from."""
        found: list[Roots] = []
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found += [self._roots[id(leaf)]] if id(leaf) in self._roots else []
                found += self._writes.get(_storage_of(leaf), [])[self._num_writes.get(id(leaf), 0) :]
        if len(found) < 2:
            return found[0] if found else _NONE
        return frozenset().union(*(values for values, _ in found)), frozenset().union(*(names for _, names in found))

    def _remember(self, tensor: torch.Tensor, roots: Roots) -> None:
        before = self._roots.get(id(tensor), _NONE)
        if id(tensor) not in self._roots:
            self._alive.append(tensor)
            self._num_writes[id(tensor)] = len(self._writes.get(_storage_of(tensor), ()))
        self._roots[id(tensor)] = (before[0] | roots[0], before[1] | roots[1])

    def _write(self, tensor: torch.Tensor, roots: Roots) -> None:
        """Whatever shares a tensor's memory, and was made before now, is made from these too."""
        self._alive.append(tensor)
        self._writes.setdefault(_storage_of(tensor), []).append(roots)

    def written(self) -> dict[Value, int]:
        return {v: _storage_of(made) for v, (made, before) in self._versions.items() if made.meta._version > before}

    def _make_stand_in(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self._is_in_unit = True
            try:
                return self._note(name, forward, args, kwargs)
            finally:
                self._is_in_unit = False

        return stand_in

    def _note(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        needs, parameters = self.roots((args, kwargs))
        arguments = tree_map(to_meta, (args, kwargs))
        given = [
            (leaf, meta, meta._version)
            for leaf, meta in zip(tree_leaves((args, kwargs)), tree_leaves(arguments), strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        try:
            output = forward(*arguments[0], **arguments[1])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ModelError(BLOCKS_THAT_ASK_FOR_VALUES.message(name=name, error=said)) from error
        leaves, tree = tree_flatten(output)
        place, number = len(self.calls), self._counts[name]
        self._counts[name] += 1
        for argument, meta, before in given:
            if meta._version > before:
                self._write(argument, (frozenset({Value(place, name, WRITTEN)}), frozenset()))
        learns = not self._requires_grad.isdisjoint(needs | parameters) or name in self._trained
        outputs: list[Any] = []
        for leaf, found in enumerate(leaves):
            if isinstance(found, torch.Tensor):
                value, made = Value(place, name, leaf), Placeholder(to_meta(found), self._device)
                form = Form(
                    shape=tuple(made.shape), dtype=made.dtype, requires_grad=learns and made.dtype.is_floating_point
                )
                self.forms[value] = form
                if form.requires_grad:
                    self._requires_grad.add(value)
                self._remember(made, (frozenset({value}), frozenset()))
                self._versions[value] = made, made.meta._version
                outputs.append(made)
            elif isinstance(found, _PLAIN):
                outputs.append(found)
            else:
                raise ModelError(
                    HIDDEN_OUTPUTS.message(
                        block=f'"{name}"',
                        kind=type(found).__name__,
                        asked="[axes] pipeline > 1",
                        instead="tuples, lists or dicts",
                    )
                )
        call = Call(
            place=place,
            unit=name,
            number=number,
            needs=needs,
            parameters=parameters,
            outputs=tuple(outputs),
            tree=tree,
            arguments=arguments,
        )
        self.calls.append(call)
        return tree_unflatten(outputs, tree)


class _Randomness(TorchDispatchMode):
    """Notices operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            self.is_random = True
        return func(*args, **(kwargs or {}))


def _without_values(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], operands: Sequence[torch.Tensor]
) -> Any:
    """Call a function of a unit; a mask that the unit makes without asking for a device has values, the rest none."""
    if any(tensor.is_meta for tensor in operands) and any(not t.is_meta and t.dim() for t in operands):
        args, kwargs = tree_map(to_meta, args), tree_map(to_meta, dict(kwargs))
    return func(*args, **kwargs)


def _draws_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Attention is marked as random whatever its dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0)


def _storage_of(tensor: torch.Tensor) -> int:
    """What tells tensors apart that do not share memory."""
    storage: int = (tensor.meta if isinstance(tensor, Placeholder) else tensor).untyped_storage()._cdata
    return storage
