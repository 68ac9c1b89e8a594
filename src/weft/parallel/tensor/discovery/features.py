"""Digits: an algebra that tracks which features of a layer are where along the dims of a tensor (see README.md).

A dim is a tuple of digits, outermost first; a dim of one entry is the empty tuple. Digits are refined as more is seen
and never merged again: `digits` returns the current refinement of a dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(slots=True, eq=False)
class Digit:
    """A number from 0 to size - 1 that is part of an entry's position along a dim."""

    size: int
    factors: tuple[Digit, ...] = ()
    """Digits that it is the product of, outermost first."""
    parts: tuple[Digit, ...] = ()
    """Or digits that it is the sum of, in order."""
    reason: str | None = None
    """The reason why it cannot be split, if it is blocked; for a digit without factors and parts."""
    same_as: Digit | None = None
    """The digit that this one was unified with."""

    @property
    def representative(self) -> Digit:
        """The one digit that stands for all that were unified with this one."""
        found = self
        while found.same_as is not None:
            found = found.same_as
        return found

    @property
    def is_leaf(self) -> bool:
        return not self.factors and not self.parts


SINGLE = "one entry cannot be split"

Dim = tuple[Digit, ...]
Layout = tuple[Dim, ...]


def fresh(size: int) -> Dim:
    """A new dim that can be split."""
    return (Digit(size),) if size != 1 else ()


def whole(size: int, reason: str) -> Dim:
    """A new dim that cannot be split."""
    return (Digit(size, reason=reason),) if size != 1 else ()


def digits(dim: Dim) -> Dim:
    """The current digits of a dim: none of them is a product."""
    found: list[Digit] = []
    for digit in dim:
        digit = digit.representative
        if digit.factors:
            found += digits(digit.factors)
        else:
            found.append(digit)
    return tuple(found)


def leaves(dim: Dim) -> Iterator[Digit]:
    """All digits of a dim that are not refined, also inside parts."""
    for digit in digits(dim):
        if digit.parts:
            yield from leaves(digit.parts)
        else:
            yield digit


def length(dim: Dim) -> int:
    return math.prod(digit.size for digit in dim)


def is_whole(dim: Dim) -> bool:
    return all(leaf.reason is not None for leaf in leaves(dim))


def block(dim: Dim, reason: str) -> None:
    """Mark all digits of a dim as not splittable."""
    for leaf in leaves(dim):
        if leaf.reason is None:
            leaf.reason = reason


def split_outer(dim: Dim, outer: int) -> tuple[Dim, Dim] | None:
    """The outermost digits of a dim, with product `outer`, and the rest; None if no digits have that product."""
    taken: list[Digit] = []
    rest = list(digits(dim))
    while outer > 1:
        if not rest:
            return None
        first = rest.pop(0)
        common = math.gcd(first.size, outer)
        if common == 1:
            return None
        if common < first.size:
            halves = _refine(first, common)
            if halves is None:
                return None
            rest = [*digits(halves[1]), *rest]
            taken += digits(halves[0])
        else:
            taken.append(first)
        outer //= common
    return tuple(taken), tuple(rest)


