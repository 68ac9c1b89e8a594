"""A parameter's placement: its global shape, the splits of its dims by axis, then a flat range of what is left.

Parameters themselves are plain tensors. Checkpoints, gradient norms and exchanges read here which part of the global
tensor a rank holds, as index arithmetic without a single tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

Range = tuple[int, int]
Window = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Equal runs of elements at equal strides, each contiguous both in the global tensor and in a rank's part.

    A row of a matrix whose columns are split is a run; all rows of a rank's part are one `Runs`.
    """

    there: int
    """The start of the first run in the flattened global tensor."""
    here: int
    """Its start in the rank's part, flattened."""
    numel: int
    """Elements of each run."""
    count: int = 1
    there_step: int = 0
    """Distance between the starts of two runs in the global tensor."""
    here_step: int = 0

    def places(self) -> Iterator[Range]:
        """The start of every run in the global tensor, and in the part."""
        for number in range(self.count):
            yield self.there + number * self.there_step, self.here + number * self.here_step

    def within(self, low: int, high: int) -> Iterator[Runs]:
        """The intersection with a range of the part; `here` is counted from the start of that range."""
        first, last = 0, self.count
        if self.count > 1:
            first = max((low - self.here - self.numel) // self.here_step + 1, 0)
            last = min(-((self.here - high) // self.here_step), self.count)
        if first < last and (piece := self._piece(first, low, high)).numel < self.numel:
            yield from [piece] if piece.numel > 0 else []
            first += 1
        end = self._piece(last - 1, low, high) if first < last else None
        is_cut = end is not None and end.numel < self.numel
        if first < last - is_cut:
            there, here = self.there + first * self.there_step, self.here + first * self.here_step
            yield replace(self, there=there, here=here - low, count=last - is_cut - first)
        if end is not None and is_cut:
            yield end

    def _piece(self, number: int, low: int, high: int) -> Runs:
        """The intersection of one run with a range of the part."""
        here = self.here + number * self.here_step
        start, stop = max(here, low), min(here + self.numel, high)
        there = self.there + number * self.there_step + start - here
        return Runs(there=there, here=start - low, numel=max(stop - start, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dim cut along one axis."""

    dim: int
    axis: str
    parts: tuple[tuple[Range, ...], ...] = ()
    """The ranges of the dim at each place along the axis, one after another; places may overlap. Empty: cut evenly,
    the first ranks have one more where it does not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The placement of this rank's part in the global tensor."""

    global_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    """Applied in order: a dim may be split by one axis and its part again by another."""
    flat_range: Range | None = None
    """Under ZeRO: the elements of the flattened local tensor that this rank keeps."""

    @property
    def is_whole(self) -> bool:
        return not self.splits and self.flat_range is None

    def ranges(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[tuple[Range, ...], ...]:
        """The ranges of every dim of the global tensor that the rank at these coordinates has."""
        ranges: list[tuple[Range, ...]] = [((0, length),) for length in self.global_shape]
        for split in self.splits:
            place = coordinates[split.axis]
            even = part_of(_length(ranges[split.dim]), place, sizes[split.axis]) if not split.parts else None
            inside = split.parts[place] if even is None else (even,)
            ranges[split.dim] = tuple(found for one in inside for found in _within(ranges[split.dim], one))
        return tuple(ranges)

    def local_shape(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the part of the rank at these coordinates, before any flat range."""
        return tuple(_length(inside) for inside in self.ranges(sizes, coordinates))

    def windows(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Iterator[tuple[Window, Window]]:
        """Each box of the part as slices of the global tensor and of the local one, before any flat range."""
        dims = []
        for inside in self.ranges(sizes, coordinates):
            stops = list(itertools.accumulate(stop - start for start, stop in inside))
            local = (slice(stop - (one[1] - one[0]), stop) for one, stop in zip(inside, stops, strict=True))
            dims.append([(slice(*one), here) for one, here in zip(inside, local, strict=True)])
        for box in itertools.product(*dims):
            yield tuple(whole for whole, _ in box), tuple(here for _, here in box)

    def runs(
        self, sizes: Mapping[str, int], coordinates: Mapping[str, int], within: Range | None = None
    ) -> Iterator[Runs]:
        """The elements that the rank at these coordinates keeps, or a range of them, as contiguous runs.

        `here` is counted from the first element kept, or the first one of the range.
        """
        shape = self.local_shape(sizes, coordinates)
        low, high = (0, math.prod(shape)) if self.flat_range is None else self.flat_range
        if within is not None:
            low, high = low + within[0], low + within[1]
        last: Runs | None = None
        for there, here in self.windows(sizes, coordinates):
            for box in _runs_of_box(self.global_shape, shape, there, here):
                for runs in box.within(low, high):
                    if last is not None and _follows(last, runs):
                        last = replace(last, numel=last.numel + runs.numel)
                        continue
                    if last is not None:
                        yield last
                    last = runs
        if last is not None:
            yield last


def _runs_of_box(whole: tuple[int, ...], part: tuple[int, ...], there: Window, here: Window) -> Iterator[Runs]:
    """A box of a tensor of shape `whole` that is a box of one of shape `part`, both flattened."""
    lengths = [one.stop - one.start for one in there]
    if 0 in lengths:
        return
    strides = [(math.prod(whole[dim + 1 :]), math.prod(part[dim + 1 :])) for dim in range(len(whole))]
    first_there = sum(one.start * stride for one, (stride, _) in zip(there, strides, strict=True))
    first_here = sum(one.start * stride for one, (_, stride) in zip(here, strides, strict=True))
    dim = len(whole) - 1
    while dim > 0 and lengths[dim] == whole[dim] == part[dim]:
        dim -= 1
    numel = lengths[dim] * strides[dim][0] if whole else 1
    outer: list[tuple[int, int, int]] = []
    for length, (step_there, step_here) in zip(lengths[:dim], strides[:dim], strict=True):
        inner_there, inner_here = length * step_there, length * step_here
        if outer and (outer[-1][1], outer[-1][2]) == (inner_there, inner_here):  # two dims that count like one
            length *= outer.pop()[0]
        if length > 1:
            outer.append((length, step_there, step_here))
    count, step_there, step_here = outer.pop() if outer else (1, 0, 0)
    for place in itertools.product(*(range(length) for length, _, _ in outer)):
        moved = [(at * one[1], at * one[2]) for at, one in zip(place, outer, strict=True)]
        yield Runs(
            there=first_there + sum(one for one, _ in moved),
            here=first_here + sum(one for _, one in moved),
            numel=numel,
            count=count,
            there_step=step_there,
            here_step=step_here,
        )


def _follows(one: Runs, other: Runs) -> bool:
    """Both are single runs, the second right behind the first, here and there."""
    behind = (one.there + one.numel, one.here + one.numel)
    return one.count == other.count == 1 and behind == (other.there, other.here)


def _length(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)


def _within(ranges: tuple[Range, ...], one: Range) -> Iterator[Range]:
    """A range of the concatenation of ranges, as ranges of what they are ranges of."""
    first = 0
    for start, stop in ranges:
        low, high = max(one[0], first), min(one[1], first + stop - start)
        if low < high:
            yield start + low - first, start + high - first
        first += stop - start


def part_of(total: int, index: int, parts: int) -> Range:
    """Start and stop of one of `parts` contiguous parts of `total` things; the first ones take the remainder.

    part_of(10, 0, 4) -> (0, 3);   part_of(10, 3, 4) -> (8, 10);   part_of(1, 3, 4) -> (1, 1)
    """
    assert 0 <= index < parts, f"part {index} of {parts}"
    each, remainder = divmod(total, parts)
    start = index * each + min(index, remainder)
    return start, start + each + (index < remainder)
