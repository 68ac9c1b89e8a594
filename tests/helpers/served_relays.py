"""Relays between workers and servers on loopback, whose connections a test may cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
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

    def cut_at(self, clock: int) -> int:
        """Cut in two clocks of eight; the size of a batch, for a worker that asks for it in every clock."""
        if clock in (2, 5):
            self.cut()
        return 4

    def _accept(self, listener: socket.socket, host: str, port: int) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection((host, port))
            except OSError:
                return
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._listening:
            _shut(one)
        for one in self._open:
            _shut(one)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    try:
        while found := source.recv(65536):
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
