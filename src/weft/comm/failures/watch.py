"""The failure watch: an error that ends one rank ends all ranks, within seconds and with the first error's message.

A rank that waits for a dead peer over NCCL does not notice: its host sits in a synchronisation, or goes on enqueuing,
until torch's timeout of half an hour; and a launcher's SIGTERM does not end a rank that takes it as a request to stop.
So a thread per rank listens to the failure server (`server.py`), and an exception that leaves the main module
is reported there before it is printed. Ranks that are still alive a few seconds later are ended here.

The same thread sees when this rank has waited for long in an exchange (`wait_reports.py`).

Only errors that end a process count: one that the script catches is its own. Processes that no launcher started as
ranks (`RANK` and `WORLD_SIZE`) are never watched, because nobody expects a notebook to be ended by its peers.
"""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft import errors
from weft.comm.failures.limits import Limits
from weft.comm.failures.lines import as_line, print_line
from weft.comm.failures.rank_status import failed_status, own_status
from weft.comm.failures.server import Failure, FailureServer, connect_to_failure_server
from weft.comm.failures.user_traceback import print_user_traceback
from weft.comm.failures.wait_reports import WaitReports
from weft.errors import LaunchError
from weft.hosts import host_id

PEER_GRACE_S = 3.0
"""Seconds that a rank gets to end by itself once a peer has failed."""
EXIT_GRACE_S = 5
"""Seconds that a process gets to end after its own error; destroying a communicator may never return."""
_DECISION_WAIT_S = 3.0
limits = Limits()


class FailureWatch:
    """This rank's connection to the failure server."""

    def __init__(
        self,
        connection: socket.socket,
        address: dict[str, Any],
        server: FailureServer | None,
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        """`address`: of the server, as rank 0 gave it; `server`: on rank 0; `timeout_s`: of exchanges."""
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        """The group of the ranks; None until it is made."""
        self._rank = rank
        self._connection = connection
        self._address = address
        self._server = server
        self._sending = threading.Lock()
        self.waits = WaitReports(rank, address, server, self.send, limits=limits, timeout_s=timeout_s)
        self._connection.settimeout(self.waits.stalls.poll_s)
        self._first: Failure | None = None
        self._prints = False
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        """This rank ends by itself, or has left the world: the thread must not end it."""
        self._thread = threading.Thread(target=self._listen, name="weft-failure-watch", daemon=True)
        self._thread.start()

    @property
    def is_first(self) -> bool:
        """True if the first failure is this rank's."""
        return self._first is not None and self._first.rank == self._rank

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError), self._sending:
            self._connection.sendall(as_line(message))

    def report(self, error: BaseException) -> bool:
        """True if this error, which ends the process, is the run's first. Another rank's is printed here, if no other
        rank of this host does."""
        self._is_over.set()
        if self._first is None:
            failure = {"kind": type(error).__name__, "message": str(error)}
            self.send({"failure": failure, "status": failed_status(error).as_json()})
            self._is_known.wait(_DECISION_WAIT_S)
        first = self._first
        if first is None or (self.is_first and first.prints_itself):
            if first is not None and first.message != str(error):  # the server knows more
                print_line(first.message.removeprefix(f"{error}; "))
            return True
        self._print_once(first)
        return False

    def stop(self) -> None:
        """This rank ends normally."""
        self._is_over.set()
        self.send({"left": own_status(has_ended=True).as_json()})
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # not more: the server would lose what was sent
        if self._server is not None:
            self._server.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        self._connection.close()

    def close_after_fork(self) -> None:
        """Close this process's copies of the connections: a fork of a rank is not that rank."""
        self._connection.close()
        if self._server is not None:
            self._server.close_sockets()

    def end(self) -> None:
        """End this process because of the first failure."""
        first = self._first
        assert first is not None
        signal.alarm(EXIT_GRACE_S)  # should flushing block, because the main thread is in the middle of printing
        self._print_once(first)
        if _parent_prints and self.is_first and not first.prints_itself:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise LaunchError(first.message)
            except LaunchError as error:  # raised, because the handler writes down the traceback
                get_error_handler().record_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(2 if hasattr(errors, first.kind) else 1)

    def _print_once(self, first: Failure) -> None:
        if self._prints and not _parent_prints:
            self._prints = False
            with suppress(OSError):
                os.write(2, f"weft: {first}\n".encode())

    def _listen(self) -> None:
        received, checked_s = b"", 0.0
        while self._first is None:
            more: bytes | None = None
            try:
                more = self._connection.recv(65536)
            except OSError as error:
                if not (isinstance(error, TimeoutError) and error.errno is None):  # the kernel's, not our own
                    more = b""
            if more == b"":
                if self._is_over.is_set():
                    return
                self._lose_server()
                break
            *lines, received = (received + (more or b"")).split(b"\n")
            for message in map(json.loads, lines):
                if "closed" in message:
                    if self._first is None:
                        self._stay_alone()
                    if self._first is None or self._is_over.is_set():
                        return
                    break
                self._obey(message)
            is_time = time.monotonic() - checked_s >= self.waits.stalls.poll_s
            if is_time and self._first is None and not self._is_over.is_set():
                checked_s = time.monotonic()
                self._end_with(self.waits.check())
        # Where an exchange is stuck, the rank that noticed it ends first: a launcher asks that one for the reason.
        if not self._is_over.wait(0 if self.is_first else PEER_GRACE_S) and self.group in (None, dist.group.WORLD):
            self.end()

    def _stay_alone(self) -> None:
        """Rank 0 has ended normally, and its server with it."""
        while not self._is_over.wait(self.waits.stalls.poll_s) and self._first is None:
            self._end_with(self.waits.check_alone())

    def _end_with(self, failure: Failure | None) -> None:
        if failure is not None:
            self._set_first(failure, prints=True)

    def _obey(self, message: dict[str, Any]) -> None:
        self.waits.hear()
        if "ask" in message:
            urgency = message["ask"]
            self.send({"status": own_status(reads_recorder=urgency != "look").as_json(), "asked": urgency})
        elif "stacks" in message:
            self.waits.write_stacks(message["stacks"])
        elif "failure" in message:
            self._set_first(Failure(**message["failure"]), prints=self._rank in message["printed_by"])

    def _lose_server(self) -> None:
        message = "its process ended without an error message, or its host is unreachable"
        lost = Failure(rank=0, host_name=self._address["host_name"], kind="", message=message, prints_itself=False)
        is_first = int(os.environ.get("LOCAL_RANK", "0")) == (self._address["host"] == host_id())
        self._set_first(lost, prints=is_first)

    def _set_first(self, failure: Failure, *, prints: bool) -> None:
        self._first, self._prints = failure, prints
        self._is_known.set()


