"""The time of an exchange, measured by all participants: they start together, the slowest counts, in the median.

Participants must decide alike (how often to repeat, whether a larger size would take too long), so every decision is
made from the maximum over all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.measure.fit import Point

Run = Callable[[], None]

_SAMPLE_S = 0.5e-3
_MOST_CALLS = 20
_MOST_SAMPLES = 100
_FEWEST_SIZES = 3


Agreement = Callable[[Sequence[float]], list[float]]
"""Returns the maximum of each value over all participants of an exchange, on all of them: also a barrier."""


def agree_in_group(group: Group) -> Agreement:
    """All ranks of a group, which is used for nothing else at the time."""

    def largest(values: Sequence[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        all_reduce(table, group, op="max")
        return [float(value) for value in table]

    return largest


def agree_as_pair(group: Group, other: int) -> Agreement:
    """This rank and the one at another place of the group, which does the same."""

    def largest(values: Sequence[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        theirs = torch.empty_like(table)
        for pending in [receive(theirs, group, source=other), send(table.clone(), group, to=other)]:
            pending.wait()
        return [float(value) for value in torch.maximum(table, theirs)]

    return largest


def time_sizes(
    make: Callable[[int], Run], sizes: Sequence[int], agree: Agreement, *, budget_s: float, chained: bool
) -> list[Point]:
    """(bytes, seconds) of an exchange at growing sizes, until they or the budget are used up.

    `make(size)` gives one exchange of that size; all make it together. `chained` says that a call ends on no rank
    before all have begun it, so calls may follow each other without a barrier, and small ones are timed in batches.
    """
    points: list[Point] = []
    began = time.perf_counter()
    spent_s = 0.0
    for place, size in enumerate(sizes):
        if place >= _FEWEST_SIZES and spent_s + 3 * points[-1][1] * size / sizes[place - 1] > budget_s:
            break
        run = make(size)
        run()
        started = time.perf_counter()
        if not chained:
            agree([0.0])
        first_s = _seconds(run, 1)
        ended = time.perf_counter()
        first_s, with_meeting_s, spent_s = agree([first_s, ended - started, ended - began])
        share_s = (budget_s - spent_s) / (len(sizes) - place)
        num_calls = max(1, min(_MOST_CALLS, round(_SAMPLE_S / first_s))) if chained else 1
        num_samples = max(0, min(_MOST_SAMPLES, int(share_s / (num_calls * with_meeting_s))))
        samples = [first_s]
        for _ in range(num_samples):
            if not chained:
                agree([0.0])
            samples.append(_seconds(run, num_calls))
        *samples, spent_s = agree([*samples, time.perf_counter() - began])
        points.append((size, statistics.median(samples)))
    return points


def _seconds(run: Run, num_calls: int) -> float:
    started = time.perf_counter()
    for _ in range(num_calls):
        run()
    return (time.perf_counter() - started) / num_calls
