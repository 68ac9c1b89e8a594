"""The grid of ranks: arithmetic between rank numbers and coordinates along the axes.

Ranks fill the grid row-major, the outermost axis of `[axes] order` first, so ranks that differ along the last axis are
neighbours. `mesh.py` makes process groups of the lists made here.

    order = [pipeline, data], 2 × 3:      pipeline 0 | rank 0 1 2
                                          pipeline 1 | rank 3 4 5
                                                  data    0 1 2
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from weft.errors import nearest
from weft.plan.plan import Axes


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a plan, arranged along its axes."""

    axes: Axes

    @property
    def num_ranks(self) -> int:
        return self.axes.num_ranks

    @property
    def strides(self) -> dict[str, int]:
        """The difference of rank numbers between neighbours along each axis, outermost first."""
        strides, stride = {}, self.num_ranks
        for axis, size in self.axes.sizes.items():
            stride //= size
            strides[axis] = stride
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along each axis, outermost first."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is outside 0 to {self.num_ranks - 1}")
        sizes = self.axes.sizes
        return {axis: rank // stride % sizes[axis] for axis, stride in self.strides.items()}

    def ranks_along(self, axis: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one only along the axis (or axes), including itself, in rank order."""
        offsets, own = self._offsets(axis), self.coordinates(rank)
        base = rank - sum(own[name] * self.strides[name] for name in _names(axis))
        return tuple(base + offset for offset in offsets)

    def groups(self, axis: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks along the axis, or several axes jointly; each in rank order, sorted by first rank."""
        offsets = self._offsets(axis)
        others = tuple(name for name in self.axes.order if name not in _names(axis))
        return tuple(tuple(base + offset for offset in offsets) for base in self._offsets(others))

    def _offsets(self, axis: str | tuple[str, ...]) -> list[int]:
        """Rank numbers, relative to the group's first, of the ranks along some axes; ascending."""
        names = _names(axis)
        for name in names:
            if name not in self.axes.order:
                raise ValueError(f'"{name}" is not an axis; {nearest(name, self.axes.order)}')
        sizes = self.axes.sizes
        # The sums ascend because the axes come in grid order, outermost first.
        steps = [range(0, sizes[name] * stride, stride) for name, stride in self.strides.items() if name in names]
        return [sum(parts) for parts in itertools.product(*steps)]


def _names(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis
