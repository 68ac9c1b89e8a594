"""Servers in threads of the process that would start them: a test need not wait until others have imported torch, and
can plant faults in them."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from weft.hosts import host_id
from weft.server.invitations import Invitations
from weft.server.process import ServerLoop, ServerOptions
from weft.server.server import ParameterServer
from weft.server.snapshot_keeper import SnapshotKeeper
from weft.server.workers.members import DEAD_AFTER_S

TURN_MS = 20


class ServersInThreads:
    """In the place of `LocalServers`."""

    def __init__(
        self,
        num_servers: int,
        *,
        most_frame_bytes: int,
        job: str = "",
        num_started: int = 0,
        saved: Path | None = None,
        **others: object,
    ) -> None:
        """`saved`: where they write snapshots, one after another."""
        del others
        self._folder = tempfile.mkdtemp(prefix="weft-servers-")
        self._ends, self._ends_when_left = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self.addresses: tuple[str, ...] = ()
        for number in range(num_servers):
            options = ServerOptions(
                number=number,
                bind=(f"ipc://{self._folder}/{number}",),
                key_file=None,
                leader=self.addresses[0] if number else None,
                most_frame_bytes=most_frame_bytes,
                dead_after_s=DEAD_AFTER_S,
                num_threads=1,
                job=job,
                num_servers=num_servers,
                num_started=num_started,
            )
            invitations = None
            if job and number == 0:
                invitations = Invitations(job=job, num_servers=num_servers, num_started=num_started)
            server = ParameterServer(number, most_frame_bytes=most_frame_bytes, invitations=invitations, host=host_id())
            keeper = None if saved is None else SnapshotKeeper(server, saved / f"saved-{number}", every_s=0.0)
            loop = ServerLoop(server, options, None, keeper=keeper)
            self.addresses += tuple(loop.addresses)
            self._threads.append(threading.Thread(target=self._serve, args=(loop,), daemon=True))
        for thread in self._threads:
            thread.start()

    def _serve(self, loop: ServerLoop) -> None:
        while not self._ends.is_set() and not (self._ends_when_left.is_set() and loop.server.members.is_empty):
            loop.turn(TURN_MS)
        loop.close()

    def close_when_left(self) -> None:
        self._ends_when_left.set()
        self._join()

    def close(self) -> None:
        self._ends.set()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def servers_in_threads(saved: Path | None = None) -> Iterator[None]:
    """Context in which a trainer's servers are threads of the first rank, and keep snapshots in a folder."""
    with mock.patch("weft.server.worker_mesh.LocalServers", functools.partial(ServersInThreads, saved=saved)):
        yield
