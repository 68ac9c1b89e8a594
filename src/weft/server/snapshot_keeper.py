"""When a server writes its snapshots: in a thread, beside the updates, and what must be in a file before it speaks.

The first snapshot is written before any worker gets weights, and a decision before anybody hears of it. After that a
snapshot is due when a time has passed, when workers keep too much, or when a worker is gone whose gradients nobody
could send again. Where servers make updates together, the first one decides after which of them all take the snapshot
that time asks for: together these are a checkpoint (`checkpoint/server_snapshots.py`). While the thread writes, updates
go on in other memory (`PartStore.lend`).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from weft.errors import LaunchError
from weft.server.all_together import AllTogether
from weft.server.recovery import MOST_AHEAD
from weft.server.server import ParameterServer
from weft.server.snapshot import Snapshot, can_take, go_on, next_clocks_of, note_saved, take
from weft.server.snapshot_file import DecisionsFile, read_known, read_snapshot, write_known, write_snapshot

log = logging.getLogger("weft")
EVERY_S = 10.0
MOST_KEPT_BYTES = 1 << 30
"""Of gradients for one server that a worker keeps, before a snapshot is due."""


class SnapshotKeeper:
    """The files of one server."""

    def __init__(self, server: ParameterServer, folder: Path, *, every_s: float = EVERY_S) -> None:
        """Begin with what an earlier process has left in the folder, if it has."""
        self._server, self._folder, self._every_s = server, folder, every_s
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from None
        self._decisions = DecisionsFile(folder)
        self._common_version = 0
        """Of the last snapshot that all servers take."""
        self._now_s = 0.0
        self._writing: tuple[threading.Thread, Snapshot] | None = None
        self._problem: OSError | None = None
        self._last_s = 0.0
        self._last_version = -1
        self._most_clocks = MOST_AHEAD // 2
        """Clocks that a worker may have to keep, before a snapshot is due."""
        self._known = read_known(folder)
        """Numbers that were given to workers, and the other servers, on the first server."""
        if self._known is not None:
            server.others.go_on(self._known["servers"])
            if server.invitations is not None:
                server.invitations.go_on(self._known["numbers"])
        snapshot = read_snapshot(folder)
        if snapshot is not None:
            records = self._decisions.read()
            go_on(server, snapshot, records)
            try:
                self._decisions.replace(records)  # the last line may have been half of one
            except OSError as error:
                raise self._cannot_write(error) from None

    def before_speaking(self) -> None:
        """Write what has to be in a file before this server says anything. Raises LaunchError."""
        server = self._server
        try:
            if isinstance(server.mode, AllTogether) and (records := server.mode.decisions.records):
                self._decisions.add(records)
                records.clear()
            if server.invitations is not None:
                known = {"numbers": server.invitations.as_plain(), "servers": server.others.as_plain()}
                if known != self._known:
                    write_known(self._folder, known)
                    self._known = known
            if not server.recovery.was_saved and can_take(server):
                first = take(server)
                write_snapshot(self._folder, first)
                self._note(first)
        except OSError as error:
            raise self._cannot_write(error) from None
        if isinstance(server.mode, AllTogether):
            self._take_common(server.mode.decisions.common_version)

    def _take_common(self, version: int) -> None:
        """Take a snapshot of a version together with all servers, or of a later one where this server has been started
        again and is past it already: there will be no other before."""
        if version == self._common_version or not can_take(self._server):
            return
        if self._writing is not None:  # one that only this server needed
            self._writing[0].join()
            self.turn(self._now_s)
        self._common_version = version
        self._begin(self._now_s, is_common=version == self._server.version)

    def _cannot_write(self, error: OSError) -> LaunchError:
        number, why = self._server.number, error.strerror
        return LaunchError(f"server {number} cannot write its snapshots to {self._folder}: {why}; make room there")

    def turn(self, now_s: float) -> None:
        """See whether a snapshot is in its file, or due."""
        self._now_s = now_s
        if self._writing is not None:
            thread, snapshot = self._writing
            if thread.is_alive():
                return
            self._writing = None
            if self._problem is None:
                try:
                    self._note(snapshot)
                except OSError as error:  # the old file of decisions has more than it needs
                    self._problem = error
            if self._problem is not None:
                log.warning(
                    "server %d could not write a snapshot (%s); it tries again in %g s",
                    self._server.number,
                    self._problem.strerror,
                    self._every_s,
                )
        elif self._is_due(now_s) and can_take(self._server):
            self._begin(now_s)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            self._writing[0].join()
        self._decisions.close()

    def _is_due(self, now_s: float) -> bool:
        server, passed_s = self._server, now_s - self._last_s
        if not server.recovery.was_saved or (self._problem is not None and passed_s < self._every_s):
            return False
        if server.version != self._last_version and passed_s >= self._every_s:
            if not isinstance(server.mode, AllTogether):
                return True
            server.mode.decisions.save_is_due = True  # of all of them, as the one that leads decides
        clocks = next_clocks_of(server)
        return server.recovery.must_save(clocks) or server.recovery.most_ahead(clocks) >= self._most_clocks

    def _begin(self, now_s: float, *, is_common: bool = False) -> None:
        snapshot, server = take(self._server), self._server
        self._last_s, self._last_version, self._problem = now_s, server.version, None
        is_done = threading.Event()

        def write() -> None:
            try:
                write_snapshot(self._folder, snapshot, is_common=is_common)
            except OSError as error:
                self._problem = error
            finally:
                is_done.set()

        assert server.store is not None
        server.store.lend(is_done.is_set)
        thread = threading.Thread(target=write, name="weft-snapshot", daemon=True)
        self._writing = thread, snapshot
        thread.start()

    def _note(self, snapshot: Snapshot) -> None:
        note_saved(self._server, snapshot)
        clock_bytes = sum(len(frame) for _, weights in snapshot.buckets for frame in weights)
        self._most_clocks = max(min(MOST_KEPT_BYTES // max(clock_bytes, 1), MOST_AHEAD // 2), 1)
        if isinstance(self._server.mode, AllTogether) and self._server.mode.agreement is not None:
            self._decisions.replace(self._server.mode.decisions.as_records())
            self._server.mode.decisions.records.clear()
