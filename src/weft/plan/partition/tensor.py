"""The split of layers over the tensor axis: which entries of which tensors each rank has, as plain data.

A *region* is a part of a model of which every rank computes a share:

    whole x ─┬─ column layer ─┬─ work on shares ─┬─ row layer ── sum over the ranks ── whole y
             └─ column layer ─┘                  └─ row layer ── sum over the ranks ── whole z

A split dim is made of *sections* of equal *units* of consecutive entries that stay together. The rows of one fused
projection are three sections, of H, G and G heads of D rows; those of a plain layer are one section of units of 1. All
sections of a region are cut in proportion: if one has n units and another n · k, the rank with unit i of the first has
the k units from i · k on of the second.

    shares(6, 4)       -> (0, 2) (2, 4) (4, 5) (5, 6)       the first ranks have one more where it does not divide
    6 query heads, 2 key heads, 4 ranks  ->  key heads (0, 1) (0, 2) (1, 2) (1, 2): rank 1 needs both

A section of fewer units than ranks is thus *repeated*: several ranks hold the same entries, and their gradients are
summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.model_refusals import TOO_FEW_UNITS

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Consecutive entries of a dim that are split in whole units."""

    num_units: int
    unit: int = 1
    """Entries per unit: those of a head, of a group of channels."""

    @property
    def length(self) -> int:
        return self.num_units * self.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One split dim of one parameter or buffer."""

    name: str
    dim: int
    sections: tuple[Section, ...]
    """Concatenated, they are the whole dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """An integer attribute of a module that counts units; a rank's module counts its own share."""

    module: str
    attribute: str
    """With a dot, an attribute of an object that modules may share ("config.num_attention_heads"), which is copied."""
    num_units: int
    """Its value is a multiple of this."""
    per_units: int = 1
    """It counts units per so many others: query heads per key head."""

    def local_value(self, value: int, shared: Range, out_of: int) -> int:
        """Its value on a rank with the share `shared` of `out_of` units."""
        (start, stop), (first, last) = (share_of(n, shared, out_of) for n in (self.num_units, self.per_units))
        return value * (stop - start) * self.per_units // (self.num_units * (last - first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size among the arguments of a call that is divided like the value of a `Count`."""

    place: tuple[int | str, ...]
    """The argument's position or name, then the position inside, if it is a list of sizes."""
    num_units: int
    per_units: int = 1
    """As in `Count`."""


SIZED = frozenset(
    "view reshape unflatten expand broadcast_to repeat tile repeat_interleave split split_with_sizes narrow "
    "__getitem__ __setitem__ zeros ones full empty new_zeros new_ones new_full new_empty".split()
)
"""Names of functions that take sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedCall:
    """A call of a function that takes sizes (view, reshape, split, expand), in a module's own code."""

    function: str
    sizes: tuple[Size, ...] = ()
    """Empty: an unchanged call, listed so that calls can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A module whose own code, without its sub-modules, passes sizes of the whole to functions."""

    module: str
    calls: tuple[SizedCall, ...]
    """All calls of such functions in one forward, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a model that is split over the tensor axis, by names of modules and tensors."""

    columns: tuple[tuple[str, ...], ...] = ()
    """Layers with whole inputs and split outputs; those in one tuple have the same input tensor."""
    rows: tuple[str, ...] = ()
    """Layers with split inputs, or an embedding with a share of the rows; their outputs are summed over the ranks."""
    cuts: tuple[Cut, ...]
    """Every split parameter and buffer."""
    partial: tuple[str, ...] = ()
    """Whole parameters that every rank uses on its share, so that their gradients must be summed."""
    counts: tuple[Count, ...] = ()
    resized: tuple[Resized, ...] = ()
    is_output: bool = False
    """True if its columns make the model's output: there are no rows, and the loss must handle the shares."""

    def num_units(self, tensor: int) -> int:
        """The number of units that is split over so many ranks; the others are multiples or divisors of it."""
        numbers = [number for number, _ in _numbers(self)]
        return min(numbers) if min(numbers) >= tensor else max(numbers)


def shares(num_units: int, tensor: int) -> tuple[Range, ...]:
    """Each rank's range of so many units; the first ranks take the remainder."""
    each, remainder = divmod(num_units, tensor)
    starts = [index * each + min(index, remainder) for index in range(tensor + 1)]
    return tuple(zip(starts, starts[1:], strict=False))


def share_of(num_units: int, shared: Range, out_of: int) -> Range:
    """The range of so many units that belongs to the share `shared` of `out_of` units."""
    start, stop = shared
    if num_units >= out_of:
        each = num_units // out_of
        return start * each, stop * each
    each = out_of // num_units
    return start // each, -(-stop // each)


def entries(cut: Cut, shared: Range, out_of: int) -> tuple[Range, ...]:
    """The entries of a dim that belong to a share: one range per section, in order."""
    ranges, first = [], 0
    for section in cut.sections:
        start, stop = share_of(section.num_units, shared, out_of)
        ranges.append((first + start * section.unit, first + stop * section.unit))
        first += section.length
    return tuple(ranges)


def region_problems(region: Region, tensor: int) -> list[str]:
    """Reasons why a region cannot be split over so many ranks."""
    numbers = dict(_numbers(region))
    largest, smallest = max(numbers), min(numbers)
    if largest < tensor:
        units = f"{largest} unit{'s' * (largest > 1)}"
        return [TOO_FEW_UNITS.message(name=numbers[largest], units=units, num_ranks=tensor, num_units=largest)]
    out_of = region.num_units(tensor)
    problems = [
        f"{name} has {number} units and {numbers[out_of]} has {out_of}, which are split together; one must be a "
        "multiple of the other"
        for number, name in numbers.items()
        if max(number, out_of) % min(number, out_of)
    ]
    if problems or smallest >= tensor:
        return problems
    for number, name in numbers.items():
        if number < out_of and not _repeats_evenly(number, out_of, tensor):
            works = [size for size in range(1, out_of + 1) if number >= size or _repeats_evenly(number, out_of, size)]
            problems.append(
                f"{name} has {number} key and value heads (or units like them) for {out_of} others, which cannot be "
                f"repeated evenly over [axes] tensor = {tensor}; these can: {', '.join(map(str, works))}"
            )
    return problems


def _repeats_evenly(number: int, out_of: int, tensor: int) -> bool:
    """True if on every rank each repeated unit serves equally many others, which tells a rank whose is whose."""
    each = out_of // number
    for start, stop in shares(out_of, tensor):
        units = range(start // each, -(-stop // each))
        if len({min(stop, (unit + 1) * each) - max(start, unit * each) for unit in units}) > 1:
            return False
    return True


def _numbers(region: Region) -> Iterator[tuple[int, str]]:
    """Each number of units in a region, with the name of a tensor that has it."""
    for cut in region.cuts:
        for section in cut.sections:
            yield section.num_units, f'"{cut.name}"'


def region_shares(region: Region, tensor: int) -> tuple[tuple[Range, ...], int]:
    """Each rank's share of a region, and the number of units; a region that cannot be split is refused."""
    problems = region_problems(region, tensor)
    if problems:
        raise PlanError(problems)
    out_of = region.num_units(tensor)
    return shares(out_of, tensor), out_of
