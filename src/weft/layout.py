"""A parameter's place: its global shape, the splits of its dims by axis, then a flat range of what is left.

Parameters themselves are plain tensors. Everything that must know which part of the whole a rank holds (checkpoints,
gradient norms, the wire) reads it here, as index arithmetic without a single tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dim cut evenly along one axis; the first ranks have one more where it does not divide."""

    dim: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where this rank's part of a tensor lies in the whole."""

    global_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    """Applied in order: a dim may be split by one axis and its part again by another."""
    flat_range: tuple[int, int] | None = None
    """Under ZeRO: the elements of the flattened local tensor that this rank keeps."""

    @property
    def is_whole(self) -> bool:
        return not self.splits and self.flat_range is None

    def region(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[slice, ...]:
        """The slices of the global tensor that the rank at these coordinates holds, before any flat range."""
        spans = [(0, length) for length in self.global_shape]
        for split in self.splits:
            start, stop = spans[split.dim]
            first, last = part_of(stop - start, coordinates[split.axis], sizes[split.axis])
            spans[split.dim] = (start + first, start + last)
        return tuple(slice(start, stop) for start, stop in spans)

    def local_numel(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> int:
        """Elements the rank at these coordinates keeps."""
        if self.flat_range is not None:
            return self.flat_range[1] - self.flat_range[0]
        return math.prod(part.stop - part.start for part in self.region(sizes, coordinates))


def part_of(total: int, index: int, parts: int) -> tuple[int, int]:
    """Where one of `parts` contiguous parts of `total` things starts and stops; the first ones take the remainder.

    part_of(10, 0, 4) -> (0, 3);   part_of(10, 3, 4) -> (8, 10);   part_of(1, 3, 4) -> (1, 1)
    """
    assert 0 <= index < parts, f"part {index} of {parts}"
    each, remainder = divmod(total, parts)
    start = index * each + min(index, remainder)
    return start, start + each + (index < remainder)
