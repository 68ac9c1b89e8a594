"""Which features stand where along a dim: an algebra of digits, to tell which of them can be shared out.

A dim of 768 features that a view makes 12 heads of 64 is a number of two *digits*, like hours and minutes: which of the
12, and which of the 64. Views, permutations and slices move digits about; what mixes the values of a digit *blocks* it,
and where two tensors meet entry by entry their digits become *the same*. A digit that nothing blocks can be shared out.

    features of a fused projection     768·3  =  768 + 768 + 768          split: parts, one after another
    each of them                          768 =  12 · 64                  view:  factors, outermost first
    scores = q @ k.transpose(-1, -2)             64 is blocked, the 12 of q and the 12 of k are the same

A dim is a tuple of digits, outermost first; a dim of one entry is the empty tuple. Digits are refined as more is seen,
never merged again: whoever holds a dim asks `digits` for what it is made of by now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


class Digit:
    """A number from 0 to size - 1 that is part of where an entry stands along a dim."""

    __slots__ = ("_same", "factors", "parts", "reason", "size")

    def __init__(
        self,
        size: int,
        *,
        factors: tuple[Digit, ...] = (),
        parts: tuple[Digit, ...] = (),
        reason: str | None = None,
    ) -> None:
        self.size = size
        self.factors = factors
        """What it is the product of, outermost first."""
        self.parts = parts
        """Or what it is the sum of, in order."""
        self.reason = reason
        """Why it cannot be shared out, if it cannot; of a digit that is not refined."""
        self._same: Digit | None = None

    @property
    def now(self) -> Digit:
        """The digit that stands for all those that are the same as this one."""
        found = self
        while found._same is not None:
            found = found._same
        return found

    @property
    def is_leaf(self) -> bool:
        return not self.factors and not self.parts

    def become(self, other: Digit) -> None:
        """Be the same from now on; only what is not refined can."""
        self._same = other


SINGLE = "one entry cannot be split"

Dim = tuple[Digit, ...]
Layout = tuple[Dim, ...]


def fresh(size: int) -> Dim:
    """A dim whose entries anybody may share out."""
    return (Digit(size),) if size != 1 else ()


def whole(size: int, reason: str) -> Dim:
    """A dim that nobody can share out."""
    return (Digit(size, reason=reason),) if size != 1 else ()


def digits(dim: Dim) -> Dim:
    """What a dim is made of by now: digits that are not products."""
    found: list[Digit] = []
    for digit in dim:
        digit = digit.now
        if digit.factors:
            found += digits(digit.factors)
        else:
            found.append(digit)
    return tuple(found)


def leaves(dim: Dim) -> Iterator[Digit]:
    """All digits that are not refined, also those of parts."""
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
    """Nothing of this dim can be shared out."""
    for leaf in leaves(dim):
        if leaf.reason is None:
            leaf.reason = reason


def peel(dim: Dim, outer: int) -> tuple[Dim, Dim] | None:
    """A dim as the outermost digits of a number below `outer`, and the rest; None if it does not fall apart so."""
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
    """Make a product of a digit that is none yet."""
    inner = digit.size // outer
    if not digit.parts:
        digit.factors = (Digit(outer, reason=digit.reason), Digit(inner, reason=digit.reason))
        return (digit.factors[0],), (digit.factors[1],)
    if any(part.size % inner for part in digit.parts):
        return None
    halves = [peel((part,), part.size // inner) for part in digit.parts]
    if any(half is None for half in halves):
        return None
    found = [half for half in halves if half is not None]
    for _, rest in found[1:]:
        unify(found[0][1], rest)
    digit.factors = (Digit(outer, parts=tuple(_as_part(first) for first, _ in found)), *found[0][1])
    digit.parts = ()
    return (digit.factors[0],), digit.factors[1:]


def _as_part(dim: Dim) -> Digit:
    if not dim:
        return Digit(1, reason=SINGLE)
    return dim[0] if len(dim) == 1 else Digit(length(dim), factors=dim)


def unify(a: Dim, b: Dim, reason: str = "they meet others in another order") -> None:
    """Entries of two dims of one length meet one by one: their digits are the same, and blocked where one is."""
    left, right = list(digits(a)), list(digits(b))
    while left and right:
        x, y = left[0], right[0]
        common = math.gcd(x.size, y.size)
        if x.size == y.size:
            _unify_digits(x, y, reason)
            # One may have been refined by what the other is.
            left, right = left[1:], right[1:]
            continue
        first, second = (peel(tuple(side), common) for side in (left, right)) if common > 1 else (None, None)
        if first is None or second is None:
            block(tuple(left), reason)
            block(tuple(right), reason)
            return
        unify(first[0], second[0], reason)
        left, right = list(first[1]), list(second[1])


def _unify_digits(x: Digit, y: Digit, reason: str) -> None:
    x, y = x.now, y.now
    if x is y:
        return
    for one, other in ((x, y), (y, x)):
        if one.is_leaf:
            if one.reason is not None:
                block((other,), one.reason)
            elif other.is_leaf and other.reason is not None:
                one.reason = other.reason
            else:
                one.become(other)
            return
    if x.parts and y.parts:
        bounds = sorted({*_bounds(x), *_bounds(y)})
        for mine, yours in zip(cut((x,), bounds), cut((y,), bounds), strict=True):
            unify(mine, yours, reason)
    elif x.parts or y.parts:
        one, other = (x, y) if x.parts else (y, x)
        if peel((one,), digits((other,))[0].size) is None:
            block((one,), reason)
            block((other,), reason)
        else:
            unify((one,), (other,), reason)
    else:
        unify((x,), (y,), reason)


def _bounds(digit: Digit) -> list[int]:
    """Where parts begin, but the first."""
    bounds, place = [], 0
    for part in digit.parts[:-1]:
        place += part.size
        bounds.append(place)
    return bounds


def cut(dim: Dim, bounds: Sequence[int], reason: str = "they are cut inside a unit") -> list[Dim]:
    """The pieces of a dim that begin at 0 and at each of the bounds."""
    size = length(dim)
    inside = [bound for bound in bounds if 0 < bound < size]
    if not inside:
        return [dim]
    lengths = [stop - start for start, stop in zip([0, *inside], [*inside, size], strict=True)]
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
        sizes = [stop - start for start, stop in zip([0, *bounds], [*bounds, digit.size], strict=True)]
        digit.parts = tuple(Digit(size, reason=digit.reason if size > 1 else SINGLE) for size in sizes)
        return [(part,) if part.size > 1 else () for part in digit.parts]
    pieces: list[Dim] = []
    finer: list[Digit] = []
    start = 0
    for part in digit.parts:
        inside = [bound - start for bound in bounds if start < bound < start + part.size]
        made = [_as_part(piece) for piece in cut((part,), inside, reason)]
        finer += made
        start += part.size
    digit.parts = tuple(finer)
    ends = [*bounds, digit.size]
    place, group = 0, []
    for part in finer:
        group.append(part)
        place += part.size
        if place == ends[len(pieces)]:
            whole_piece = group[0] if len(group) == 1 else Digit(sum(p.size for p in group), parts=tuple(group))
            pieces.append((whole_piece,) if whole_piece.size > 1 else ())
            group = []
    return pieces


def join(dims: Sequence[Dim]) -> Dim:
    """Dims one after another."""
    if len(dims) == 1:
        return dims[0]
    size = sum(length(dim) for dim in dims)
    if all(is_whole(dim) for dim in dims):
        why = next((leaf.reason for dim in dims for leaf in leaves(dim)), None)
        return whole(size, why or "single entries were put together")
    return (Digit(size, parts=tuple(_as_part(digits(dim)) for dim in dims)),)


def reshape(layout: Layout, sizes: Sequence[int], reason: str = "a view mixes them with others") -> Layout:
    """The same entries in the same order under other sizes."""
    rest: Dim = tuple(digit for dim in layout for digit in digits(dim))
    made: list[Dim] = []
    for size in sizes:
        halves = peel(rest, size)
        if halves is None:
            block(rest, reason)
            return (*made, *(whole(left, reason) for left in sizes[len(made) :]))
        made.append(halves[0])
        rest = halves[1]
    return tuple(made)
