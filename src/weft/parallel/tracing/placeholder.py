"""Tensors that are on another stage: shape, dtype and device of a value, without the value.

A stage runs the model's own code from its beginning, and what other stages compute is not there. An `Placeholder`
stands in for it: whatever is computed with one is absent too, at the price of a shape. So the code between a model's
blocks runs as it was written, and only what really depends on a value that is elsewhere can fail, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import ModelError

_MAKES_TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes that are computed; the others are read off."""

_META = torch.device("meta")


class Placeholder(torch.Tensor):
    """A tensor of another stage, of which this one knows what any tensor shows without its values."""

    meta: torch.Tensor
    _shape: tuple[int, ...]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta.detach()
        made._shape = tuple(meta.shape)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _absorb_again(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types, args, kwargs
        raise ModelError(f"{func} needs values that are on another stage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self


class PlaceholderModule(nn.Module):
    """Marks a module whose parameters are on another stage; `isinstance` tells it from a real one."""


def is_placeholder(value: object) -> bool:
    """Whether something has no values here: absent, or on the meta device."""
    return isinstance(value, Placeholder) or (isinstance(value, torch.Tensor) and value.is_meta)


@torch.no_grad()
def absorb(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with operands some of which are absent: its results are absent too."""
    name = getattr(func, "__name__", "")
    if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _MAKES_TENSORS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("cpu", "cuda"):
        return args[0]
    if name == "to":
        args = tuple(_META if isinstance(arg, str) else arg for arg in args)
        kwargs = {key: _META if key == "device" else arg for key, arg in kwargs.items()}
    operands = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in operands if not tensor.is_meta), torch.device("cpu"))
    try:
        result = func(*tree_map(to_meta, args), **tree_map(to_meta, dict(kwargs)))
    except Exception as error:
        raise ModelError(
            f'"{name}" is called between the model\'s blocks with a value of another stage, which this one has no '
            f"values of ({_first_line(error)}); move that code into a block, or train without a pipeline"
        ) from error
    if is_in_place(name) and args:  # what is written into has the shape it had
        if isinstance(args[0], Placeholder) and args[0].meta.shape != torch.Size(args[0]._shape):
            raise ModelError(
                f'"{name}" changes the shape of a tensor in place between the model\'s blocks, where it is on another '
                f'stage; use "{name.rstrip("_")}"'
            )
        return None if name == "__setitem__" else args[0]
    return tree_map(lambda leaf: Placeholder(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, result)


_absorbed: dict[Any, Any] = {}
_MOST_ABSORBED = 4096


def _absorb_again(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The same, remembered: shapes repeat from microbatch to microbatch, and asking for one costs more than an add."""
    name = getattr(func, "__name__", "")
    if name == "__get__" or is_in_place(name):
        return absorb(func, args, kwargs)
    try:
        key = (func, tuple(map(_describe, args)), tuple((name, _describe(arg)) for name, arg in kwargs.items()))
        if key not in _absorbed:
            if len(_absorbed) >= _MOST_ABSORBED:
                _absorbed.clear()
            _absorbed[key] = absorb(func, args, kwargs)
        return _absorbed[key]
    except TypeError:  # an argument that cannot be told from others, such as a list of tensors
        return absorb(func, args, kwargs)


def _describe(value: Any) -> Any:
    if isinstance(value, Placeholder):
        return value.meta.shape, value.meta.stride(), value.meta.dtype
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value), value  # 1 and 1.0 and True are equal


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes into its first operand."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def to_meta(value: Any) -> Any:
    """The same leaf of a tree of operands, without values."""
    if isinstance(value, Placeholder):
        return value.meta
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        )
    return _META if isinstance(value, torch.device) else value


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
