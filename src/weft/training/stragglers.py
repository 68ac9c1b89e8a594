"""Finds the rank that the others wait for, since when, and what that cost.

A rank is slow while its time per sample is at least 1.5 times the median of the ranks that compute the same part of the
model, and until it is less than 1.2 times. The median is the lower of the middle two, so that of two ranks the slower
one is slow. Times are medians over the last few steps. This file is pure: it is given times, and returns what there is
to say.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.plan.partition.shares import FEWEST_STEPS, WINDOW_STEPS, median_times
from weft.units import format_seconds

SLOW_FACTOR = 1.5
"""A rank that takes so many times as long as the median is slow."""

RECOVERED_FACTOR = 1.2
"""It has recovered when it takes less than so many times as long."""

WARN_AFTER_STEPS = 20
"""Steps for which a rank has been slow when it is warned of."""

FEWEST_SLOW_STEPS = 5
"""A rank that was slow for fewer steps is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others waited for."""

    rank: int
    factor: float
    """Its time per sample over the median's, at the latest step in which it was slow."""
    since_step: int
    """The first step in which it was slow."""
    num_steps: int
    """Steps in which it was slow."""
    cost_s: float
    """Seconds by which its passes ended after the median rank's, in all of these: the others waited so long."""

    def as_row(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self, run_s: float) -> str:
        """What is said of it at the end of a run of so many seconds."""
        return (
            f"rank {self.rank} was slow for {self.num_steps} steps from step {self.since_step} on: it took "
            f"{self.factor:.1f} times as long as the median rank for the same number of samples, and the others waited "
            f"{format_seconds(self.cost_s)} for it, {100 * self.cost_s / run_s:.0f} % of this run"
        )


class StragglerWatch:
    """Watches the times of ranks that compute the same part of the model, step by step."""

    def __init__(self, ranks: Sequence[int], *, window: int = WINDOW_STEPS) -> None:
        """`window`: the number of times of which the median is taken."""
        self._ranks = tuple(ranks)
        self._window: deque[Sequence[float]] = deque(maxlen=window)
        self._fewest = min(window, FEWEST_STEPS)
        self._now: dict[int, Straggler] = {}
        """Those that are slow now, by rank."""
        self._past: dict[int, Straggler] = {}
        """The costliest time in which each other rank was slow, where it was long enough."""
        self._warned: set[int] = set()

    def add(self, step: int, times_s: Sequence[float], samples: Sequence[float], *, num_steps: int = 1) -> list[str]:
        """Take the times per sample and numbers of samples of all ranks, in a step or in the latest `num_steps`;
        returns the warnings that are due."""
        if len(self._ranks) < 2 or not all(times_s):
            return []
        self._window.append(tuple(times_s))
        if len(self._window) < self._fewest:
            return []
        usual = median_times(self._window)
        median = statistics.median_low(usual)
        passes_s = [each * number for each, number in zip(times_s, samples, strict=True)]
        ended_s = statistics.median_low(passes_s)
        texts = []
        for rank, time_s, mine_s in zip(self._ranks, usual, passes_s, strict=True):
            factor = time_s / median
            if factor >= (RECOVERED_FACTOR if rank in self._now else SLOW_FACTOR):
                texts += self._note_slow(rank, step, factor, num_steps * max(mine_s - ended_s, 0.0), num_steps)
            elif rank in self._now:
                texts += self._note_recovered(rank, step, factor)
        return texts

    def _note_slow(self, rank: int, step: int, factor: float, cost_s: float, num_steps: int) -> list[str]:
        before = self._now.get(rank)
        if before is not None:
            num_steps += before.num_steps
        self._now[rank] = Straggler(
            rank=rank,
            factor=factor,
            since_step=step - num_steps + 1 if before is None else before.since_step,
            num_steps=num_steps,
            cost_s=cost_s + (0.0 if before is None else before.cost_s),
        )
        if num_steps < WARN_AFTER_STEPS or rank in self._warned:
            return []
        self._warned.add(rank)
        now = self._now[rank]
        return [
            f"rank {rank} takes {factor:.1f} times as long as the median rank for the same number of samples, since "
            f"step {now.since_step}; the others have waited {format_seconds(now.cost_s)} for it so far "
            "(docs/methods/stragglers.md)"
        ]

    def _note_recovered(self, rank: int, step: int, factor: float) -> list[str]:
        was = self._now.pop(rank)
        if was.num_steps >= FEWEST_SLOW_STEPS and (rank not in self._past or self._past[rank].cost_s < was.cost_s):
            self._past[rank] = was
        if rank not in self._warned:
            return []
        self._warned.remove(rank)
        return [
            f"rank {rank} has recovered at step {step}: it takes {factor:.1f} times as long as the median rank; the "
            f"others have waited {format_seconds(was.cost_s)} for it since step {was.since_step}"
        ]

    @property
    def now(self) -> Straggler | None:
        """The rank that is slow now, for long enough; the costliest, if there are several."""
        return costliest(one for one in self._now.values() if one.num_steps >= FEWEST_SLOW_STEPS)

    @property
    def worst(self) -> Straggler | None:
        """The rank that has cost most so far."""
        long_enough = (one for one in self._now.values() if one.num_steps >= FEWEST_SLOW_STEPS)
        return costliest([*self._past.values(), *long_enough])


def costliest(found: Iterable[Straggler | None]) -> Straggler | None:
    """The straggler that cost most, if there is any."""
    return max((one for one in found if one is not None), key=lambda one: one.cost_s, default=None)
