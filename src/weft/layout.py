"""A parameter's place: its global shape, the splits of its dims by axis, then a flat range of what is left.

Parameters themselves are plain tensors. Everything that must know which part of the whole a rank holds (checkpoints,
gradient norms, the wire) reads it here, as index arithmetic without a single tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Range = tuple[int, int]
Window = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dim cut along one axis."""

    dim: int
    axis: str
    parts: tuple[tuple[Range, ...], ...] = ()
    """Of each place along the axis: the ranges of the dim it has, one after another. They may overlap between places.
    Empty: cut evenly; the first ranks have one more where it does not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where this rank's part of a tensor lies in the whole."""

    global_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    """Applied in order: a dim may be split by one axis and its part again by another."""
    flat_range: Range | None = None
    """Under ZeRO: the elements of the flattened local tensor that this rank keeps."""

    @property
    def is_whole(self) -> bool:
        return not self.splits and self.flat_range is None

    def ranges(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[tuple[Range, ...], ...]:
        """Of every dim, the ranges of the global tensor that the rank at these coordinates has."""
        ranges: list[tuple[Range, ...]] = [((0, length),) for length in self.global_shape]
        for split in self.splits:
            place = coordinates[split.axis]
            inside = split.parts[place] if split.parts else None
            if inside is None:
                inside = (part_of(_length(ranges[split.dim]), place, sizes[split.axis]),)
            ranges[split.dim] = tuple(found for one in inside for found in _within(ranges[split.dim], one))
        return tuple(ranges)

    def local_shape(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what the rank at these coordinates has, before any flat range."""
        return tuple(_length(inside) for inside in self.ranges(sizes, coordinates))

    def windows(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Iterator[tuple[Window, Window]]:
        """Box by box: where it is in the global tensor, and where in the local one, before any flat range."""
        dims = []
        for inside in self.ranges(sizes, coordinates):
            stops = list(itertools.accumulate(stop - start for start, stop in inside))
            local = (slice(stop - (one[1] - one[0]), stop) for one, stop in zip(inside, stops, strict=True))
            dims.append([(slice(*one), here) for one, here in zip(inside, local, strict=True)])
        for box in itertools.product(*dims):
            yield tuple(whole for whole, _ in box), tuple(here for _, here in box)

    def local_numel(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> int:
        """Elements the rank at these coordinates keeps."""
        if self.flat_range is not None:
            return self.flat_range[1] - self.flat_range[0]
        return math.prod(self.local_shape(sizes, coordinates))


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
    """Where one of `parts` contiguous parts of `total` things starts and stops; the first ones take the remainder.

    part_of(10, 0, 4) -> (0, 3);   part_of(10, 3, 4) -> (8, 10);   part_of(1, 3, 4) -> (1, 1)
    """
    assert 0 <= index < parts, f"part {index} of {parts}"
    each, remainder = divmod(total, parts)
    start = index * each + min(index, remainder)
    return start, start + each + (index < remainder)
