"""The waits of this rank, looked at a few times per second from a thread of its own: which are too long?"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from weft.comm.failures.activity import WAITING_CALLS, calls, exchange_records
from weft.comm.failures.inquiries import URGENCIES, Urgency
from weft.comm.failures.limits import Limits, is_steady_step
from weft.comm.failures.stuck_exchanges import RecorderWatch, exchange_status

ALARM_FRACTION = 0.9
"""Part of the process group's timeout after which a wait ends the run: before the group itself raises an error that
names neither axis nor ranks."""
_READ_FRACTION = 0.7
"""Part of the timeout without progress after which the recorder itself is read, which queries CUDA events."""
_REPEAT_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """Something that this rank waits for."""

    waited_s: float
    reported_after_s: float
    ends_after_s: float

    def urgency(self, look_after_s: float) -> Urgency | None:
        if self.waited_s > self.ends_after_s:
            return "final"
        if self.waited_s > self.reported_after_s:
            return "late"
        return "look" if self.waited_s > look_after_s else None


class StallWatch:
    """The waits of this rank, and which of them were reported."""

    def __init__(self, limits: Limits, timeout_s: float) -> None:
        """`timeout_s`: of the process groups."""
        self.limits = limits
        self.timeout_s = timeout_s
        self.step_timeout_s = math.inf
        """Of steady steps: the plan's."""
        self._recorder = RecorderWatch()
        self._since_s = math.inf
        """When the wait that was reported began."""
        self._reported: Urgency | None = None
        self._repeat_after_s = 0.0

    @property
    def poll_s(self) -> float:
        return min(self.limits.poll_s, max(self.timeout_s / 40, 0.05))

    def check(self) -> Urgency | None:
        """How urgent it is to ask all ranks, if it is time to; None if not."""
        now = time.perf_counter()
        look_s = self.limits.slack_s
        found = [(one, urgency) for one in self._waits(now) if (urgency := one.urgency(look_s)) is not None]
        if not found:
            return None
        worst, urgency = max(found, key=lambda pair: (URGENCIES.index(pair[1]), pair[0].waited_s))
        since_s = now - worst.waited_s
        is_same = self._reported is not None and abs(since_s - self._since_s) < self.poll_s
        if (
            is_same
            and self._reported is not None
            and URGENCIES.index(urgency) <= URGENCIES.index(self._reported)
            and worst.waited_s < self._repeat_after_s
        ):
            return None
        self._since_s, self._reported = since_s, urgency
        self._repeat_after_s = worst.waited_s * _REPEAT_FACTOR
        return urgency

    def went_on(self) -> float | None:
        """Seconds of a wait that was reported as late, once it is over."""
        if self._reported is None:
            return None
        now = time.perf_counter()
        if any(now - one.waited_s < self._since_s + self.poll_s for one in self._waits(now)):
            return None
        was_late, self._reported = self._reported != "look", None
        return now - self._since_s if was_late else None

    def _waits(self, now: float) -> Iterator[_Wait]:
        call, ends_s = calls.name, ALARM_FRACTION * self.timeout_s
        if is_steady_step():
            ends_s = min(ends_s, self.step_timeout_s)
        reported_after_s = self.limits.reported_after_s(call)
        noted = [
            (now - record.since_s, record.name.endswith("/saving"))
            for record in exchange_records()
            if record.waiting is not None
        ]
        for waited_s, is_saving in noted:
            yield _Wait(
                waited_s=waited_s,
                reported_after_s=self.limits.reported_after_s(call, is_saving=is_saving),
                ends_after_s=ALARM_FRACTION * self.timeout_s if is_saving else ends_s,
            )
        if not noted and call in WAITING_CALLS:
            yield _Wait(waited_s=now - calls.since_s, reported_after_s=reported_after_s, ends_after_s=math.inf)
        # Exchanges may be under way while steps go on, so no wait is older than the latest call.
        recorded_s = min(self._recorder.waited_s(), now - calls.since_s)
        if recorded_s > 0.0 and not noted:
            is_over = recorded_s > _READ_FRACTION * self.timeout_s and any(
                one.waited_s > ALARM_FRACTION * one.timeout_s for one in exchange_status().waiting
            )
            yield _Wait(waited_s=recorded_s, reported_after_s=reported_after_s, ends_after_s=0.0 if is_over else ends_s)