_watch: FailureWatch | None = None
_is_joined = False
"""`watch_world` was called for the present world, also where the failure server could not be reached."""
_group: dist.ProcessGroup | None = None
"""The group of that world; None until it is made."""
_num_watches = 0
_previous_hook = sys.excepthook
_parent_prints = False


def watch_world(store: Store, rank: int, size: int, *, timeout_s: float) -> None:
    """Watch the ranks that share a store, if a launcher started them; collective.

    `timeout_s`: of exchanges, unless the process group exists already and has its own.
    """
    global _watch, _is_joined, _group, _num_watches, _previous_hook
    if size == 1 or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    if _is_joined and _group in (None, dist.group.WORLD):
        _group = dist.group.WORLD
        if _watch is not None:
            _watch.group = _group
        return
    leave_watch()
    _is_joined, _group = True, dist.group.WORLD
    if _num_watches == 0:
        atexit.register(leave_watch)
        multiprocessing.util.Finalize(None, _end_child, exitpriority=0)  # forks of multiprocessing skip atexit
        os.register_at_fork(after_in_child=_close_after_fork)
    _num_watches += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"weft/watch/{attempt}/{_num_watches}", store)
    reached = connect_to_failure_server(own, rank, limits)
    if reached is None:
        return
    _watch = FailureWatch(*reached, rank=rank, timeout_s=_timeout_of(dist.group.WORLD, timeout_s))
    if sys.excepthook is not _report_uncaught:
        _previous_hook, sys.excepthook = sys.excepthook, _report_uncaught


def leave_watch() -> None:
    """End the watch: whatever happens to this process now is not a failure of the run."""
    global _watch, _is_joined
    if _watch is not None:
        _watch.stop()
    _watch, _is_joined = None, False


def set_step_timeout(timeout_s: float) -> None:
    """End the run once ranks have waited this long in a steady step; 0: at the process group's timeout only."""
    if _watch is not None:
        _watch.waits.stalls.step_timeout_s = timeout_s or math.inf
        _watch.waits.stalls.timeout_s = max(_watch.waits.stalls.timeout_s, timeout_s)


def write_stacks_to(folder: Path) -> None:
    """Where the stacks of ranks that wait for long are written from now on."""
    if _watch is not None:
        _watch.waits.write_stacks_to(folder)


def is_watched() -> bool:
    """True between `watch_world` and `leave_watch`."""
    return _watch is not None


def report(error: BaseException) -> bool:
    """Report to all ranks an error that ends this process; False if another rank's came first, or caused it."""
    if _watch is None:
        return True
    if not isinstance(error, Exception):  # an interrupt
        leave_watch()
        return True
    return _watch.report(error)


def end_after_peer() -> None:
    """End this process because of the failure that `report` found to be the first, and after the rank that had it: a
    launcher asks the first process that ends for the reason."""
    assert _watch is not None
    if not _watch.is_first:
        time.sleep(PEER_GRACE_S)
    _watch.end()


def force_exit_if_stuck() -> None:
    """Let the kernel end this process, should its ordinary end hang: destroying a communicator may never return."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_GRACE_S)


def leave_printing_to_parent() -> None:
    """The process that started this rank prints the failure: no rank does."""
    global _parent_prints
    _parent_prints = True


def _timeout_of(group: dist.ProcessGroup | None, default_s: float) -> float:
    """The shortest timeout of a group's backends."""
    found: list[float] = []
    if group is None:
        return default_s
    for kind in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):
            found.append(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
    return min(found, default=default_s)


def _end_child() -> None:
    """The end of a process that multiprocessing started: it prints errors itself, and calls no `sys.excepthook`."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        error = error.__context__
    if isinstance(error, Exception):
        report(error)
    else:
        leave_watch()


def _close_after_fork() -> None:
    global _watch, _is_joined
    if _watch is not None:
        _watch.close_after_fork()
    _watch, _is_joined = None, False


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` of a watched rank: only the run's first error has its traceback printed."""
    if report(error):
        is_default = _previous_hook in (sys.__excepthook__, errors.print_in_turn)
        (print_user_traceback if is_default else _previous_hook)(kind, error, trace)
    force_exit_if_stuck()
