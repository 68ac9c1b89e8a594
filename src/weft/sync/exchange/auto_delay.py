"""The delay of exchanges that stay under way, found by measuring: `[data] delay = "auto"`.

A phase of a bucket should be over before its next one begins, so the delay that is needed is the number of steps that
its longest phase takes, times its phases; of all buckets the most. That is counted in steps, on every rank, and told to
the others with the exchanges; after every few of them all ranks decide alike from the same reports:

    steps wait for more than a tenth of a step    the delay grows to what is needed
    they do not, and 3/4 of it would be enough    it shrinks to what is needed: replicas differ by what is under way
    they do not, for some decisions               a shorter one is tried, and taken back if steps wait: not all
                                                  transports tell when an exchange is over
    a growth saved less than a fifth of waiting   it is taken back: the links are full, or a replica is slow, which
                                                  no delay changes

Every change is told, with its reason.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from weft.units import format_seconds

LONGEST_AUTO_DELAY = 64
"""The longest delay that is chosen; replicas that differed by more than 20 steps were never measured."""
NUM_WATCHED = 4
"""Exchanges that must have been sent and merged since the last decision before the next one."""
CALM_DECISIONS = 3
"""Decisions in a row without waiting before a shorter delay is tried; twice as many after each trial in vain."""
SLOW_REPLICA = 1.2
"""A replica that computes so many times as long as another is waited for, whatever the delay."""
_STEPS_IN_MEDIAN = 15
_FORGETTING = 0.9
"""What a decision leaves of the waiting that was of no use to end: after seven of them a growth is tried again."""
_NOTICED_WAIT = 0.1
"""Share of a step below which waiting is not worth a longer delay."""
_WAIT_LEFT = 0.8
"""Share of the waiting that is left after a growth which was of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What all ranks of all replicas found since the last decision, at worst."""

    needed_delay: int
    """The delay with which no phase would have been waited for, but for the longest tenth of exchanges."""
    waited: float
    """Waiting per step, as a share of a step's own duration."""
    num_phases: int
    """The most that a bucket has."""
    longest_delay: int
    """The longest delay for which the rank with the least memory has memory."""
    slowest: float = 1.0
    """Computing time of the slowest replica over that of the fastest."""


