"""Reports of this rank's waits: to the server, which asks all ranks, and by itself where the server is silent.

The server is a thread of rank 0. Where that process is stopped, its host is gone, or it has ended normally while others
still wait for it, nobody asks: then this rank says what it knows.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.comm.failures.activity import calls
from weft.comm.failures.hang_report import describe_wait
from weft.comm.failures.inquiries import RankProcess, Urgency
from weft.comm.failures.limits import Limits
from weft.comm.failures.lines import print_line
from weft.comm.failures.places import write_stacks
from weft.comm.failures.rank_status import RankStatus, own_status
from weft.comm.failures.server import Failure, FailureServer
from weft.comm.failures.stall_watch import StallWatch
from weft.hosts import host_id

STACKS = "WEFT_STACKS"
"""The variable that names the folder for the stacks of ranks that wait for long, outside of `weft train`."""
_SERVER_WAIT_S = 1.5
"""Seconds that the server may take to ask all ranks about a wait; then rank 0 counts as silent."""
_WRITE_S = 1.0
"""Seconds that this rank waits for its stacks to be written."""


def _seen(urgency: Urgency) -> RankStatus:
    return own_status(reads_recorder=urgency != "look")


class WaitReports:
    """What this rank has said about its waits."""

    def __init__(
        self,
        rank: int,
        address: dict[str, Any],
        server: FailureServer | None,
        send: Callable[[dict[str, Any]], None],
        *,
        limits: Limits,
        timeout_s: float,
    ) -> None:
        """`address`: of the server; `server`: on rank 0; `send`: to the server; `timeout_s`: of exchanges."""
        self.stalls = StallWatch(limits, timeout_s)
        self._rank = rank
        self._address = address
        self._server = server
        self._send = send
        self._unanswered: tuple[float, Urgency] | None = None
        """When the server was told of a wait, and how urgent it is, until it answers."""
        self._writer: threading.Thread | None = None
        temporary = Path(tempfile.gettempdir()) / f"weft-stacks-{address['token'][:8]}"
        self.write_stacks_to(Path(os.environ.get(STACKS) or temporary))

    def write_stacks_to(self, folder: Path) -> None:
        self._folder = folder
        if self._server is not None:
            self._server.stacks_folder = str(folder)

    def write_stacks(self, reason: str) -> None:
        """Write the stacks of this rank. By a thread of its own: a file server that does not answer, which may be why
        ranks wait, must not keep this rank from hearing that the run has ended."""

        def write() -> None:
            with suppress(OSError):
                write_stacks(self._folder, self._rank, reason)

        if not self._is_writing:
            self._writer = threading.Thread(target=write, name="weft-stacks", daemon=True)
            self._writer.start()
            self._writer.join(_WRITE_S)

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def hear(self) -> None:
        """The server has sent something."""
        self._unanswered = None

    def check(self) -> Failure | None:
        """Report a wait that has become long, or is over; a failure if it ends the run and the server is silent."""
        if (waited_s := self.stalls.went_on()) is not None:
            self._unanswered = None
            self._send({"went_on": waited_s})
        urgency, now = self.stalls.check(), time.monotonic()
        if urgency is not None and ((status := _seen(urgency)).is_waiting or urgency == "look"):  # still
            self._send({"stuck": status.as_json(), "urgency": urgency})
            self._unanswered = self._unanswered or (now, urgency)
        elif self._unanswered is not None and now - self._unanswered[0] > _SERVER_WAIT_S:
            urgency, self._unanswered = self._unanswered[1], None
            if urgency != "look":
                first = self._address
                process = RankProcess(
                    host_name=first["host_name"], pid=first["pid"], is_here=first["host"] == host_id()
                )
                return self._tell(process.describe_silence(), ends=urgency == "final")
        return None

    def check_alone(self) -> Failure | None:
        """The same, once rank 0 has ended normally: a wait for it will not end."""
        urgency = self.stalls.check()
        waiting = own_status().exchanges.waiting if urgency is not None else ()
        if waiting and 0 in (waiting[0].awaits or waiting[0].ranks):
            return self._tell("has ended normally", ends=urgency == "final")
        return None

    def _tell(self, first: str, *, ends: bool) -> Failure | None:
        """Say what this rank waits for, and of rank 0, which would ask the others, why it does not."""
        text = describe_wait(self._rank, {self._rank: own_status()}, {0: first}, unknown="not asked")
        text += f". Stacks of ranks: {self._folder}"
        self.write_stacks(text)
        if ends:
            return Failure(rank=self._rank, host_name=socket.gethostname(), kind="", message=text, prints_itself=False)
        if self._is_first_to_tell():
            print_line(f"{text}; the run keeps waiting")
        return None

    def _is_first_to_tell(self) -> bool:
        """True for one of the ranks that see the folder and are in the same call; they cannot ask each other."""
        if self._is_writing:  # still: the folder cannot be asked
            return True
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                (self._folder / f".told-{calls.number}-{self._address['token'][:8]}").touch(exist_ok=False)
            except FileExistsError:
                return False
        return True
