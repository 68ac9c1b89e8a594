"""The work of a step on many tensors as a list of equal blocks, in the order in which a GPU's programs take them.

    both passes   first: t0 t0 t0 t1 t1 | second: t0 t0 t0 | first: t2 t2 t2 t2 | second: t1 t1 | ...

The second pass of a tensor goes through it backwards: what the first pass touched last is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.layout import Range

Job = tuple[int, int, int, int, int]
"""Tensor, first element, end, number of the block, and flags."""
NUM_FIELDS = 5
SECOND, COUNTED = 1, 2
"""Flags: it belongs to the second pass; its elements count in the norm."""


class BlockJobs:
    """The jobs of both passes over some tensors."""

    def __init__(self, numels: Sequence[int], counted: Sequence[tuple[Range, ...] | None], *, block: int) -> None:
        """`counted`: the elements of each tensor that count in its norm; None for all. No block is counted in part."""
        self.ends = [0]
        """The number of each tensor's first block, and that of all blocks."""
        self._by_tensor: list[list[Job]] = []
        for tensor, (numel, ranges) in enumerate(zip(numels, counted, strict=True)):
            edges = sorted({0, numel, *(edge for low_high in ranges or () for edge in low_high)})
            jobs: list[Job] = []
            for low, high in zip(edges, edges[1:], strict=False):
                is_counted = ranges is None or any(first <= low < last for first, last in ranges)
                for start in range(low, high, block):
                    number = self.ends[-1] + len(jobs)
                    jobs.append((tensor, start, min(start + block, high), number, COUNTED if is_counted else 0))
            self._by_tensor.append(jobs)
            self.ends.append(self.ends[-1] + len(jobs))
        self.first = [job for jobs in self._by_tensor for job in jobs]
        self.second = [job for jobs in self._by_tensor for job in _second(jobs)]

    def interleaved(self, *, lag: int) -> list[Job]:
        """Both passes: a tensor's second comes as soon as `lag` jobs of the first follow its own."""
        made: list[Job] = []
        waiting: list[tuple[int, list[Job]]] = []
        num_first = 0
        for jobs in self._by_tensor:
            for job in jobs:
                while waiting and num_first >= waiting[0][0]:
                    made += waiting.pop(0)[1]
                made.append(job)
                num_first += 1
            waiting.append((num_first + lag, _second(jobs)))
        return [*made, *(job for _, later in waiting for job in later)]


def flat(jobs: Sequence[Job]) -> list[int]:
    """All numbers of all jobs, one after another."""
    return [value for job in jobs for value in job]


def _second(jobs: Sequence[Job]) -> list[Job]:
    return [(*job[:4], job[4] | SECOND) for job in reversed(jobs)]
