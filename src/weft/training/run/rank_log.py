"""What a rank prints is kept in the run's folder too: `logs/rank-3-attempt-0.log`, output and errors as they came.

Only rank 0's terminal is read by somebody; what the others print goes by, and a launcher's own files are elsewhere or
gone. Before the run's folder is made, and for a run that is refused, nothing is written. What libraries print without
Python (NCCL_DEBUG) is not seen here; the stack of a crash is.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from weft.plan.partition.one_worker import WORKER

FOLDER = "logs"
_MOST_KEPT_CHARACTERS = 1 << 20


class RankLog:
    """Context in which Python's standard streams are copied; into a file once `attach` has named the run's folder."""

    def __init__(self, *, attempt: int) -> None:
        self.terminal: TextIO = sys.stdout
        """Standard output without the copy, for what is redrawn all the time."""
        self._attempt = attempt
        self._kept: list[str] = []
        self._num_kept = 0
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        self.terminal, self._errors = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Copied(sys.stdout, self), _Copied(sys.stderr, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.write("".join(traceback.format_exception(error)))
        sys.stdout, sys.stderr = self.terminal, self._errors
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None

    def attach(self, directory: Path, worker: int | None = None) -> None:
        """Write what was printed so far into the run's folder, and from now on everything. A disk that refuses it does
        not end the run. `worker`: the number of one that was started by itself."""
        with suppress(OSError):
            folder = directory / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            rank = os.environ.get("RANK", "0")
            number = os.environ.get(WORKER) if worker is None else worker
            whose = f"worker-{number}-" if number is not None else ""
            file = (folder / f"{whose}rank-{rank}-attempt-{self._attempt}.log").open("a", buffering=1, errors="replace")
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            file.write(f"--- rank {rank}, process {os.getpid()}, {now}\n{''.join(self._kept)}")
            self._file = file
            self._kept.clear()
            faulthandler.enable(file)

    def write(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError, ValueError):
                self._file.write(text)
        elif self._num_kept < _MOST_KEPT_CHARACTERS:
            self._kept.append(text)
            self._num_kept += len(text)


class _Copied:
    """A text stream whose text is also written to a log; in all else the stream itself."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
