"""Relays between workers and servers on loopback, whose connections a test may cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self


class Relays:
    """One relay per server; it passes on bytes in both directions."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listening = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
        self.addresses = tuple(f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in self._listening)
        self.num_cut = 0
        self._left: int | None = None
        self._has_more = threading.Condition()
        for listener, address in zip(self._listening, addresses, strict=True):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            threading.Thread(target=self._accept, args=(listener, host, int(port)), daemon=True).start()

    def cut(self) -> None:
        """Close all connections that are open; new ones are accepted."""
        self.num_cut += 1
        with self._lock:
            for one in self._open:
                _shut(one)
            self._open = []

    def let_through(self, num_bytes: int | None) -> None:
        """How much more comes from servers, to some 4 KB; None: all."""
        with self._has_more:
            self._left = num_bytes
            self._has_more.notify_all()

    def _take(self, num_bytes: int) -> None:
        """Wait until so much may pass."""
        with self._has_more:
            self._has_more.wait_for(lambda: self._left is None or self._left > 0)
            if self._left is not None:
                self._left -= num_bytes

    def cut_at(self, clock: int) -> int:
        """Cut in two clocks of eight; the size of a batch, for a worker that asks for it in every clock."""
        if clock in (2, 5):
            self.cut()
        return 4

    def _accept(self, listener: socket.socket, host: str, port: int) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((host, port))
            except OSError:  # which is being started again
                _shut(near)
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink, take in ((near, far, lambda num_bytes: None), (far, near, self._take)):
                threading.Thread(target=_pass_on, args=(source, sink, take), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._listening:
            _shut(one)
        for one in self._open:
            _shut(one)


def _pass_on(source: socket.socket, sink: socket.socket, take: Callable[[int], None]) -> None:
    try:
        while found := source.recv(4096):
            take(len(found))
            sink.sendall(found)
    except OSError:
        pass
    _shut(source)
    _shut(sink)


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()
