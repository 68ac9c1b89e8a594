"""The work of a pass over many tensors as a list of equal blocks, one for each program of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from weft.layout import Range

Job = tuple[int, int, int, int]
"""Tensor, first element, end, and whether its elements count in the norm."""
NUM_FIELDS = 4


class BlockJobs:
    """The jobs of a pass over some tensors."""

    def __init__(self, numels: Sequence[int], counted: Sequence[tuple[Range, ...] | None], *, block: int) -> None:
        """`counted`: the elements of each tensor that count in its norm; None for all. No block is counted in part."""
        self.jobs: list[Job] = []
        self.ends = [0]
        """The number of each tensor's first job, and that of all jobs."""
        for tensor, (numel, ranges) in enumerate(zip(numels, counted, strict=True)):
            edges = sorted({0, numel, *(edge for low_high in ranges or () for edge in low_high)})
            for low, high in zip(edges, edges[1:], strict=False):
                is_counted = ranges is None or any(first <= low < last for first, last in ranges)
                self.jobs += [
                    (tensor, start, min(start + block, high), int(is_counted)) for start in range(low, high, block)
                ]
            self.ends.append(len(self.jobs))


def flat(jobs: Sequence[Job]) -> list[int]:
    """All numbers of all jobs, one after another."""
    return [value for job in jobs for value in job]
