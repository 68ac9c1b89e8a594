"""A worker's rank's connections to all servers: messages out and in, and a heartbeat beside them.

Sending gives bytes to ZeroMQ's own thread and returns; they leave from where they lie, in memory that is not written
before the servers have said that they have it. The heartbeat has connections of its own, because it comes from another
thread, and goes on while a step computes for long. Whether a server is there is asked of its connection, which ZeroMQ's
own thread answers for it: a server that updates for long is not gone. One that hangs is found by the step's time limit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.comm.group import Traffic
from weft.errors import LaunchError
from weft.server.protocol.keys import JobKey, secure_worker
from weft.server.protocol.message import HEADER_BYTES, Malformed, Message, pack_message, read_message

HEARTBEAT_S = 1.0
DEAF_AFTER_S = 10.0
"""A server's process whose ZeroMQ does not answer for so long has no connection any more."""
_COPY_BELOW = 65536


@dataclass(frozen=True, slots=True)
class Lost:
    """What was on its way to and from a server is gone. Its connection is made again, as soon as it can be."""

    server: int


class ServerConnection:
    """Sockets to the servers of a run, in their order."""

    def __init__(self, addresses: Sequence[str], key: JobKey | None, *, traffic: Traffic | None = None) -> None:
        """`traffic`: where what is sent is counted, too."""
        import zmq

        self._traffic = Traffic() if traffic is None else traffic

        self._zmq, self.addresses = zmq, tuple(addresses)
        self._key = key
        self._context = zmq.Context()
        try:
            made = [self._connect(address) for address in addresses]
        except BaseException:
            self._context.destroy()
            raise
        self._sockets, self._monitors = [socket for socket, _ in made], [monitor for _, monitor in made]
        self._poller = zmq.Poller()
        self._is_made = [False] * len(self._sockets)
        """A connection is there; those that a server refuses never are."""
        self._heard_s: list[float] = []
        """When each server was there last, since heartbeats have begun."""
        for socket in (*self._sockets, *self._monitors):
            self._poller.register(socket, zmq.POLLIN)
        self._beating: threading.Thread | None = None
        self._ends = threading.Event()
        self.num_malformed = 0
        self.sent_bytes = [0] * len(self._sockets)
        """To each server so far, headers included, and what is in shared memory; without heartbeats."""
        self.received_bytes = [0] * len(self._sockets)
        """By ZeroMQ."""

    def _connect(self, address: str, *, pings: bool = False) -> tuple[Any, Any]:
        """A socket, and what says whether it is connected."""
        zmq = self._zmq
        socket: Any = self._context.socket(self._zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.copy_threshold = _COPY_BELOW
        if self._key is not None:
            secure_worker(socket, self._key)
        if pings:
            socket.heartbeat_ivl = int(1000 * HEARTBEAT_S)
            socket.heartbeat_timeout = int(1000 * DEAF_AFTER_S)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise LaunchError(f"{address} is no address of a server: {error}; give tcp://HOST:PORT") from None
        return socket, monitor

    def send(self, message: Message) -> None:
        """Send a message to its server, from where it lies. To one that has refused the connection, for its key, there
        is no way: nothing is sent, and no answer comes."""
        frames = pack_message(message)
        try:
            self._sockets[message.server].send_multipart(frames, self._zmq.DONTWAIT, copy=False)
        except self._zmq.Again:
            return
        num_bytes = HEADER_BYTES + sum(map(len, message.frames))  # also of those in shared memory
        self.sent_bytes[message.server] += num_bytes
        self._traffic.add(num_calls=1, sent_bytes=num_bytes)

    def receive(self, timeout_s: float) -> Message | Lost | None:
        """The next message of any server, or that a connection was lost; None if nothing came in this time."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = max(int(1000 * (deadline - time.monotonic())), 0)
            ready = [socket for socket, _ in self._poller.poll(left_ms)]
            if not ready:
                return None
            for number, monitor in enumerate(self._monitors):
                if monitor in ready and self._is_lost(number, monitor.recv_multipart()[0]):
                    return Lost(number)
            ready = [socket for socket in ready if socket not in self._monitors]
            if not ready:
                continue
            frames = ready[0].recv_multipart(copy=False)
            try:
                message = read_message([one.buffer for one in frames])
            except Malformed:
                self.num_malformed += 1
                continue
            number = self._sockets.index(ready[0])
            if message.server != number:
                raise LaunchError(
                    f"at {self.addresses[number]} is server {message.server} of the run, not server {number}; give the "
                    "addresses of all servers in their order"
                )
            self.received_bytes[number] += sum(len(one) for one in frames)
            return message

    def _is_lost(self, number: int, event: bytes) -> bool:
        """What a monitor says of a connection: true if it was there, and is not any more."""
        was_made = self._is_made[number]
        self._is_made[number] = self._is_made_by(event)
        return was_made and not self._is_made[number]

    def _is_made_by(self, event: bytes) -> bool:
        """What a monitor says: a connection is there now, or not any more."""
        return int.from_bytes(event[:2], sys.byteorder) == int(self._zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def begin_heartbeat(self, alive: Callable[[], Message]) -> None:
        """Send the message that this returns to all servers every second until `close`."""
        self._heard_s = [time.monotonic()] * len(self.addresses)
        self._beating = threading.Thread(target=self._beat, args=(alive,), name="weft-alive", daemon=True)
        self._beating.start()

    def _beat(self, alive: Callable[[], Message]) -> None:
        made = [self._connect(address, pings=True) for address in self.addresses]
        is_there = [True] * len(made)  # they were, when this rank joined
        while True:
            frames = pack_message(alive())
            for (socket, _), there in zip(made, is_there, strict=True):
                if there:
                    with suppress(self._zmq.Again):
                        socket.send_multipart(frames, self._zmq.DONTWAIT)
            if self._ends.wait(HEARTBEAT_S):
                break
            for number, (socket, monitor) in enumerate(made):
                while socket.poll(0):
                    socket.recv_multipart()
                while monitor.poll(0):
                    is_there[number] = self._is_made_by(monitor.recv_multipart()[0])
                if is_there[number]:
                    self._heard_s[number] = time.monotonic()
        for socket, monitor in made:
            socket.disable_monitor()
            monitor.close()
            socket.close()

    @property
    def silent_s(self) -> tuple[float, ...]:
        """Seconds for which each server has not been there."""
        now_s = time.monotonic()
        return tuple(now_s - heard_s for heard_s in self._heard_s)

    def close(self) -> None:
        """Give the connections back; what was sent last still leaves, for a second at most."""
        self._ends.set()
        if self._beating is not None:
            self._beating.join()
        for socket, monitor in zip(self._sockets, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close()
            socket.close(linger=1000)
        self._context.term()
