"""Symbolic sizes: the sizes that a model's code reads off tensors, computable again for any rank's shard.

`x.shape[-1]` of a shard is the shard's size. So while a model is followed, the size of a dim that might be split is a
`SymbolicInt`, which knows how it was computed. Any use of it other than integer arithmetic (a comparison, a square
root) is recorded as a `Check`, whose result must be the same on all ranks. Python hides some uses from the operand:
1.0 / n, or the number of iterations of range(n).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.parallel.tensor.discovery.features import Dim, length

Local = Callable[[Dim], int]
"""Returns the length of a dim on some rank."""
Compute = Callable[[Local], Any]
Note = Callable[[tuple[Dim, ...], Compute, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A result that the code computed from sizes, and must get on every rank."""

    dims: tuple[Dim, ...]
    """Dims that it depends on."""
    compute: Compute
    expected: Any
    module: str


class SymbolicInt(int):
    """The size of a dim, or a number computed from sizes, that may differ between ranks."""

    dims: tuple[Dim, ...]
    compute: Compute
    note: Note

    @classmethod
    def make(cls, value: int, dims: tuple[Dim, ...], compute: Compute, note: Note) -> SymbolicInt:
        made = cls(value)
        made.dims, made.compute, made.note = dims, compute, note
        return made

    @classmethod
    def product(cls, dims: tuple[Dim, ...], note: Note) -> SymbolicInt:
        value = math.prod(length(dim) for dim in dims)
        return cls.make(value, dims, lambda local: math.prod(local(dim) for dim in dims), note)

    def used(self) -> int:
        """The plain value, which must then be the same on all ranks."""
        self.note(self.dims, self.compute, plain(self))
        return int.__int__(self)

    # A cache that the model keeps by sizes from an earlier pass holds sizes of another origin.
    __hash__ = object.__hash__


def plain(value: Any) -> Any:
    return int.__int__(value) if isinstance(value, SymbolicInt) else value


def local_value(value: Any, local: Local) -> Any:
    """The value of a number on some rank."""
    return value.compute(local) if isinstance(value, SymbolicInt) else value


def _method(function: Callable[..., Any], *, is_symbolic: bool, is_swapped: bool = False) -> Callable[..., Any]:
    """An operator whose result is symbolic if all operands are integers, or else is checked."""

    def method(self: SymbolicInt, *others: Any) -> Any:
        if is_symbolic and not isinstance(others[0], int):
            return function(others[0], self.used()) if is_swapped else function(self.used(), others[0])
        if any(not isinstance(other, int | float | None) for other in others):
            return NotImplemented
        values = (*others, self) if is_swapped else (self, *others)
        dims = tuple(dim for one in values if isinstance(one, SymbolicInt) for dim in one.dims)

        def compute(local: Local) -> Any:
            return function(*(local_value(one, local) for one in values))

        found = function(*map(plain, values))
        if is_symbolic:
            return SymbolicInt.make(found, dims, compute, self.note)
        self.note(dims, compute, found)
        return found

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "lshift", "rshift"):
    _is_symbolic = _name in ("add", "sub", "mul", "floordiv", "mod")
    setattr(SymbolicInt, f"__{_name}__", _method(getattr(operator, _name), is_symbolic=_is_symbolic))
    setattr(SymbolicInt, f"__r{_name}__", _method(getattr(operator, _name), is_symbolic=_is_symbolic, is_swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(SymbolicInt, f"__{_name}__", _method(getattr(operator, _name), is_symbolic=False))
for _function in (float, int, bool, divmod, round, math.trunc, math.floor, math.ceil):
    setattr(SymbolicInt, f"__{_function.__name__}__", _method(_function, is_symbolic=False))
