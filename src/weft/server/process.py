"""The process around a parameter server: its sockets, its clock and its end.

    python -m weft.server.process < settings.json

It is started with what it must know on its standard input, says on its standard output at which address it listens, and
ends when its standard input is closed, so that it cannot outlive who started it. One thread receives, computes and
sends; ZeroMQ moves bytes in threads of its own meanwhile. Weights are sent from where they lie,
or read there by ranks of this host.
"""

from __future__ import annotations

import io
import json
import logging
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import LaunchError, WeftError
from weft.hosts import host_id
from weft.server.invitations import Invitations
from weft.server.other_servers import TO_LEADER
from weft.server.protocol.frames import send_frames
from weft.server.protocol.keys import JobKey, let_in, read_key, secure_server, secure_worker
from weft.server.protocol.message import OBJECT_BYTES, pack_message
from weft.server.server import ParameterServer, Reply
from weft.server.snapshot_keeper import EVERY_S, SnapshotKeeper
from weft.server.status import Status, status_of

log = logging.getLogger("weft")
POLL_MS = 200
REPORT_EVERY_S = 1.0
UNTIL_LEFT = "l"
"""What the process that started a server tells it: to end when all workers have left."""
MOST_FILES = 1 << 20
"""Files and connections that a server's process asks for, if the system allows so many."""
_MOST_WAITING = 4096
"""Connections that are made and not looked at yet: all ranks of a run come at once."""
_COPY_BELOW = 65536
"""Bytes of a frame below which ZeroMQ copies it, which is faster there than to keep count of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server process is started with."""

    number: int
    bind: tuple[str, ...]
    """Addresses to listen at: ipc://PATH, or tcp://HOST:PORT, where port 0 takes a free one."""
    key_file: str | None
    """None: only at ipc addresses in a folder of the user's own."""
    leader: str | None
    """Where the first server listens; None for that one itself."""
    most_frame_bytes: int
    """The longest frame that may come: the plan's bucket."""
    dead_after_s: float
    num_threads: int
    job: str = ""
    """The name of the run, which the first server tells those who join it."""
    num_servers: int = 1
    num_started: int = 0
    """Workers that are started with the servers."""
    described: dict[str, Any] = field(default_factory=dict)
    """What those who join must have alike (`plan/shared_fields.py`)."""
    reports: bool = False
    """It says on its standard output how far it is (`status.py`), and what ends it."""
    folder: str | None = None
    """Where its snapshots are, from which it is started again when it dies; None: it is not."""
    snapshot_every_s: float = EVERY_S
    comes_back_s: float = 0.0
    """How long workers are to wait for its next start."""
    attempt: int = 0
    """Earlier starts, which ended before the run."""


