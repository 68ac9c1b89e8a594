"""If these digits are shared out: what each rank has of every dim that they stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.parallel.tensor.discovery.features import Digit, Dim, Layout, digits, leaves
from weft.parallel.tensor.discovery.symbolic_sizes import Local
from weft.plan.partition.tensor import Range, Section, share_of


class Refusal(Exception):
    """Why something cannot be shared out so."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """Digits that are shared out together."""

    chosen: frozenset[Digit]
    within: Digit | None = None
    """A digit that is shared out further where `outer`, the one outside it, has too few: query heads of a key head."""
    outer: Digit | None = None
    everything: frozenset[Digit] = field(init=False)

    def __post_init__(self) -> None:
        self.everything = self.chosen if self.within is None else self.chosen | {self.within}

    def found_in(self, layouts: Iterable[Layout]) -> frozenset[Digit]:
        """Those of its digits that tensors have."""
        found = {leaf for layout in layouts for dim in layout for leaf in leaves(dim)}
        return self.everything & found

    def is_in(self, dim: Dim) -> bool:
        return any(leaf in self.everything for leaf in leaves(dim))

    def sections(self, dim: Dim) -> tuple[Section, ...] | None:
        """How a dim is cut; None if it is not."""
        found = digits(dim)
        places = [place for place, digit in enumerate(found) if self.is_in((digit,))]
        if not places:
            return None
        first, last = places[0], places[-1]
        if places == [first, first + 1] and found[first] is self.outer and found[last] is self.within:
            inside = [Section(num_units=found[first].size * found[last].size)]
        elif len(places) > 1 or found[first] is self.within:
            raise Refusal("they stand twice, or out of order, in one dim")
        elif found[first].parts:
            inside = [
                section
                for part in found[first].parts
                for section in self.sections((part,)) or (Section(num_units=1, unit=part.size),)
            ]
        else:
            inside = [Section(num_units=found[first].size)]
        outer = math.prod(digit.size for digit in found[:first])
        inner = math.prod(digit.size for digit in found[last + 1 :])
        return tuple(Section(num_units=s.num_units, unit=s.unit * inner) for _ in range(outer) for s in inside)

    def local(self, shared: Range, out_of: int) -> Local:
        """How long dims are on a rank with such a share."""

        def units(number: int) -> int:
            start, stop = share_of(number, shared, out_of)
            return stop - start

        def local(dim: Dim) -> int:
            sizes = []
            for digit in digits(dim):
                if digit.parts:
                    sizes.append(sum(local((part,)) for part in digit.parts))
                elif digit is self.within and self.outer is not None:
                    sizes.append(units(digit.size * self.outer.size) // units(self.outer.size))
                else:
                    sizes.append(units(digit.size) if digit in self.chosen else digit.size)
            return math.prod(sizes)

        return local

    def check(self, layout: Layout) -> None:
        """Refuse a tensor two of whose dims would be shared out at once: ranks would have its diagonal only."""
        found = [digit for dim in layout for digit in digits(dim) if self.is_in((digit,))]
        if len(found) > 1 and not (len(found) == 2 and found[0] is self.outer and found[1] is self.within):
            raise Refusal("they meet themselves in another dim of one tensor")
        if found and found[0] is self.within:
            raise Refusal("they are repeated out of order")


def matching_units(
    value: int,
    given: Sequence[int],
    needed: Sequence[int],
    numbers: Iterable[int],
    lengths: Sequence[Callable[[int], int]],
) -> tuple[int, int] | None:
    """What a number counts: units, and for each of how many others, that make what each rank needs of what is given.

    (1, 1) where nothing needs a change; None where no numbers explain it. `lengths`: of each rank, units it has.
    """
    if list(given) == list(needed):
        return 1, 1
    known = sorted(set(numbers), key=lambda number: (value % number != 0, -number))
    for per in (1, *known):
        for units in known:
            if all(
                one * length(units) * per == other * units * length(per)
                for one, other, length in zip(given, needed, lengths, strict=True)
            ):
                return units, per
    return None
