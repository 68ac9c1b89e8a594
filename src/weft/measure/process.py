"""How much memory this process takes, and the most it took: what a prediction is held against.

The proportional set size counts a process's own pages, and a page that several share by as many parts, so the sizes of
all ranks on a host add up to what they take together. Linux only.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_ROLLUP = Path("/proc/self/smaps_rollup")


def read_pss_bytes() -> int:
    """The proportional set size of this process now."""
    for line in _ROLLUP.read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_ROLLUP} says nothing of the proportional set size")


class PeakPss:
    """Reads the proportional set size from a thread, again and again, while the context is open."""

    def __init__(self, *, every_s: float = 0.02) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft-peak-pss", daemon=True)

    def __enter__(self) -> Self:
        self.peak_bytes = read_pss_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, read_pss_bytes())
