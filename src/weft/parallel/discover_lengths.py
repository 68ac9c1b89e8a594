"""Sizes that a model's code reads off tensors, and what becomes of them where a tensor is shared out.

`x.shape[-1]` of a share is a share's size. So while a model is followed, a size of something that might be shared out
is a `Length`: a whole number that knows how it was computed, so that it can be computed again for any rank. What the
code does with it other than arithmetic (a comparison, a square root) is noted, and must come out the same on all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from weft.parallel.features import Dim, length

Local = Callable[[Dim], int]
"""How long a dim is on some rank."""
Compute = Callable[[Local], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that the code found out about sizes, and must find on every rank."""

    dims: tuple[Dim, ...]
    """What it depends on."""
    compute: Compute
    expected: Any
    module: str


class Length(int):
    """The size of something that may be shared out."""

    dims: tuple[Dim, ...]
    compute: Compute
    note: Callable[[tuple[Dim, ...], Compute, Any], None]

    @classmethod
    def of(cls, dim: Dim, note: Callable[[tuple[Dim, ...], Compute, Any], None]) -> Self:
        return cls._make(length(dim), (dim,), lambda local: local(dim), note)

    @classmethod
    def product(cls, dims: tuple[Dim, ...], note: Callable[[tuple[Dim, ...], Compute, Any], None]) -> Self:
        value = math.prod(length(dim) for dim in dims)
        return cls._make(value, dims, lambda local: math.prod(local(dim) for dim in dims), note)

    @classmethod
    def _make(cls, value: int, dims: tuple[Dim, ...], compute: Compute, note: Any) -> Self:
        made = cls(value)
        made.dims, made.compute, made.note = dims, compute, note
        return made

    def used(self) -> int:
        """Its value, for somebody who does not know that it may be another elsewhere."""
        value = int.__int__(self)
        self.note(self.dims, self.compute, value)
        return value

    # What somebody remembered by sizes in an earlier pass has another history.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return int, (self.used(),)


def plain(value: Any) -> Any:
    """A whole number without its history."""
    return int.__int__(value) if isinstance(value, Length) else value


def local_value(value: Any, local: Local) -> Any:
    """What a number is on some rank."""
    return value.compute(local) if isinstance(value, Length) else value


def _arithmetic(name: str, function: Callable[[Any, Any], Any], *, is_swapped: bool) -> Callable[[Length, Any], Any]:
    def method(self: Length, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented if name in _WHOLE else getattr(int.__int__(self), name)(other)
        theirs = other.dims if isinstance(other, Length) else ()

        def compute(local: Local) -> Any:
            pair = local_value(self, local), local_value(other, local)
            return function(*reversed(pair)) if is_swapped else function(*pair)

        value = function(plain(other), plain(self)) if is_swapped else function(plain(self), plain(other))
        if name in _WHOLE:
            return Length._make(value, (*self.dims, *theirs), compute, self.note)
        self.note((*self.dims, *theirs), compute, value)
        return value

    return method


def _conversion(function: Callable[[Any], Any]) -> Callable[[Length], Any]:
    def method(self: Length) -> Any:
        value = function(int.__int__(self))
        self.note(self.dims, lambda local: function(self.compute(local)), value)
        return value

    return method


_WHOLE = {f"__{kind}{name}__" for kind in ("", "r") for name in ("add", "sub", "mul", "floordiv", "mod")}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    for _kind in ("", "r"):
        _method = f"__{_kind}{_name}__"
        setattr(Length, _method, _arithmetic(_method, getattr(operator, _name), is_swapped=_kind == "r"))
for _name in _COMPARISONS:
    setattr(Length, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), is_swapped=False))
for _name, _function in (("float", float), ("bool", bool), ("int", int), ("neg", operator.neg)):
    setattr(Length, f"__{_name}__", _conversion(_function))
