"""A choice of digits to split together, and each rank's share of every dim that contains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weft.parallel.tensor.discovery.features import Digit, Dim, Layout, digits, leaves
from weft.parallel.tensor.discovery.symbolic_sizes import Local
from weft.plan.partition.tensor import Section


class Refusal(Exception):
    """The reason why features cannot be split."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """Digits that are split together."""

    chosen: frozenset[Digit]
    outer: Digit | None = None
    """A chosen digit that is too small for all ranks, such as key heads."""
    within: Digit | None = None
    """The digit inside `outer` that is split as well, such as query heads per key head."""
    everything: frozenset[Digit] = field(init=False)

    def __post_init__(self) -> None:
        self.everything = self.chosen if self.within is None else self.chosen | {self.within}

    def found_in(self, layouts: Iterable[Layout]) -> frozenset[Digit]:
        """Its digits that occur in some layouts."""
        found = {leaf for layout in layouts for dim in layout for leaf in leaves(dim)}
        return self.everything & found

    def is_in(self, dim: Dim) -> bool:
        return any(leaf in self.everything for leaf in leaves(dim))

    def sections(self, dim: Dim) -> tuple[Section, ...] | None:
        """The sections in which a dim is cut; None if it is not."""
        found = digits(dim)
        places = [place for place, digit in enumerate(found) if self.is_in((digit,))]
        if not places:
            return None
        first, last = places[0], places[-1]
        if places == [first, first + 1] and found[first] is self.outer and found[last] is self.within:
            inside = [Section(num_units=found[first].size * found[last].size)]
        elif len(places) > 1 or found[first] is self.within:
            raise Refusal("they occur twice, or out of order, in one dim")
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

    def local(self, units: Callable[[int], int]) -> Local:
        """The lengths of dims on a rank; `units` gives the size of its share of a number of units."""

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
        """Refuse a tensor of which two dims would be split at once: ranks would hold its diagonal only."""
        found = [digit for dim in layout for digit in digits(dim) if self.is_in((digit,))]
        if len(found) > 1 and not (len(found) == 2 and found[0] is self.outer and found[1] is self.within):
            raise Refusal("they are in two dims of one tensor")
        if found and found[0] is self.within:
            raise Refusal("they are repeated out of order")
