"""Following a model through one forward pass, to see where each feature of each layer goes.

The model's own code runs on the meta device, at the size of the whole model. Every function of torch that it calls is
seen: `RULES` say what it does to the digits (`features.py`) of its operands, and a function without a rule blocks them
all. So what is found is true of any model, or nothing is found; nothing is guessed from names.

Beside digits, tensors have *roots*: the parameters and layers that their gradients flow back to. A whole tensor used
on shares has only a part of its gradient on each rank, and one must know who is to add those up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import ModelError
from weft.parallel.absent import is_in_place, to_meta
from weft.parallel.discover_lengths import Check, Compute, Length
from weft.parallel.discover_operation import Operation
from weft.parallel.discover_records import End, Held, Layer, NotedCall, Record, Use
from weft.parallel.discover_rules import EXPANDING, HARMLESS, RULES
from weft.parallel.features import Dim, Layout, block, fresh, is_whole, leaves, length, whole
from weft.parallel.resized import SIZED

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
UNKNOWN = 1
"""Root of what was made by something that is not seen."""
COUNTED = {"in_features": "inputs", "in_channels": "inputs", "nx": "inputs", "num_embeddings": "rows"}
COUNTED |= {"out_features": "outputs", "out_channels": "outputs", "nf": "outputs", "embedding_dim": "outputs"}
"""Attributes of layers that count what may be shared out."""
SHAPES = ("shape", "size", "numel", "nelement", "__len__")


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one whose weight weft knows how to cut: exactly torch's, or a transposed linear layer."""
    known = type(module) in LAYERS or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    return known and isinstance(module._parameters.get("weight"), nn.Parameter)


def follow(model: nn.Module, call: Callable[[nn.Module], Any], *, whole_between: Collection[str] = ()) -> Record:
    """Follow one forward pass of a copy of a model. What leaves the modules `whole_between` stays whole."""
    twin = _make_twin(model)
    tracer = Tracer(twin, next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu")))
    with torch.enable_grad(), tracer.watching(whole_between), tracer, _Unseen(tracer):
        try:
            output = call(twin)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f'"{tracer.module or type(model).__name__}" cannot be followed without values ({type(error).__name__}: '
                f"{error}), which is how weft finds out how a model splits over the tensor axis; declare its `regions` "
                "in weft_blueprint()"
            ) from error
    tracer.finish(output)
    return tracer.record


def _make_twin(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory, and all learn: what is frozen today may not be tomorrow."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        bare = to_meta(parameter.detach())
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=bare.is_floating_point() or bare.is_complex())
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.eval()  # shapes are the same, and one sample is no reason to refuse
    return twin