class ServerLoop:
    """The sockets of one server."""

    def __init__(
        self,
        server: ParameterServer,
        options: ServerOptions,
        key: JobKey | None,
        *,
        keeper: SnapshotKeeper | None = None,
    ) -> None:
        import zmq

        if key is None and (open_ := [one for one in options.bind if not one.startswith("ipc://")]):
            raise LaunchError(
                f"a server that others can reach needs the job's key, and {open_[0]} has none; give --key FILE"
            )
        self._zmq, self.server, self._keeper, self._reports = zmq, server, keeper, options.reports
        self._reported: Status | None = None
        self._reported_s = 0.0
        self._context = zmq.Context()
        self._stop_letting_in = let_in(self._context, key) if key is not None else (lambda: None)
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # a reply to somebody who is gone is told, not dropped in silence
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a worker has one clock under way, which bounds them
        self._socket.linger = 0
        self._socket.backlog = _MOST_WAITING
        self._leader: Any = None
        self._leader_monitor: Any = None
        self._socket.maxmsgsize = max(options.most_frame_bytes, OBJECT_BYTES)
        self._socket.copy_threshold = _COPY_BELOW
        if key is not None:
            secure_server(self._socket, key)
        self.addresses: list[str] = []
        for address in options.bind:
            try:
                self._socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise LaunchError(
                    f"server {options.number} cannot listen at {address}: {error}; another server may have it already, "
                    "or this host may not have this address"
                ) from None
            endpoint: Any = self._socket.last_endpoint
            self.addresses.append(endpoint.decode().rstrip("\0"))
        server.others.address = self.addresses[0]
        self._leader = self._connect(options.leader, key) if options.leader is not None else None
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        if self._leader_monitor is not None:
            self._poller.register(self._leader_monitor, zmq.POLLIN)

    def _connect(self, leader: str, key: JobKey | None) -> Any:
        socket: Any = self._context.socket(self._zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        if key is not None:
            secure_worker(socket, key)
        self._leader_monitor = socket.get_monitor_socket(self._zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(leader)
        return socket

    @property
    def _sockets(self) -> list[Any]:
        return [self._socket] if self._leader is None else [self._socket, self._leader]

    def close(self) -> None:
        if self._leader_monitor is not None:
            self._leader.disable_monitor()
            self._leader_monitor.close()
        for socket in self._sockets:
            socket.close()
        if self._keeper is not None:
            self._keeper.close()
        self._stop_letting_in()
        self._context.term()

    def turn(self, timeout_ms: int = POLL_MS) -> None:
        """Receive and answer all that has come, or wait for something a little."""
        for socket, _ in self._poller.poll(timeout_ms):
            if socket in self._sockets:
                self._receive_all(socket)
            elif socket is self._leader_monitor:  # it is there, for the first time or again
                self._leader_monitor.recv_multipart()
                self._send(self.server.introduce())
        now_s = time.monotonic()
        if self._keeper is not None:
            self._keeper.turn(now_s)
        self._send(self.server.tick(now_s))

    def run_until_closed(self, parent: io.FileIO) -> None:
        """Serve until the other end of a pipe is closed, or says that the last worker that leaves is the end."""
        self._poller.register(parent.fileno(), self._zmq.POLLIN)
        ends_when_left = False
        while not (ends_when_left and self.server.is_left):
            ready = dict(self._poller.poll(POLL_MS))
            if parent.fileno() in ready:
                said = parent.read(1)
                ends_when_left = ends_when_left or said == UNTIL_LEFT.encode()
                if not said:
                    return
            self.turn(0)
            self._report(time.monotonic())

    def _report(self, now_s: float) -> None:
        """Say how far this server is, if that is asked for and new."""
        if not self._reports or now_s < self._reported_s + REPORT_EVERY_S:
            return
        status = status_of(self.server)
        if status != self._reported:
            print(json.dumps(asdict(status)), flush=True)
        self._reported, self._reported_s = status, now_s

    def _receive_all(self, socket: Any) -> None:
        while True:
            try:
                frames = socket.recv_multipart(self._zmq.DONTWAIT, copy=False)
            except self._zmq.Again:
                return
            peer = TO_LEADER if socket is self._leader else frames.pop(0).bytes
            self._send(self.server.receive(peer, [one.buffer for one in frames], time.monotonic()))

    def _send(self, replies: Sequence[Reply]) -> None:
        if self._keeper is not None:
            self._keeper.before_speaking()
        for reply in replies:
            frames, socket = pack_message(reply.message), self._leader
            if reply.peer != TO_LEADER:
                frames, socket = [reply.peer, *frames], self._socket
            try:
                if reply.lends and self.server.store is not None:
                    self.server.store.lend(send_frames(socket, frames))
                else:
                    socket.send_multipart(frames, copy=False)
            except self._zmq.ZMQError as error:
                if error.errno != self._zmq.EHOSTUNREACH:
                    raise
                self._send(self.server.lost(reply.peer))


def main() -> None:
    """Run until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the workers, whose last pushes are still taken
    with io.FileIO(sys.stdin.fileno(), closefd=False) as parent:
        options = json.loads(b"".join(iter(lambda: parent.read(1) or b"", b"\n")))  # and nothing that comes behind
    options = ServerOptions(**{**options, "bind": tuple(options["bind"])})
    try:
        run(options)
    except WeftError as error:
        if options.reports:
            _report_end(error)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run(options: ServerOptions) -> None:
    """Serve with the options given, and say where, until standard input is closed."""
    import torch

    torch.set_num_threads(options.num_threads)
    allow_connections()
    invitations = None
    if options.job and options.number == 0:
        invitations = Invitations(
            job=options.job,
            num_servers=options.num_servers,
            num_started=options.num_started,
            described=options.described,
        )
    server = ParameterServer(
        options.number,
        num_servers=options.num_servers,
        dead_after_s=options.dead_after_s,
        most_frame_bytes=options.most_frame_bytes,
        invitations=invitations,
        attempt=options.attempt,
        comes_back_s=options.comes_back_s,
        host=host_id(),
    )
    try:
        key = read_key(Path(options.key_file)) if options.key_file is not None else None
        keeper = None
        if options.folder is not None:
            keeper = SnapshotKeeper(server, Path(options.folder), every_s=options.snapshot_every_s)
        loop = ServerLoop(server, options, key, keeper=keeper)
    except WeftError as error:
        if options.attempt:  # nobody reads what a server says that was started again
            raise
        _report_end(error)
    print(json.dumps(loop.addresses), flush=True)
    parent = io.FileIO(sys.stdin.fileno(), closefd=False)
    try:
        loop.run_until_closed(parent)
    finally:
        loop.close()


def allow_connections() -> None:
    """Raise this process's limit on open files as far as it may: every rank has two connections here, and beyond the
    usual 1,024 the next ones would hear nothing, not even that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _report_end(error: WeftError) -> NoReturn:
    """End, and leave it to whoever started this process to say why."""
    print(json.dumps({"problems": error.problems}), flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
