"""How long streams of a GPU waited for exchanges, measured without making the host wait.

NCCL's `wait` returns at once and only lets the current stream wait, so the host's clock shows nothing. Two events
around it do; they are read later, when both are over. A wait belongs to the `WaitWindow` in which it began.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_MOST_EVENTS = 8192
"""Waits kept at most, where nobody collects them."""


@dataclass(slots=True)
class WaitWindow:
    """The waits that began between two moments."""

    wait_s: float = 0.0
    """Their seconds; on a GPU, of those that were collected."""


class StreamWaits:
    """Pairs of events on streams of this process's GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event, WaitWindow | None]] = deque(maxlen=_MOST_EVENTS)
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def measure(self, window: WaitWindow | None = None) -> Iterator[None]:
        """Context in which the current stream waits for an exchange."""
        with self._lock:
            begin, end = (self._free.pop() if self._free else torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        with self._lock:
            self._pairs.append((begin, end, window))

    def take_finished_s(self) -> float:
        """Seconds of the waits that are over and were not taken yet."""
        total_ms = 0.0
        with self._lock:
            while self._pairs and self._pairs[0][1].query():
                begin, end, window = self._pairs.popleft()
                total_ms += (elapsed_ms := begin.elapsed_time(end))
                if window is not None:
                    window.wait_s += elapsed_ms / 1000
                self._free += [begin, end]
        return total_ms / 1000