class Tracer(TorchFunctionMode):
    """Sees every function of torch that a model calls."""

    def __init__(self, twin: nn.Module, device: torch.device) -> None:
        """`device`: where the model's code is to think that it runs, so that what it makes itself has values."""
        super().__init__()
        self._device = device
        self.names: list[str] = []
        """Modules that are running, one inside the other."""
        self.is_inside = False
        """A function that has been seen is running, and what it calls itself is its own affair."""
        self._twin = twin
        self.record = Record(modules=dict(twin.named_modules()))
        self._layouts: dict[int, Layout] = {}
        self._roots: dict[int, int] = {}  # by memory
        self._alive: list[torch.Tensor] = []  # an id means nothing once its tensor is gone
        self._order = 0
        self._given: set[int] = set()  # ids that come straight from the model's inputs
        self._calls: list[list[NotedCall]] = []
        self.owners: dict[int, list[Layer]] = {}
        """Layers by their weights and biases; several where those are tied."""
        self._enter_parameters()

    def _enter_parameters(self) -> None:
        num_bits = 1
        for name, module in self.record.modules.items():
            if is_layer(module):
                layer = self._make_layer(name, module, 1 << num_bits)
                num_bits += 1
                self.record.layers[name] = layer
                for parameter in module.parameters(recurse=False):
                    self.owners.setdefault(id(parameter), []).append(layer)
        buffers = {id(buffer) for buffer in self._twin.buffers()}
        for name, tensor in (*self._twin.named_parameters(), *self._twin.named_buffers()):
            is_layers = id(tensor) in self.owners
            for layer in self.owners.get(id(tensor), ()):
                layer.names |= {own: name for own, one in layer.module._parameters.items() if one is tensor}
            reason = "its weight is used outside the layer"
            layout = tuple(whole(size, reason) if is_layers else fresh(size) for size in tensor.shape)
            held = Held(name=name, layout=layout, bit=1 << num_bits, is_parameter=id(tensor) not in buffers)
            num_bits += 1
            self.record.held.append(held)
            if len(self.owners.get(id(tensor), ())) > 1:
                names = tuple(layer.name for layer in self.owners[id(tensor)])
                for layer in self.owners[id(tensor)]:
                    layer.tied = names
            self.put(tensor, layout, held.bit)
            if not is_layers:
                self.record.layouts.append(layout)

    def _make_layer(self, name: str, module: nn.Module, bit: int) -> Layer:
        """A layer, the numbers in whose attributes are what they will be on each rank."""
        layer = Layer(name=name, module=module, bit=bit)
        for attribute, kind in COUNTED.items():
            value = getattr(module, attribute, None)
            if isinstance(value, int):
                dim: Dim = getattr(layer, kind) or fresh(value)
                setattr(layer, kind, dim)
                setattr(module, attribute, Length.of(dim, self.note) if dim else value)
        return layer

    # What is known of tensors

    @property
    def module(self) -> str:
        """The module whose own code is running."""
        return self.names[-1] if self.names else ""

    def layout(self, tensor: torch.Tensor) -> Layout:
        found = self._layouts.get(id(tensor))
        if found is None:
            if tensor.requires_grad:  # made by something that is not seen, from nobody knows what
                for layer in self.record.layers.values():
                    block(layer.outputs, self._unfollowed())
            found = tuple(whole(size, "it meets a tensor that is whole") for size in tensor.shape)
            self._layouts[id(tensor)] = found
            self._alive.append(tensor)
        return found

    def roots(self, tensor: torch.Tensor) -> int:
        return self._roots.get(_memory_of(tensor), UNKNOWN) if tensor.requires_grad else 0

    def put(self, tensor: torch.Tensor, layout: Layout, roots: int) -> None:
        """Note what a new tensor is made of."""
        self._alive.append(tensor)
        self._layouts[id(tensor)] = layout
        memory = _memory_of(tensor)
        self._roots[memory] = self._roots.get(memory, 0) | roots
        if sum(leaf.reason is None for dim in layout for leaf in leaves(dim)) > 1:
            self.record.layouts.append(layout)

    def end(self, tensor: torch.Tensor) -> None:
        if self.roots(tensor):
            self.record.ends.append(End(roots=self.roots(tensor), layout=self.layout(tensor)))

    def is_counted(self) -> bool:
        """Whether the module that is running takes its number of groups from an attribute that weft knows."""
        return type(self.record.modules[self.module]) is nn.GroupNorm

    def unseen(self, args: Any) -> None:
        """An operator was called by something that is no function of torch: compiled code, say."""
        for tensor in (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)):
            block_all(self.layout(tensor), self._unfollowed())
            self.end(tensor)

    def _unfollowed(self) -> str:
        return f'something in "{self.module}" cannot be followed'

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def is_given(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._given

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
            return self._see(func, args, kwargs)
        finally:
            self.is_inside = False

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        raw = getattr(func, "__name__", "")
        name = func.__self__.__name__ if raw == "__get__" else raw.partition(".")[0]
        named = dict(kwargs or {})
        operands = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        if name in SHAPES and operands:
            return self._sizes(name, args, named)
        if name == "device":
            return self._device if args[0].is_meta else args[0].device
        if name in HARMLESS or raw in ("__set__", "__delete__"):
            return func(*args, **named)
        before = {id(tensor): tensor._version for tensor in operands}
        layouts = {id(tensor): self.layout(tensor) for tensor in operands}
        result = self._run(func, args, named, operands)
        operation = Operation(
            name=_canonical(name), args=args, kwargs=named, result=result, tracer=self, layouts=layouts
        )
        if raw in SIZED and self._calls:
            operation.call = NotedCall(function=raw)
            self._calls[-1].append(operation.call)
        self._apply(operation, operands)
        if is_in_place(raw) or raw == "__setitem__" or any(t._version > before[id(t)] for t in operands[:1]):
            self._write(operands)
        for value in tree_leaves((args, named)):
            if isinstance(value, Length) and not operation.knows(value):
                value.used()
        return result

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        if any(tensor.is_meta for tensor in operands):
            args, kwargs = tree_map(to_meta, args), tree_map(to_meta, kwargs)
            if getattr(func, "__name__", "") in ("to", "cpu", "cuda"):
                args = tuple(arg for arg in args if not isinstance(arg, str))
                kwargs = {name: value for name, value in kwargs.items() if name != "device"}
                func = torch.Tensor.to if len(args) + len(kwargs) > 1 else torch.Tensor.clone
        return func(*args, **kwargs)

    def _apply(self, operation: Operation, operands: list[torch.Tensor]) -> None:
        made = [leaf for leaf in tree_leaves(operation.result) if isinstance(leaf, torch.Tensor)]
        rule = RULES.get(operation.name)
        found = None if rule is None or "out" in operation.kwargs else rule(operation)
        if found is not None and _fits(found, made):
            layouts = found
        else:
            for tensor in operands:
                block_all(self.layout(tensor), operation.why("is not known to keep features apart"))
                self.end(tensor)
            layouts = [tuple(whole(size, f"{operation.name} made it") for size in tensor.shape) for tensor in made]
        if not operation.is_layer:
            for layer in (layer for tensor in operands for layer in self.owners.get(id(tensor), ())):
                layer.refused = operation.why("uses its weight or bias, outside the layer")
        if operation.is_layer:
            for tensor, layout in zip(made, layouts, strict=True):
                self.put(tensor, layout, operation.roots)
            return
        roots = 0
        for tensor in operands:
            roots |= self.roots(tensor)
        if len(operands) > 1 or operation.name in EXPANDING:
            self.record.uses += [
                Use(roots=self.roots(tensor), carried=operation.layouts[id(tensor)], made=operation.all_made(layouts))
                for tensor in operands
                if self.roots(tensor)
            ]
        is_new = {id(tensor) for tensor in operands}
        for tensor, layout in zip(made, layouts, strict=True):
            if id(tensor) not in is_new:
                self.put(tensor, layout, roots if tensor.requires_grad else 0)
        if len(operands) == 1 and self.is_given(operands[0]) and len(made) == 1:
            self._given.add(id(made[0]))

    def _write(self, operands: list[torch.Tensor]) -> None:
        """The first operand has been written into."""
        roots = 0
        for tensor in operands:
            roots |= self.roots(tensor)
        memory = _memory_of(operands[0])
        self._roots[memory] = self._roots.get(memory, 0) | roots

    def _sizes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensor = args[0]
        layout = self.layout(tensor)
        if name in ("numel", "nelement"):
            return tensor.numel() if block_free(layout) else Length.product(layout, self.note)
        sizes = [length(dim) if is_whole(dim) else Length.of(dim, self.note) for dim in layout]
        if name == "__len__":
            return sizes[0].used() if isinstance(sizes[0], Length) else sizes[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(sizes) if dim is None else sizes[dim]

    # Which module is running

    @contextmanager
    def watching(self, whole_between: Collection[str]) -> Iterator[None]:
        """Know whose code runs inside."""
        for name, module in self._twin.named_modules():
            module.forward = self._make_watched(name, module.forward, name in whole_between)
        yield

    def _make_watched(self, name: str, forward: Callable[..., Any], must_be_whole: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.names:
                self._given |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
                self._alive += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            calls: list[NotedCall] = []
            self.record.calls.setdefault(name, []).append(calls)
            self.names.append(name)
            self._calls.append(calls)
            output = forward(*args, **kwargs)
            self.names.pop()
            self._calls.pop()
            if must_be_whole:
                for leaf in tensors_of(output):
                    block_all(self.layout(leaf), f'it leaves "{name}"')
            return output

        return watched

    def finish(self, output: Any) -> None:
        """Note what the model returns."""
        tensors = tensors_of(output)
        is_alone = len(tensors) == 1 and tensors[0].is_floating_point() and tensors[0].dim() > 0
        for tensor in tensors:
            layout = self.layout(tensor)
            self.end(tensor)
            if is_alone:
                self.record.output = layout[-1]
                layout = layout[:-1]
            block_all(layout, "the model returns it")


class _Unseen(TorchDispatchMode):
    """Notices operators that no function of torch which was seen has called."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.is_inside:
            return func(*args, **(kwargs or {}))
        self.tracer.is_inside = True
        try:
            self.tracer.unseen((args, kwargs))
            return func(*args, **(kwargs or {}))
        finally:
            self.tracer.is_inside = False


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in what a model returns, also those inside objects."""
    found, seen = [], set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif not isinstance(value, type | nn.Module) and hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return found


def block_all(layout: Layout, reason: str) -> None:
    for dim in layout:
        block(dim, reason)


def block_free(layout: Layout) -> bool:
    return all(is_whole(dim) for dim in layout)


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