def _refine(digit: Digit, outer: int) -> tuple[Dim, Dim] | None:
    """Turn a digit into a product of an outer and an inner one."""
    inner = digit.size // outer
    if not digit.parts:
        digit.factors = (Digit(outer, reason=digit.reason), Digit(inner, reason=digit.reason))
        return digit.factors[:1], digit.factors[1:]
    if any(part.size % inner for part in digit.parts):
        return None
    halves = [split_outer((part,), part.size // inner) for part in digit.parts]
    found = [half for half in halves if half is not None]
    if len(found) < len(halves):
        return None
    for _, rest in found[1:]:
        unify(found[0][1], rest)
    digit.factors = (Digit(outer, parts=tuple(_as_part(first) for first, _ in found)), *found[0][1])
    digit.parts = ()
    return digit.factors[:1], digit.factors[1:]


def _as_part(dim: Dim) -> Digit:
    if not dim:
        return Digit(1, reason=SINGLE)
    return dim[0] if len(dim) == 1 else Digit(length(dim), factors=dim)


def unify(a: Dim, b: Dim, reason: str = "they are combined with others in another order") -> None:
    """Make the digits of two dims the same, as they are combined entry by entry; blocked where one is blocked."""
    left, right = list(digits(a)), list(digits(b))
    while left and right:
        x, y = left[0], right[0]
        common = math.gcd(x.size, y.size)
        if x.size == y.size:
            _unify_digits(x, y, reason)
            left, right = left[1:], right[1:]
            continue
        first, second = (split_outer(tuple(side), common) for side in (left, right)) if common > 1 else (None, None)
        if first is None or second is None:
            block(tuple(left), reason)
            block(tuple(right), reason)
            return
        unify(first[0], second[0], reason)
        left, right = list(first[1]), list(second[1])


def _unify_digits(x: Digit, y: Digit, reason: str) -> None:
    x, y = x.representative, y.representative
    if x is y:
        return
    for one, other in ((x, y), (y, x)):
        if one.is_leaf:
            if one.reason is not None:
                block((other,), one.reason)
            elif other.is_leaf and other.reason is not None:
                one.reason = other.reason
            else:
                one.same_as = other
            return
    if x.parts and y.parts:
        bounds = sorted({end for one in (x, y) for end in accumulate(part.size for part in one.parts[:-1])})
        for mine, yours in zip(cut((x,), bounds), cut((y,), bounds), strict=True):
            unify(mine, yours, reason)
    elif x.parts or y.parts:
        one, other = (x, y) if x.parts else (y, x)
        if split_outer((one,), digits((other,))[0].size) is None:
            block((one,), reason)
            block((other,), reason)
        else:
            unify((one,), (other,), reason)
    else:
        unify((x,), (y,), reason)


def cut(dim: Dim, bounds: Sequence[int], reason: str = "they are cut inside a unit") -> list[Dim]:
    """The pieces of a dim that start at 0 and at each of the bounds."""
    size = length(dim)
    inside = [bound for bound in bounds if 0 < bound < size]
    if not inside:
        return [dim]
    lengths = [stop - start for start, stop in pairwise([0, *inside, size])]
    if is_whole(dim):
        why = next(leaf.reason for leaf in leaves(dim)) or reason
        return [whole(piece, why) for piece in lengths]
    first, *rest = digits(dim)
    inner = length(tuple(rest))
    if any(bound % inner for bound in inside):
        block(dim, reason)
        return [whole(piece, reason) for piece in lengths]
    return [(*piece, *rest) for piece in _cut_digit(first, [bound // inner for bound in inside], reason)]


def _cut_digit(digit: Digit, bounds: list[int], reason: str) -> list[Dim]:
    if not digit.parts:
        sizes = [stop - start for start, stop in pairwise([0, *bounds, digit.size])]
        digit.parts = tuple(Digit(size, reason=digit.reason if size > 1 else SINGLE) for size in sizes)
        return [(part,) if part.size > 1 else () for part in digit.parts]
    finer: list[Digit] = []
    start = 0
    for part in digit.parts:
        inside = [bound - start for bound in bounds if start < bound < start + part.size]
        finer += [_as_part(piece) for piece in cut((part,), inside, reason)]
        start += part.size
    digit.parts = tuple(finer)
    pieces: list[Dim] = []
    for size in (stop - start for start, stop in pairwise([0, *bounds, digit.size])):
        group = [finer.pop(0)]
        while sum(part.size for part in group) < size:
            group.append(finer.pop(0))
        piece = group[0] if len(group) == 1 else Digit(size, parts=tuple(group))
        pieces.append((piece,) if size > 1 else ())
    return pieces


def join(dims: Sequence[Dim]) -> Dim:
    """Dims concatenated."""
    if len(dims) == 1:
        return dims[0]
    size = sum(length(dim) for dim in dims)
    if all(is_whole(dim) for dim in dims):
        why = next((leaf.reason for dim in dims for leaf in leaves(dim)), None)
        return whole(size, why or "single entries were concatenated")
    return (Digit(size, parts=tuple(_as_part(digits(dim)) for dim in dims)),)


def reshape(layout: Layout, sizes: Sequence[int], reason: str = "a view mixes them with others") -> Layout:
    """The same entries in the same order with other sizes."""
    rest: Dim = tuple(digit for dim in layout for digit in digits(dim))
    made: list[Dim] = []
    for size in sizes:
        halves = split_outer(rest, size)
        if halves is None:
            block(rest, reason)
            return (*made, *(whole(left, reason) for left in sizes[len(made) :]))
        made.append(halves[0])
        rest = halves[1]
    return tuple(made)
