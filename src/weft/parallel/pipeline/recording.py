"""When this rank did what, kept for the last step: two readings of a clock an action, and nothing else until asked.

On a GPU that is when work was launched, not when it ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from weft.plan.pipeline.actions import EVERY, Action, Kind
from weft.plan.pipeline.timeline import Span

_MOST_KEPT = 100_000


class Recording:
    """The actions of one rank with their begin and end, of the latest step or of several."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._entries: list[tuple[Action, float, float]] = []
        self._keeps_all = False
        # Ranks of one host share this clock; on others it is as right as their clocks are.
        self._to_common_s = time.time() - time.perf_counter()

    def keep_all(self) -> None:
        """From now on, keep what came before the latest step too."""
        self._keeps_all = True

    def begin_step(self) -> None:
        if not self._keeps_all or len(self._entries) > _MOST_KEPT:
            self._entries.clear()

    def add(self, action: Action, start_s: float) -> None:
        """An action that began then is over."""
        self._entries.append((action, start_s, time.perf_counter()))

    @contextmanager
    def during(self, kind: Kind, microbatch: int = EVERY) -> Iterator[None]:
        """An action of a model that is in one piece."""
        started = time.perf_counter()
        yield
        self.add(Action(kind=kind, stage=0, microbatch=microbatch), started)

    def spans(self) -> list[Span]:
        shift = self._to_common_s
        return [
            Span(rank=self._rank, action=action, start_s=start + shift, stop_s=stop + shift)
            for action, start, stop in self._entries
        ]
