"""Stopping a run between two steps, on all ranks at the same one.

Ctrl-C or SIGTERM on any rank, or a file made by the launcher, requests a stop; ranks agree by a small all-reduce about
twice a second, in which rank 0 also sends the number of steps until the next one. A second Ctrl-C interrupts at once,
unless it follows within a second: the terminal and torchrun both send the first one.

Where replicas exchange only every few steps, that all-reduce would make them wait for each other: they look every five
seconds, and then after an exchange if there is one in that time.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from weft.comm.collectives import all_reduce
from weft.mesh import Mesh
from weft.plan.late_merges import exchanges_after

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_LOOKS_OF_REPLICAS = 5.0
_SECONDS_OF_ONE_CTRL_C = 1.0
_MOST_STEPS = 1000


class StopRequest:
    """Context that catches requests to stop a run, and lets ranks agree on them."""

    def __init__(self, mesh: Mesh, *, file: Path | None = None) -> None:
        self._mesh = mesh
        self._file = file
        self._seconds_between = _SECONDS_BETWEEN_LOOKS if mesh.num_replicas == 1 else _SECONDS_BETWEEN_LOOKS_OF_REPLICAS
        self._asked_at_s: float | None = None
        self._steps_left = 1
        self._steps_between = 1
        self._last_look_s = time.perf_counter()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def agreed(self, *, step: int = 0) -> bool:
        """True if all ranks stop here; every rank calls it after every step. `step`: the number of steps done."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        now = time.perf_counter()
        step_s = max((now - self._last_look_s) / self._steps_between, 1e-6)
        wanted = self._asked_at_s is not None or (self._file is not None and self._file.exists())
        between = min(max(round(self._seconds_between / step_s), 1), _MOST_STEPS) if self._mesh.world.rank == 0 else 0
        message = torch.tensor([int(wanted), between], dtype=torch.int64)
        all_reduce(message, self._mesh.everyone("control"), op="max")
        stop, most = message.tolist()
        self._steps_between = self._steps_until_look(step, most)
        self._steps_left = self._steps_between
        self._last_look_s = time.perf_counter()
        return bool(stop)

    def _steps_until_look(self, step: int, most: int) -> int:
        """The number of steps until the last exchange of replicas within `most`, or `most` if there is none."""
        if self._mesh.num_replicas == 1:
            return most
        data = self._mesh.plan.data
        return next((ahead for ahead in range(most, 0, -1) if exchanges_after(data, step + ahead)), most)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        if self._asked_at_s is None:
            self._asked_at_s = now
        elif number == signal.SIGINT and now - self._asked_at_s > _SECONDS_OF_ONE_CTRL_C:
            raise KeyboardInterrupt
