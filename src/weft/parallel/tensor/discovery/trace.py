"""A tracer that follows the features of every layer through one forward pass.

The model's own code runs on the meta device, at the size of the whole model. For every torch function that it calls,
`RULES` say what happens to the digits of the operands; a function without a rule blocks them all. So a split that is
found is right for any model, and nothing is guessed from names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.parallel.tensor.discovery.features import Dim, Layout, block, fresh, is_whole, leaves, length, whole
from weft.parallel.tensor.discovery.layer_rules import enter_layers, weight_layout
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.records import UNKNOWN, Layer, Record, RecordedCall, StateTensor, Use
from weft.parallel.tensor.discovery.rules import EXPANDING, HARMLESS, RULES, UNARY, VALUELESS
from weft.parallel.tensor.discovery.symbolic_sizes import Check, Compute, SymbolicInt
from weft.parallel.tracing.placeholder import is_in_place, storage_id, tensor_leaves, to_meta
from weft.plan.partition.tensor import SIZED

SHAPES = ("shape", "size", "numel", "nelement", "__len__")


class Tracer(TorchFunctionMode):
    """Intercepts every torch function that a model calls."""

    def __init__(self, meta_copy: nn.Module, device: torch.device) -> None:
        """`device`: the one that the model's code sees, so that tensors it makes itself have values."""
        super().__init__()
        self._device = device
        self.names: list[str] = []
        """Running modules, outermost first."""
        self.calls: list[list[RecordedCall]] = []
        """Calls so far, per running module."""
        self.is_inside = False
        """True if an intercepted function is running; functions that it calls are not followed."""
        self.record = Record(modules=dict(meta_copy.named_modules()))
        self.owners: dict[int, list[Layer]] = {}
        """Layers by id of their weights and biases; several if those are tied."""
        self._layouts: dict[int, Layout] = {}
        self._sources: dict[int, int] = {}  # by storage
        self._alive: list[torch.Tensor] = []  # ids are unique among live tensors only
        self._model_inputs: set[int] = set()
        self.orders = itertools.count(1)
        num_bits = enter_layers(self, meta_copy)
        parameters = dict(meta_copy.named_parameters())
        for name, tensor in (*parameters.items(), *meta_copy.named_buffers()):
            is_layers = id(tensor) in self.owners
            reason = "its weight is used outside the layer"
            layout = tuple(whole(size, reason) if is_layers else fresh(size) for size in tensor.shape)
            state = StateTensor(name=name, layout=layout, bit=1 << num_bits if name in parameters else 0)
            num_bits += 1
            self.record.state.append(state)
            self.add(tensor, layout, state.bit)

    @property
    def module(self) -> str:
        """The module whose own code is running."""
        return self.names[-1] if self.names else ""

    def layout(self, tensor: torch.Tensor) -> Layout:
        found = self._layouts.get(id(tensor))
        if found is None:
            if self.sources(tensor):  # made by unseen code from unknown operands
                for layer in self.record.layers.values():
                    block(layer.outputs, self.unfollowed)
            found = tuple(whole(size, "they are combined with a whole tensor") for size in tensor.shape)
            self._layouts[id(tensor)] = found
            self._alive.append(tensor)
        return found

    def sources(self, tensor: torch.Tensor) -> int:
        """Sources do not depend on requires_grad, which a recomputed block may set later."""
        known = self._sources.get(storage_id(tensor), UNKNOWN if tensor.requires_grad else 0)
        return known if tensor.is_floating_point() or tensor.is_complex() else 0

    def add(self, tensor: torch.Tensor, layout: Layout, sources: int) -> None:
        self._alive.append(tensor)
        self._layouts[id(tensor)] = layout
        storage = storage_id(tensor)
        self._sources[storage] = self._sources.get(storage, 0) | sources
        if sum(leaf.reason is None for dim in layout for leaf in leaves(dim)) > 1:
            self.record.layouts.append(layout)

    def add_model_input(self, tensor: torch.Tensor) -> None:
        self._model_inputs.add(id(tensor))
        reason = "they are combined with an input of the model"
        self.add(tensor, tuple(whole(size, reason) for size in tensor.shape), UNKNOWN if tensor.requires_grad else 0)

    def is_model_input(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is an input of the model, or made from one alone."""
        return id(tensor) in self._model_inputs

    def add_end(self, tensor: torch.Tensor) -> None:
        """Record that a tensor is not followed further."""
        if self.sources(tensor):
            self.record.ends.append(Use(sources=self.sources(tensor), layout=self.layout(tensor)))

    def block(self, tensor: torch.Tensor, reason: str) -> None:
        for dim in self.layout(tensor):
            block(dim, reason)

    @property
    def unfollowed(self) -> str:
        return f'something in "{self.module}" cannot be followed'

    def note(self, dims: tuple[Dim, ...], compute: Compute, expected: Any) -> None:
        """Record a result from sizes that must be the same on all ranks."""
        if not all(is_whole(dim) for dim in dims):
            self.record.checks.append(Check(dims=dims, compute=compute, expected=expected, module=self.module))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.is_inside:
            return func(*args, **(kwargs or {}))
        self.is_inside = True
        try:
            return self._follow(func, args, dict(kwargs or {}))
        finally:
            self.is_inside = False

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raw = getattr(func, "__name__", "")
        name = func.__self__.__name__ if raw == "__get__" else raw.partition(".")[0]
        operands = tensor_leaves((args, kwargs))
        if name in SHAPES and operands:
            return self._sizes(name, args, kwargs)
        if name == "device" and operands[0].is_meta:
            return self._device
        if name in HARMLESS or raw in ("__set__", "__delete__"):
            return func(*args, **kwargs)
        layouts = {id(tensor): self.layout(tensor) for tensor in operands}
        result = self._run(func, args, kwargs, operands)
        name = _canonical(name)
        operation = Operation(
            func=func, name=name, args=args, kwargs=kwargs, result=result, tracer=self, layouts=layouts
        )
        if raw in SIZED and self.calls:
            operation.call = RecordedCall(function=raw)
            self.calls[-1].append(operation.call)
        sources = self._apply(operation, operands)
        if operands and (is_in_place(raw) or kwargs.get("inplace")):
            self._sources[storage_id(operands[0])] = self.sources(operands[0]) | sources
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, SymbolicInt) and id(value) not in operation.known:
                value.used()
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        """Call a function, on the meta device if one of its operands is there."""
        if any(tensor.is_meta for tensor in operands):
            args, kwargs = tree_map(to_meta, args), tree_map(to_meta, kwargs)
            if func.__name__ in ("to", "cpu", "cuda"):
                args = tuple(arg for arg in args if not isinstance(arg, str))
                kwargs = {name: value for name, value in kwargs.items() if name != "device"}
                func = torch.Tensor.to if len(args) + len(kwargs) > 1 else torch.Tensor.clone
        return func(*args, **kwargs)

    def _apply(self, operation: Operation, operands: list[torch.Tensor]) -> int:
        """Apply the rule of a function; returns the sources of its result."""
        made = tensor_leaves(operation.result)
        layouts = _layouts_made(operation)
        fits = layouts is not None and [[*map(length, one)] for one in layouts] == [[*one.shape] for one in made]
        if layouts is None or not fits:
            for tensor in operands:
                self.block(tensor, operation.why("is not known to keep features apart"))
                self.add_end(tensor)
            reason = f"they are combined with a result of {operation.name}"
            layouts = [tuple(whole(size, reason) for size in tensor.shape) for tensor in made]
        sources = self._use(operation, operands, layouts) if operation.layer is None else operation.layer.bit
        known = {id(tensor) for tensor in operands}
        for tensor, layout in zip(made, layouts, strict=True):
            if id(tensor) not in known:
                self.add(tensor, layout, sources)
        if len(operands) == 1 and len(made) == 1 and self.is_model_input(operands[0]):
            self._model_inputs.add(id(made[0]))
        return sources

    def _use(self, operation: Operation, operands: list[torch.Tensor], layouts: list[Layout]) -> int:
        """Record the operands that may have fewer features than the result; returns all their sources."""
        sources = 0
        written = () if operation.written is None else (operation.written,)
        if operation.name in VALUELESS:
            operands = []
        elif operation.name in UNARY:
            operands = operands[:1]
        for tensor in operands:
            for layer in self.owners.get(id(tensor), ()):
                layer.refused = operation.why("uses its weight or bias, outside the layer")
            own = self.sources(tensor)
            if own and (len(operands) > 1 or operation.name in EXPANDING):
                layout = operation.layouts[id(tensor)]
                self.record.uses.append(Use(sources=own, layout=layout, made=(*layouts, *written)))
            sources |= own
        return sources

    def _sizes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensor = args[0]
        owners = self.owners.get(id(tensor))
        layout = self.layout(tensor) if owners is None else weight_layout(owners[0], tensor)
        sizes = [length(dim) if is_whole(dim) else SymbolicInt.product((dim,), self.note) for dim in layout]
        if name in ("numel", "nelement"):
            is_symbolic = any(isinstance(size, SymbolicInt) for size in sizes)
            return SymbolicInt.product(layout, self.note) if is_symbolic else tensor.numel()
        if name == "__len__":
            return sizes[0].used() if isinstance(sizes[0], SymbolicInt) else sizes[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(sizes) if dim is None else sizes[dim]


def _layouts_made(operation: Operation) -> list[Layout] | None:
    """Layouts of a function's results; None if there is no rule for the call."""
    rule = RULES.get(operation.name)
    if rule is None or "out" in operation.kwargs:
        return None
    try:
        return rule(operation)
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # torch accepts more forms of arguments than the rule


def _canonical(name: str) -> str:
    """The name of a rule: `add` for add_, __iadd__ and __radd__."""
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return bare[1:] if bare[:1] in "ir" and bare[1:] in RULES and bare not in RULES else bare
    return name.rstrip("_")
