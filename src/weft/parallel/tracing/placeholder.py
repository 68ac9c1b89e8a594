"""Placeholders for tensors of other pipeline stages: shape, dtype and device, without values.

A stage runs the model's own code from its beginning, although other stages compute most of its blocks. Anything
computed from a `Placeholder` is a `Placeholder`, at the cost of inferring a shape. So the code between a model's blocks
runs as written, and only code that needs a value of another stage fails, with a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import ModelError

_COMPUTED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Properties that return tensors; all others are metadata."""

_META = torch.device("meta")


class Placeholder(torch.Tensor):
    """A tensor of another stage, with everything that a tensor shows but its values."""

    meta: torch.Tensor
    _shape: tuple[int, ...]
    _device: torch.device

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta.detach()
        made._shape, made._device = tuple(meta.shape), device
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or is_in_place(name):
            return absorb(func, args, kwargs or {})
        try:
            return _absorb_described(func, _describe(args), _describe(tuple((kwargs or {}).items())))
        except TypeError:  # an argument that is not hashable, such as a list
            return absorb(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ModelError(f"{func} needs values that are on another stage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self


class PlaceholderModule(nn.Module):
    """Marks a module whose parameters are on another stage; `isinstance` tells it from a real one."""


def is_placeholder(value: object) -> bool:
    """True if a value is a tensor without values: a placeholder, or on the meta device."""
    return isinstance(value, Placeholder) or (isinstance(value, torch.Tensor) and value.is_meta)


@torch.no_grad()
def absorb(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function with operands of which some are placeholders: its results are placeholders too."""
    name = getattr(func, "__name__", "")
    if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED_PROPERTIES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("cpu", "cuda"):
        return args[0]
    if name == "to":
        args = tuple(_META if isinstance(arg, str) else arg for arg in args)
        kwargs = {key: _META if key == "device" else arg for key, arg in kwargs.items()}
    operands = tensor_leaves((args, dict(kwargs)))
    device = next((tensor.device for tensor in operands if not tensor.is_meta), torch.device("cpu"))
    try:
        result = func(*tree_map(to_meta, args), **tree_map(to_meta, dict(kwargs)))
    except Exception as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f'"{name}" is called between the model\'s blocks with a value of another stage, which this one has no '
            f"values of ({problem}); move that code into a block, or train without a pipeline"
        ) from error
    if is_in_place(name) and args:
        if isinstance(args[0], Placeholder) and args[0].meta.shape != torch.Size(args[0]._shape):
            raise ModelError(
                f'"{name}" changes the shape of a tensor in place between the model\'s blocks, where it is on another '
                f'stage; use "{name.rstrip("_")}"'
            )
        return None if name == "__setitem__" else args[0]
    return tree_map(lambda leaf: Placeholder(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, result)


class _Described(NamedTuple):
    """An argument by type, because 1 == 1.0 == True, and value; a tensor by the metadata that decides result shapes."""

    kind: type
    value: Any


def _describe(value: Any) -> _Described:
    """A hashable description of an argument that keeps no tensor alive."""
    if isinstance(value, Placeholder):
        return _Described(torch.Tensor, (value.meta.shape, value.meta.stride(), value.meta.dtype, value._device))
    if isinstance(value, torch.Tensor):
        return _Described(torch.Tensor, (value.shape, value.stride(), value.dtype, value.device))
    return _Described(type(value), tuple(map(_describe, value)) if type(value) is tuple else value)


def _restore(described: _Described) -> Any:
    kind, value = described
    if kind is torch.Tensor:
        shape, stride, dtype, device = value
        return Placeholder(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)
    return tuple(map(_restore, value)) if kind is tuple else value


@functools.lru_cache(maxsize=4096)
def _absorb_described(func: Callable[..., Any], args: _Described, kwargs: _Described) -> Any:
    """`absorb`, cached: shapes repeat between microbatches, and inferring one costs more than an addition."""
    return absorb(func, _restore(args), dict(_restore(kwargs)))


def is_in_place(name: str) -> bool:
    """True if a function of this name writes into its first operand."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def to_meta(value: Any) -> Any:
    """A tensor without its values, the meta device for a device, any other leaf unchanged."""
    if isinstance(value, Placeholder):
        return value.meta
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return _META if isinstance(value, torch.device) else value


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory."""
    storage: int = (tensor.meta if isinstance(tensor, Placeholder) else tensor).untyped_storage()._cdata
    return storage
