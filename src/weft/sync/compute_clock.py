"""The time that this rank computes in each step: what its passes take, less what it is blocked in exchanges.

It is told to the other ranks in the tail of the gradient exchange (`Sync.finish`), per sample, so that ranks with
unequal parts of the batch can be compared. On the host a step's own time is known when its tail leaves. On a GPU it is
the time between two events, less that of the waits of its streams, and is read when both are over, without a wait: the
tail then carries the time of the step before, and none (0) at first.

The update is not in it, nor what happens between steps: neither depends on the samples that a rank is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weft.comm.group import Traffic
from weft.comm.stream_waits import WaitWindow
from weft.plan.partition.groups import WORLD

_MOST_OPEN = 16
"""Steps whose events are kept at most, where a GPU is that far behind its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """The passes of one step on a GPU."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    waits: WaitWindow
    num_samples: int


class ComputeClock:
    """Measures the passes of each step on this rank, and keeps what all ranks have measured."""

    def __init__(
        self,
        traffic: Mapping[str, Traffic],
        device: torch.device,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`traffic` by axis; that between all ranks is left out, because saving exchanges in a thread of its own."""
        self._traffic, self._now_s = traffic, now_s
        self._on_device = device.type == "cuda"
        self._open: deque[_Passes] = deque(maxlen=_MOST_OPEN)
        self._waits = WaitWindow()
        self._started_s: float | None = None
        self.own_s = 0.0
        """Seconds per sample of this rank's latest step that is known; 0 before that, or without samples."""
        self.num_samples = 0
        """Samples of this rank's latest step, also while its time is not known."""
        self.everyones_s: torch.Tensor | None = None
        """Seconds per sample of every rank that shared the latest exchange, in the order of `mesh.batch_group`."""

    def begin(self) -> None:
        """The passes of a step begin."""
        self._set_window(WaitWindow())
        self._started_s = self._now_s()
        if self._on_device:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()

    def end(self, num_samples: int) -> None:
        """The passes of a step are over; they were of so many samples."""
        self.num_samples = num_samples
        if self._started_s is None:
            return
        waits, elapsed_s, self._started_s = self._waits, self._now_s() - self._started_s, None
        self._set_window(None)
        if not self._on_device:
            self.own_s = _per_sample(elapsed_s - waits.wait_s, num_samples)
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._read_finished()
        self._open.append(_Passes(begin=self._begin, end=end, waits=waits, num_samples=num_samples))

    def _read_finished(self) -> None:
        """Read the steps that the GPU is done with, without waiting for any."""
        if self._open and self._open[0].end.query():
            for traffic in self._traffic.values():  # what was waited for in those steps is over, too
                traffic.collect_stream_waits()
        while self._open and self._open[0].end.query():
            passes = self._open.popleft()
            elapsed_s = passes.begin.elapsed_time(passes.end) / 1000
            self.own_s = _per_sample(elapsed_s - passes.waits.wait_s, passes.num_samples)

    def _set_window(self, window: WaitWindow | None) -> None:
        if window is not None:
            self._waits = window
        for axis, traffic in self._traffic.items():
            if axis != WORLD:
                traffic.window = window


def _per_sample(seconds: float, num_samples: int) -> float:
    return max(seconds, 1e-9) / num_samples if num_samples else 0.0
