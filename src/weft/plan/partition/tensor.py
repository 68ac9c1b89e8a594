"""How layers are shared out over the tensor axis: which entries of which tensors each rank has, as plain data.

A *region* is a part of a model that every rank computes its share of:

    whole x ─┬─ column layer ─┬─ work on shares ─┬─ row layer ── sum over the ranks ── whole y
             └─ column layer ─┘                  └─ row layer ── sum over the ranks ── whole z

A dim that is shared out is made of *sections*, each of them so many units of so many entries that stay together. The
rows of one fused projection are three sections, of H, G and G heads of D rows; those of a plain layer are one section
of units of 1. All sections of a region are cut at the same places, in proportion: where there are n units here and
n · k there, whoever has unit i has the k units from i · k on.

    shares(6, 4)       -> (0, 2) (2, 4) (4, 5) (5, 6)       the first ranks have one more where it does not divide
    6 query heads, 2 key heads, 4 ranks  ->  key heads (0, 1) (0, 2) (1, 2) (1, 2): rank 1 needs both

A section of fewer units than there are ranks is thus *repeated*: several ranks hold the same entries, and their
gradients add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.model_refusals import TOO_FEW_UNITS

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Consecutive entries of a dim that are shared out in whole units."""

    num_units: int
    unit: int = 1
    """Entries that stay together: those of a head, of a group of channels."""

    @property
    def length(self) -> int:
        return self.num_units * self.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One dim of one parameter or buffer that is shared out."""

    name: str
    dim: int
    sections: tuple[Section, ...]
    """One after another they are the whole dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A whole number in an attribute of a module that counts units: a rank's module has its own share of them."""

    module: str
    attribute: str
    """With a dot, of an object that modules may share: "config.num_attention_heads". The module gets a copy of it."""
    num_units: int
    """Its value is a multiple of this."""
    per_units: int = 1
    """It counts them for each of so many others: query heads for each key head."""

    def local_value(self, value: int, shared: Range, out_of: int) -> int:
        """What is left of its value on a rank with a share `shared` of `out_of` units."""
        (start, stop), (first, last) = (share_of(n, shared, out_of) for n in (self.num_units, self.per_units))
        return value * (stop - start) * self.per_units // (self.num_units * (last - first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size among the arguments of a call that is shared out, like the value of a `Count`."""

    place: tuple[int | str, ...]
    """Where it stands: the argument's position or name, then the position inside, if it is a list of sizes."""
    num_units: int
    per_units: int = 1
    """As for `Count`."""


SIZED = frozenset(
    {
        *("view", "reshape", "unflatten", "expand", "broadcast_to", "repeat", "tile", "repeat_interleave"),
        *("split", "split_with_sizes", "narrow", "__getitem__", "__setitem__"),
        *("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
    }
)
"""Names of functions that are given sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedCall:
    """A call of a function that is given sizes (view, reshape, split, expand), in the own code of a module."""

    function: str
    sizes: tuple[Size, ...] = ()
    """Empty: a call like others, noted so that calls can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A module whose own code, sub-modules left out, gives functions sizes of the whole."""

    module: str
    calls: tuple[SizedCall, ...]
    """All such calls of one forward, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a model that is shared out over the tensor axis. Names are those of modules and tensors."""

    columns: tuple[tuple[str, ...], ...] = ()
    """Layers that are given something whole and make shares; those in one tuple are given the very same tensor."""
    rows: tuple[str, ...] = ()
    """Layers that are given shares, or an embedding that has a share of the rows; what they make is added up."""
    cuts: tuple[Cut, ...]
    """Every parameter and buffer of which a rank has a share only."""
    partial: tuple[str, ...] = ()
    """Parameters that every rank has whole but uses on its share, so that their gradients must be added up."""
    counts: tuple[Count, ...] = ()
    resized: tuple[Resized, ...] = ()
    is_output: bool = False
    """What its columns make is the model's output: there are no rows, and somebody else must know of the shares."""

    def num_units(self, tensor: int) -> int:
        """The number of units that is shared out, of which others are multiples or divisors, over so many ranks."""
        numbers = [number for number, _ in _numbers(self)]
        return min(numbers) if min(numbers) >= tensor else max(numbers)


def shares(num_units: int, tensor: int) -> tuple[Range, ...]:
    """What each rank has of so many units; the first ones take the remainder."""
    each, remainder = divmod(num_units, tensor)
    starts = [index * each + min(index, remainder) for index in range(tensor + 1)]
    return tuple(zip(starts, starts[1:], strict=False))


def share_of(num_units: int, shared: Range, out_of: int) -> Range:
    """Which of so many units belong to a share `shared` of `out_of` units."""
    start, stop = shared
    if num_units >= out_of:
        each = num_units // out_of
        return start * each, stop * each
    each = out_of // num_units
    return start // each, -(-stop // each)


def entries(cut: Cut, shared: Range, out_of: int) -> tuple[Range, ...]:
    """The entries of a dim that a share has: a range of each section, in order."""
    ranges, first = [], 0
    for section in cut.sections:
        start, stop = share_of(section.num_units, shared, out_of)
        ranges.append((first + start * section.unit, first + stop * section.unit))
        first += section.length
    return tuple(ranges)


def region_problems(region: Region, tensor: int) -> list[str]:
    """Why a region cannot be shared out over so many ranks."""
    numbers = dict(_numbers(region))
    largest, smallest = max(numbers), min(numbers)
    if largest < tensor:
        units = f"{largest} unit{'s' * (largest > 1)}"
        return [TOO_FEW_UNITS.message(name=numbers[largest], units=units, num_ranks=tensor, num_units=largest)]
    problems = []
    out_of = region.num_units(tensor)
    for number, name in numbers.items():
        if max(number, out_of) % min(number, out_of):
            problems.append(
                f"{name} has {number} units and {numbers[out_of]} has {out_of}, which are split together; one must be "
                "a multiple of the other"
            )
    if not problems and smallest < tensor:
        problems += [
            problem
            for number, name in numbers.items()
            if number < out_of and (problem := _repeat_problem(name, number, out_of, tensor)) is not None
        ]
    return problems


def _repeat_problem(name: str, number: int, out_of: int, tensor: int) -> str | None:
    """Repeated units must each serve equally many of the others on every rank, or a rank cannot tell whose is whose."""
    if _repeats_evenly(number, out_of, tensor):
        return None
    works = [size for size in range(1, out_of + 1) if number >= size or _repeats_evenly(number, out_of, size)]
    return (
        f"{name} has {number} key and value heads (or units like them) for {out_of} others, which cannot be repeated "
        f"evenly over [axes] tensor = {tensor}; these can: {', '.join(map(str, works))}"
    )


def _repeats_evenly(number: int, out_of: int, tensor: int) -> bool:
    each = out_of // number
    for start, stop in shares(out_of, tensor):
        serving = [
            min(stop, (unit + 1) * each) - max(start, unit * each) for unit in range(start // each, -(-stop // each))
        ]
        if len(set(serving)) > 1:
            return False
    return True


def _numbers(region: Region) -> Iterator[tuple[int, str]]:
    """Every number of units in a region, with the name of a tensor that has it."""
    for cut in region.cuts:
        for section in cut.sections:
            yield section.num_units, f'"{cut.name}"'


def region_shares(region: Region, tensor: int) -> tuple[tuple[Range, ...], int]:
    """What each rank has of a region, and out of how many units; a region that cannot be shared out is refused."""
    problems = region_problems(region, tensor)
    if problems:
        raise PlanError(problems)
    out_of = region.num_units(tensor)
    return shares(out_of, tensor), out_of
