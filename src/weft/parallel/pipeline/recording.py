"""Start and end times of this rank's actions in the latest step: two clock readings per action.

On a GPU these are the times at which work was launched, not at which it ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.plan.pipeline.actions import EVERY, Action, Kind
from weft.plan.pipeline.timeline import Span, Timeline

_MOST_KEPT = 100_000


class Recording:
    """The timed actions of one rank, in the latest step or in all."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._entries: list[tuple[Action, float, float]] = []
        self._keeps_all = False
        # Ranks of one host share this clock; hosts differ as their clocks do.
        self._offset_s = time.time() - time.perf_counter()

    def keep_all(self) -> None:
        """From now on, keep the actions of all steps."""
        self._keeps_all = True

    def begin_step(self) -> None:
        if not self._keeps_all or len(self._entries) > _MOST_KEPT:
            self._entries.clear()

    def add(self, action: Action, start_s: float) -> None:
        """Record an action that started at `start_s` and ends now."""
        self._entries.append((action, start_s, time.perf_counter()))

    @contextmanager
    def during(self, kind: Kind, microbatch: int = EVERY) -> Iterator[None]:
        """Context that records an action of a model without pipeline."""
        started = time.perf_counter()
        yield
        self.add(Action(kind=kind, stage=0, microbatch=microbatch), started)

    def spans(self) -> list[Span]:
        return [
            Span(rank=self._rank, action=action, start_s=start + self._offset_s, stop_s=stop + self._offset_s)
            for action, start, stop in self._entries
        ]

    def of_all(self, group: Group) -> Timeline:
        """The actions of all ranks of a pipeline; collective."""
        mine = Timeline(spans=tuple(self.spans()), num_ranks=group.size)
        rows = [row for part in gather_values(mine.as_rows(), group) for row in part]
        return Timeline.from_rows(rows, num_ranks=group.size)
