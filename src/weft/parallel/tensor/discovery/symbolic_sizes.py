"""Sizes that a model's code reads off tensors, and what becomes of them where a tensor is shared out.

`x.shape[-1]` of a share is a share's size. So while a model is followed, a size of something that might be shared out
is a `Length`: a whole number that knows how it was computed, so that it can be computed again for any rank. What the
code does with it other than whole-number arithmetic (a comparison, a square root) is noted, and must come out the same
on all ranks. What Python computes without asking goes unnoticed: 1.0 / n, or how often a loop over range(n) runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.parallel.tensor.discovery.features import Dim, length

Local = Callable[[Dim], int]
"""How long a dim is on some rank."""
Compute = Callable[[Local], Any]
Note = Callable[[tuple[Dim, ...], Compute, Any], None]


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
    note: Note

    @classmethod
    def make(cls, value: int, dims: tuple[Dim, ...], compute: Compute, note: Note) -> Length:
        made = cls(value)
        made.dims, made.compute, made.note = dims, compute, note
        return made

    @classmethod
    def product(cls, dims: tuple[Dim, ...], note: Note) -> Length:
        value = math.prod(length(dim) for dim in dims)
        return cls.make(value, dims, lambda local: math.prod(local(dim) for dim in dims), note)

    def used(self) -> int:
        """Its value, for somebody who does not know that it may be another elsewhere."""
        self.note(self.dims, self.compute, plain(self))
        return int.__int__(self)

    # What somebody remembers by sizes from an earlier pass has another history.
    __hash__ = object.__hash__


def plain(value: Any) -> Any:
    """A number without its history."""
    return int.__int__(value) if isinstance(value, Length) else value


def local_value(value: Any, local: Local) -> Any:
    """What a number is on some rank."""
    return value.compute(local) if isinstance(value, Length) else value


def _whole(function: Callable[[Any, Any], Any], *, is_swapped: bool = False) -> Callable[[Length, Any], Any]:
    """Arithmetic that makes whole numbers of whole numbers."""

    def method(self: Length, other: Any) -> Any:
        if not isinstance(other, int):
            return function(other, self.used()) if is_swapped else function(self.used(), other)
        pair = (other, self) if is_swapped else (self, other)
        dims = tuple(dim for one in pair if isinstance(one, Length) for dim in one.dims)

        def compute(local: Local) -> Any:
            return function(*(local_value(one, local) for one in pair))

        return Length.make(function(*map(plain, pair)), dims, compute, self.note)

    return method


def _noted(function: Callable[..., Any], *, is_swapped: bool = False) -> Callable[..., Any]:
    """Anything else."""

    def method(self: Length, *others: Any) -> Any:
        if any(not isinstance(other, int | float | None) for other in others):
            return NotImplemented
        values = (*others, self) if is_swapped else (self, *others)
        dims = tuple(dim for one in values if isinstance(one, Length) for dim in one.dims)

        def compute(local: Local) -> Any:
            return function(*(local_value(one, local) for one in values))

        found = function(*map(plain, values))
        self.note(dims, compute, found)
        return found

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Length, f"__{_name}__", _whole(getattr(operator, _name)))
    setattr(Length, f"__r{_name}__", _whole(getattr(operator, _name), is_swapped=True))
for _name in ("truediv", "pow", "lshift", "rshift"):
    setattr(Length, f"__{_name}__", _noted(getattr(operator, _name)))
    setattr(Length, f"__r{_name}__", _noted(getattr(operator, _name), is_swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(Length, f"__{_name}__", _noted(getattr(operator, _name)))
for _function in (float, int, bool, divmod, round, math.trunc, math.floor, math.ceil):
    setattr(Length, f"__{_function.__name__}__", _noted(_function))
