"""Following a model through one forward pass, to see where each feature of each layer goes.

The model's own code runs on the meta device, at the size of the whole model. Every function of torch that it calls is
seen: `RULES` say what it does to the digits (`features.py`) of its operands, and a function without a rule blocks them
all. So what is found is true of any model, or nothing is found; nothing is guessed from names.

Beside digits, tensors have *roots*: the parameters and layers that they were computed from, and that gradients flow
back to. A whole tensor used on shares has only a part of its gradient on each rank, and one must know whose that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.parallel.tensor.discovery.features import Dim, Layout, block, fresh, is_whole, leaves, length, whole
from weft.parallel.tensor.discovery.layer_rules import enter_layers, weight_layout
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.records import UNKNOWN, End, Held, Layer, NotedCall, Record, Use
from weft.parallel.tensor.discovery.rules import EXPANDING, HARMLESS, ROOTLESS, RULES, UNARY
from weft.parallel.tensor.discovery.symbolic_sizes import Check, Compute, Length
from weft.parallel.tracing.placeholder import is_in_place, to_meta
from weft.plan.partition.tensor import SIZED

SHAPES = ("shape", "size", "numel", "nelement", "__len__")


class Tracer(TorchFunctionMode):
    """Sees every function of torch that a model calls."""

    def __init__(self, meta_copy: nn.Module, device: torch.device) -> None:
        """`device`: where the model's code is to think that it runs, so that what it makes itself has values."""
        super().__init__()
        self._device = device
        self.names: list[str] = []
        """Modules that are running, one inside the other."""
        self.calls: list[list[NotedCall]] = []
        """Of each of them, so far."""
        self.is_inside = False
        """A function that has been seen is running, and what it calls itself is its own affair."""
        self.record = Record(modules=dict(meta_copy.named_modules()))
        self.owners: dict[int, list[Layer]] = {}
        """Layers by their weights and biases; several where those are tied."""
        self._layouts: dict[int, Layout] = {}
        self._roots: dict[int, int] = {}  # by memory
        self._alive: list[torch.Tensor] = []  # an id means nothing once its tensor is gone
        self._given: set[int] = set()
        self._order = 0
        num_bits = enter_layers(self, meta_copy)
        self._enter_held(meta_copy, num_bits)

    def _enter_held(self, meta_copy: nn.Module, num_bits: int) -> None:
        """Parameters and buffers, each dim of which may be shared out unless a layer has it."""
        parameters = dict(meta_copy.named_parameters())
        for name, tensor in (*parameters.items(), *meta_copy.named_buffers()):
            is_layers = id(tensor) in self.owners
            reason = "its weight is used outside the layer"
            layout = tuple(whole(size, reason) if is_layers else fresh(size) for size in tensor.shape)
            held = Held(name=name, layout=layout, bit=1 << num_bits if name in parameters else 0)
            num_bits += 1
            self.record.held.append(held)
            self.put(tensor, layout, held.bit)

    # What is known of tensors

    @property
    def module(self) -> str:
        """The module whose own code is running."""
        return self.names[-1] if self.names else ""

    def layout(self, tensor: torch.Tensor) -> Layout:
        found = self._layouts.get(id(tensor))
        if found is None:
            if self.roots(tensor):  # made by something that is not seen, from nobody knows what
                for layer in self.record.layers.values():
                    block(layer.outputs, self._unfollowed())
            found = tuple(whole(size, "they meet a tensor that is whole") for size in tensor.shape)
            self._layouts[id(tensor)] = found
            self._alive.append(tensor)
        return found

    def roots(self, tensor: torch.Tensor) -> int:
        """Also of what does not learn just now: a block that is computed again later learns then."""
        known = self._roots.get(_memory_of(tensor), UNKNOWN if tensor.requires_grad else 0)
        return known if tensor.is_floating_point() or tensor.is_complex() else 0

    def put(self, tensor: torch.Tensor, layout: Layout, roots: int) -> None:
        """Note what a new tensor is made of."""
        self._alive.append(tensor)
        self._layouts[id(tensor)] = layout
        memory = _memory_of(tensor)
        self._roots[memory] = self._roots.get(memory, 0) | roots
        if sum(leaf.reason is None for dim in layout for leaf in leaves(dim)) > 1:
            self.record.layouts.append(layout)

    def give(self, tensor: torch.Tensor) -> None:
        """The model is given this."""
        self._given.add(id(tensor))
        reason = "they meet what the model is given"
        self.put(tensor, tuple(whole(size, reason) for size in tensor.shape), UNKNOWN if tensor.requires_grad else 0)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor comes straight from the model's inputs."""
        return id(tensor) in self._given

    def end(self, tensor: torch.Tensor) -> None:
        """A tensor goes where it is not followed."""
        if self.roots(tensor):
            self.record.ends.append(End(roots=self.roots(tensor), layout=self.layout(tensor)))

    def block(self, tensor: torch.Tensor, reason: str) -> None:
        for dim in self.layout(tensor):
            block(dim, reason)

    def hide_from_modes(self, tensors: list[torch.Tensor]) -> None:
        """An operator was called by something that is no function of torch: compiled code, say."""
        for tensor in tensors:
            self.block(tensor, self._unfollowed())
            self.end(tensor)

    def _unfollowed(self) -> str:
        return f'something in "{self.module}" cannot be followed'

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def is_counted(self) -> bool:
        """Whether the module that is running takes its number of groups from an attribute that weft knows."""
        return type(self.record.modules[self.module]) is nn.GroupNorm

    def note(self, dims: tuple[Dim, ...], compute: Compute, expected: Any) -> None:
        """The code has found something out about sizes."""
        if not all(is_whole(dim) for dim in dims):
            self.record.checks.append(Check(dims=dims, compute=compute, expected=expected, module=self.module))

    # What functions do

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.is_inside:
            return func(*args, **(kwargs or {}))
        self.is_inside = True
        try:
            return self._see(func, args, dict(kwargs or {}))
        finally:
            self.is_inside = False

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raw = getattr(func, "__name__", "")
        name = func.__self__.__name__ if raw == "__get__" else raw.partition(".")[0]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in SHAPES and operands:
            return self._sizes(name, args, kwargs)
        if name == "device" and operands[0].is_meta:
            return self._device
        if name in HARMLESS or raw in ("__set__", "__delete__"):
            return func(*args, **kwargs)
        layouts = {id(tensor): self.layout(tensor) for tensor in operands}
        result = self._run(func, args, kwargs, operands)
        operation = Operation(
            name=_canonical(name), args=args, kwargs=kwargs, result=result, tracer=self, layouts=layouts
        )
        if raw in SIZED and self.calls:
            operation.call = NotedCall(function=raw)
            self.calls[-1].append(operation.call)
        roots = self._apply(operation, operands)
        if operands and (is_in_place(raw) or kwargs.get("inplace")):
            self._roots[_memory_of(operands[0])] = self.roots(operands[0]) | roots
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Length) and not operation.knows(value):
                value.used()
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        """Call a function; what has values goes without where it meets something that has none."""
        if any(tensor.is_meta for tensor in operands):
            args, kwargs = tree_map(to_meta, args), tree_map(to_meta, kwargs)
            if func.__name__ in ("to", "cpu", "cuda"):
                args = tuple(arg for arg in args if not isinstance(arg, str))
                kwargs = {name: value for name, value in kwargs.items() if name != "device"}
                func = torch.Tensor.to if len(args) + len(kwargs) > 1 else torch.Tensor.clone
        return func(*args, **kwargs)

    def _apply(self, operation: Operation, operands: list[torch.Tensor]) -> int:
        """Apply the rule for a function; the roots of what it made."""
        made = [leaf for leaf in tree_leaves(operation.result) if isinstance(leaf, torch.Tensor)]
        layouts = self._follow(operation)
        if layouts is None or not _fits(layouts, made):
            for tensor in operands:
                self.block(tensor, operation.why("is not known to keep features apart"))
                self.end(tensor)
            reason = f"they meet what {operation.name} made"
            layouts = [tuple(whole(size, reason) for size in tensor.shape) for tensor in made]
        if operation.layer is not None:
            roots = operation.layer.bit
        else:
            roots = self._use(operation, operands, layouts)
        known = {id(tensor) for tensor in operands}
        for tensor, layout in zip(made, layouts, strict=True):
            if id(tensor) not in known:
                self.put(tensor, layout, roots)
        if len(operands) == 1 and len(made) == 1 and self.is_given(operands[0]):
            self._given.add(id(made[0]))
        return roots

    def _follow(self, operation: Operation) -> list[Layout] | None:
        """Layouts of what a function made; None if nobody knows."""
        rule = RULES.get(operation.name)
        if rule is None or "out" in operation.kwargs:
            return None
        try:
            return rule(operation)
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # arguments in a form that the rule does not know, while torch does

    def _use(self, operation: Operation, operands: list[torch.Tensor], layouts: list[Layout]) -> int:
        """Note who was used to make something that has more features; their roots."""
        roots = 0
        written = () if operation.written is None else (operation.written,)
        if operation.name in UNARY or operation.name in ROOTLESS:
            operands = operands[:1] if operation.name not in ROOTLESS else []
        for tensor in operands:
            for layer in self.owners.get(id(tensor), ()):
                layer.refused = operation.why("uses its weight or bias, outside the layer")
            own = self.roots(tensor)
            if own and (len(operands) > 1 or operation.name in EXPANDING):
                carried = operation.layouts[id(tensor)]
                self.record.uses.append(Use(roots=own, carried=carried, made=(*layouts, *written)))
            roots |= own
        return roots

    def _sizes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensor = args[0]
        owners = self.owners.get(id(tensor))
        layout = self.layout(tensor) if owners is None else weight_layout(owners[0], tensor)
        sizes = [length(dim) if is_whole(dim) else Length.product((dim,), self.note) for dim in layout]
        if name in ("numel", "nelement"):
            return (
                Length.product(layout, self.note) if any(isinstance(size, Length) for size in sizes) else tensor.numel()
            )
        if name == "__len__":
            return sizes[0].used() if isinstance(sizes[0], Length) else sizes[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(sizes) if dim is None else sizes[dim]


def _canonical(name: str) -> str:
    """add_, __iadd__ and __radd__ are add."""
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return bare[1:] if bare[:1] in "ir" and bare[1:] in RULES and bare not in RULES else bare
    return name.rstrip("_")


def _fits(layouts: list[Layout], made: list[torch.Tensor]) -> bool:
    return len(layouts) == len(made) and all(
        tuple(length(dim) for dim in layout) == tuple(tensor.shape)
        for layout, tensor in zip(layouts, made, strict=True)
    )


def _memory_of(tensor: torch.Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory
