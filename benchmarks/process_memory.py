"""Current and peak memory of this process, to compare with a prediction.

The proportional set size counts a page that n processes share as 1/n, so the sizes of all ranks on a host add up to
the memory they use together. Linux only.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

_ROLLUP = Path("/proc/self/smaps_rollup")


def read_pss_bytes() -> int:
    for line in _ROLLUP.read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_ROLLUP} has no line for the proportional set size")


class PeakPss:
    """Context in which a thread samples the proportional set size."""

    def __init__(self, *, every_s: float = 0.02) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft-peak-pss", daemon=True)

    def __enter__(self) -> Self:
        self.peak_bytes = read_pss_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, read_pss_bytes())

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, read_pss_bytes())
