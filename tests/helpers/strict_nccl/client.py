"""A rank's connection to the referee. Replies are read when somebody needs one, so there is no thread."""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

from strict_nccl.calls import Call, StrictError
from strict_nccl.mode import StrictMode
from strict_nccl.server import Inbox, address_of, packed

SILENT_S = 0.05
"""Only longer waits are reported to the referee, which saves half of all messages."""


class RefereeClient:
    """One per process and strict world; used by every thread that exchanges."""

    def __init__(self, name: str, rank: int, mode: StrictMode) -> None:
        self.rank = rank
        self.mode = mode
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address_of(name))
        self._inbox = Inbox()
        self._open: set[int] = set()
        self._results: dict[int, list[Any]] = {}
        self._failure: str | None = None
        self._is_closed = False
        self._is_reading = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._num_calls = 0
        self._say("hello", rank)

    def next_number(self) -> int:
        with self._sending:
            self._num_calls += 1
            return self._num_calls

    def call(self, call: Call) -> None:
        """Send a call to the referee; returns when NCCL would let the host continue."""
        self._raise_failure()
        self._say("call", call)
        if call.blocks_host:
            self._read_until(lambda: call.number in self._open)
            self._open.discard(call.number)

    def is_over(self, number: int) -> bool:
        with self._changed:
            if number not in self._results and not self._is_reading:
                self._read(socket.MSG_DONTWAIT)
            self._raise_failure()
            return number in self._results

    def wait(self, number: int) -> list[Any]:
        """The results of a call, once it is over."""
        if not self.is_over(number):
            arrival = select.poll()  # not `select.select`, which takes no descriptor above 1,023
            arrival.register(self._socket, select.POLLIN)
            arrival.poll(SILENT_S * 1e3)
            if not self.is_over(number):
                self._say("wait", number)
                self._read_until(lambda: number in self._results)
        return self._results.pop(number)

    def leave(self, problem: str | None) -> None:
        """Make no more calls, and wait until the other ranks do not either; raises if they broke a rule meanwhile."""
        try:
            if self._failure is None:
                self._say("leave", problem)
                if problem is None:
                    self._read_until(lambda: self._is_closed)
        finally:
            self._socket.close()

    def _say(self, *message: object) -> None:
        with self._sending:
            try:
                self._socket.sendall(packed(message))
            except ConnectionError as error:
                raise StrictError("the referee is gone") from error

    def _read_until(self, is_enough: Any) -> None:
        """One thread reads for all."""
        with self._changed:
            while not is_enough():
                self._raise_failure()
                if self._is_reading:
                    self._changed.wait()
                    continue
                self._is_reading = True
                self._changed.release()
                try:
                    some = self._receive(0)
                finally:
                    self._changed.acquire()
                    self._is_reading = False
                    self._changed.notify_all()
                self._keep(some)

    def _read(self, flags: int) -> None:
        self._keep(self._receive(flags))

    def _receive(self, flags: int) -> bytes | None:
        try:
            return self._socket.recv(1 << 20, flags)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def _keep(self, some: bytes | None) -> None:
        if some == b"":
            self._failure = self._failure or "the referee is gone"
        for verb, *what in self._inbox.add(some or b""):
            if verb == "open":
                self._open.add(what[0])
            elif verb == "done":
                self._results[what[0]] = what[1]
            elif verb == "failed":
                self._failure = what[0]
            else:
                self._is_closed = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StrictError(self._failure)
