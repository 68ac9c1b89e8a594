"""ZeRO's index arithmetic: the place of each parameter in a flat buffer, and the part of it that a rank keeps.

    flat        | first weight      | bias  |pad| second weight          |padding|
    parts of 3  |        part 0         |        part 1         |        part 2         |

Members follow each other, each on an aligned place, and the whole is padded so that it divides into equal, aligned
parts. A part cuts through members wherever it falls; a rank may keep nothing of a small one. Memory and wire
predictions count these buffers with their padding, because that is what is allocated and sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer")

ALIGNED_NUMEL = 16
"""Members and parts start at multiples of this: 32 bytes in 16-bit formats, which GPU matrix kernels ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Members in one flat buffer that is cut into equal parts, one per rank."""

    numels: tuple[int, ...]
    """Elements of each member."""
    num_parts: int
    """Ranks that share the buffer."""
    aligned_numel: int = ALIGNED_NUMEL
    offsets: tuple[int, ...] = field(init=False)
    """Each member's first element."""
    numel: int = field(init=False)
    """Elements of the buffer, padding included."""

    def __post_init__(self) -> None:
        ends = itertools.accumulate((_round_up(numel, self.aligned_numel) for numel in self.numels), initial=0)
        *offsets, end = ends
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "numel", _round_up(end, self.aligned_numel * self.num_parts))

    @property
    def part_numel(self) -> int:
        """Elements each rank keeps, padding included."""
        return self.numel // self.num_parts

    def part(self, number: int) -> tuple[int, int]:
        """The first element of a part in the buffer, and the first after it."""
        assert 0 <= number < self.num_parts, f"part {number} of {self.num_parts}"
        return number * self.part_numel, (number + 1) * self.part_numel

    def kept(self, member: int, number: int) -> tuple[int, int]:
        """The elements of a member, counted from its own first, that lie in a part; an empty range if none do."""
        start, stop = self.part(number)
        offset, numel = self.offsets[member], self.numels[member]
        first = min(max(start - offset, 0), numel)
        return first, max(min(stop - offset, numel), first)


class BufferPool(Generic[Buffer]):
    """Buffers that are borrowed for a while and handed back, so that memory is neither kept twice nor made anew.

    There are never more buffers of about one size than were out at once, and none larger than the largest asked for.
    """

    def __init__(self, numel_of: Callable[[Buffer], int]) -> None:
        self._numel_of = numel_of
        self.free: dict[object, list[Buffer]] = {}
        """Buffers that nothing uses, by dtype."""

    def borrow(self, numel: int, dtype: object) -> Buffer | None:
        """The smallest free buffer that is large enough; None: make another.

        If there is none, the largest is dropped, to be replaced. Only those of about the size (half to double) count,
        so that small requests do not use up the few large buffers, nor large ones the many small.
        """
        free = self.free.get(dtype, [])
        numels = [self._numel_of(buffer) for buffer in free]
        near = [place for place, size in enumerate(numels) if numel <= 2 * size and size <= 2 * numel]
        fitting = [place for place in near if numels[place] >= numel]
        if fitting:
            return free.pop(min(fitting, key=numels.__getitem__))
        if near:
            free.pop(max(near, key=numels.__getitem__))
        return None

    def hand_back(self, buffer: Buffer, dtype: object) -> None:
        self.free.setdefault(dtype, []).append(buffer)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