class AutoDelay:
    """The delay, and what this rank has found about it."""

    def __init__(self, delay: int, *, every: int) -> None:
        self.delay = delay
        self.changes: list[tuple[int, int]] = []
        """The step and the new delay of every change."""
        self._every = every
        self._steps_s: deque[float] = deque(maxlen=_STEPS_IN_MEDIAN)
        self._decided_step = 0
        self._before: tuple[int, float] | None = None
        """The delay before the last change that must prove itself, and the waiting then."""
        self._num_calm, self._patience = 0, CALM_DECISIONS
        self._useless_wait = 0.0
        """Waiting that a longer delay did not save; 0: none was seen."""
        self._begin()

    def _begin(self) -> None:
        self._needed_delays: list[int] = []
        self._waited_s, self._num_waits, self.num_phases = 0.0, 0, 1

    # What this rank finds.

    def add_step(self, step_s: float) -> None:
        """A step took so long, without waiting for exchanges."""
        self._steps_s.append(step_s)

    def add_wait(self, waited_s: float) -> None:
        """The exchange after a step waited so long."""
        self._waited_s += waited_s
        self._num_waits += 1

    def add_exchange(self, needed_delay: int, num_phases: int) -> None:
        """An exchange is over."""
        self._needed_delays.append(needed_delay)
        self.num_phases = max(self.num_phases, num_phases)

    @property
    def step_s(self) -> float:
        """The usual duration of a step; 0 before there is one."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def findings(self) -> tuple[float, float, float]:
        """The delay that nine of ten exchanges would have needed, the waiting per step as a share of a step, and the
        most phases of a bucket, since the last decision."""
        ordered = sorted(self._needed_delays)
        usual = ordered[(9 * len(ordered) - 1) // 10] if ordered else 0
        waited = self._waited_s / max(self._num_waits, 1) / self.step_s if self.step_s else 0.0
        return float(usual), waited, float(self.num_phases)

    # What all ranks decide.

    def is_due(self, sent_step: int) -> bool:
        """True if an exchange that was sent after this step tells of enough exchanges since the last decision."""
        return sent_step >= self._decided_step + 2 * self.delay + NUM_WATCHED * self._every

    def decide(self, report: Report, *, step: int) -> str:
        """Change the delay, if it should be another; what is to be told of it, if anything. All ranks call this after
        the same step with equal reports."""
        self._decided_step = step
        self._begin()
        old, before, self._before = self.delay, self._before, None
        least = max(report.needed_delay, report.num_phases)
        most = max(min(report.longest_delay, LONGEST_AUTO_DELAY), 1)
        self._num_calm = self._num_calm + 1 if report.waited <= _NOTICED_WAIT else 0
        self.delay, why = self._choose(report, min(least, most), before)
        self.delay = min(self.delay, most)
        if self.delay == old:
            self._before = None
            return ""
        self._num_calm = 0
        self.changes.append((step, self.delay))
        limit = f" ({most} is the most here)" if self.delay < least and not why else ""
        why = why or (f"an exchange takes {least} steps of {format_seconds(self.step_s)}{limit}")
        return f"[data] delay: from {old} to {self.delay} after step {step}, because {why}"

    def _choose(self, report: Report, needed: int, before: tuple[int, float] | None) -> tuple[int, str]:
        """The delay, and why if that is not what exchanges take. `before`: delay and waiting before the last change,
        if it must prove itself."""
        if report.waited > _NOTICED_WAIT:
            return self._when_waiting(report, needed, before)
        self._useless_wait = 0.0
        if needed < 0.75 * self.delay:
            return needed, ""
        shorter = self.delay - report.num_phases
        if self._num_calm < self._patience or shorter < report.num_phases:
            return self.delay, ""
        self._before = (self.delay, report.waited)
        return shorter, f"no step has waited for {self._num_calm} decisions; it is longer again if steps wait"

    def _when_waiting(self, report: Report, needed: int, before: tuple[int, float] | None) -> tuple[int, str]:
        told = f"{100 * report.waited:.0f} % of a step"
        if before is not None and before[0] > self.delay:
            self._patience *= 2
            return before[0], f"steps wait ({told}) with a shorter one"
        if before is not None and report.waited > _WAIT_LEFT * before[1]:
            self._useless_wait = before[1]
            cause = "the links are full, whatever the delay; set [data] every higher, or a [codec]"
            if report.slowest > SLOW_REPLICA:
                cause = f"one replica computes {report.slowest:.1f} times as long as another, which no delay changes"
            return before[0], f"steps wait as long as before ({told}): {cause}"
        if needed <= self.delay or 0 < report.waited < 2 * self._useless_wait:
            self._useless_wait *= _FORGETTING  # links that were full may have become far
            return self.delay, ""
        self._before = (self.delay, report.waited)
        return needed, ""

    def restart(self, steps_done: int) -> None:
        """Nothing is under way, and nothing known, after so many steps."""
        self._decided_step, self._before, self._useless_wait, self._num_calm = steps_done, None, 0.0, 0
        self._begin()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        return {
            "delay": self.delay,
            "changes": self.changes,
            "decided_step": self._decided_step,
            "before": self._before,
            "useless_wait": self._useless_wait,
            "calm": [self._num_calm, self._patience],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.delay, self._decided_step = int(state["delay"]), int(state["decided_step"])
        self.changes = [(int(step), int(delay)) for step, delay in state["changes"]]
        self._before = None if state["before"] is None else (int(state["before"][0]), float(state["before"][1]))
        self._useless_wait = float(state["useless_wait"])
        self._num_calm, self._patience = map(int, state["calm"])
        self._steps_s.clear()
        self._begin()
