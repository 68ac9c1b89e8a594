"""How long streams of a GPU waited for exchanges, measured without making the host wait.

NCCL's `wait` returns at once and only lets the current stream wait, so the host's clock shows nothing. Two events
around it do; they are read later, when both are over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST_EVENTS = 8192
"""Waits kept at most, where nobody collects them."""


class StreamWaits:
    """Pairs of events on streams of this process's GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MOST_EVENTS)
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context in which the current stream waits for an exchange."""
        with self._lock:
            begin, end = (self._free.pop() if self._free else torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        with self._lock:
            self._pairs.append((begin, end))

    def take_finished_s(self) -> float:
        """Seconds of the waits that are over and were not taken yet."""
        total_ms = 0.0
        with self._lock:
            while self._pairs and self._pairs[0][1].query():
                begin, end = self._pairs.popleft()
                total_ms += begin.elapsed_time(end)
                self._free += [begin, end]
        return total_ms / 1000
