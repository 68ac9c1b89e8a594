"""The referee's process: ranks connect to its socket, say what they call, and are told what came of it.

It imports no tensors and starts in a tenth of a second. It ends when all ranks have left or are dead.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from strict_nccl.mode import read_mode
from strict_nccl.referee import Referee

LENGTH = struct.Struct("<Q")


def address_of(name: str) -> bytes:
    """A name that is no file, so that nothing is left behind."""
    return b"\0" + name.encode()


def packed(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


@dataclass(slots=True, eq=False)
class Inbox:
    """Bytes that have come so far, cut into messages."""

    _bytes: bytearray = field(default_factory=bytearray)

    def add(self, some: bytes) -> list[Any]:
        self._bytes += some
        messages, start = [], 0
        while len(self._bytes) >= start + LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(self._bytes, start)[0]
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(memoryview(self._bytes)[start + LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return messages


@dataclass(slots=True, eq=False)
class _Peer:
    socket: socket.socket
    rank: int | None = None
    inbox: Inbox = field(default_factory=Inbox)
    outbox: bytearray = field(default_factory=bytearray)


class Server:
    def __init__(self, name: str, referee: Referee, num_ranks: int) -> None:
        self._referee = referee
        self._num_ranks = num_ranks
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._num_open = 0
        self._num_met = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address_of(name))
        self._listener.listen(num_ranks)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        while self._num_met < self._num_ranks or self._num_open:
            for key, events in self._selector.select(self._referee.sleep_s(time.monotonic())):
                if key.data is None:
                    self._accept()
                elif events & selectors.EVENT_READ:
                    self._read(key.data)
                elif events & selectors.EVENT_WRITE:
                    self._write(key.data)
            self._referee.advance(time.monotonic())
            for rank, reply in self._referee.replies:
                if rank in self._peers:
                    self._peers[rank].outbox += packed(reply)
            self._referee.replies.clear()
            for peer in list(self._peers.values()):
                self._write(peer)

    def _accept(self) -> None:
        found, _ = self._listener.accept()
        found.setblocking(False)
        self._selector.register(found, selectors.EVENT_READ, _Peer(found))
        self._num_open += 1
        self._num_met += 1

    def _read(self, peer: _Peer) -> None:
        try:
            some = peer.socket.recv(1 << 20)
        except ConnectionError:
            some = b""
        if not some:
            self._drop(peer)
        for message in peer.inbox.add(some):
            self._obey(peer, *message)

    def _obey(self, peer: _Peer, verb: str, *what: Any) -> None:
        now_s = time.monotonic()
        if verb == "hello":
            (peer.rank,) = what
            assert peer.rank is not None
            self._peers[peer.rank] = peer
            if self._referee.failure is not None:
                peer.outbox += packed(("failed", self._referee.failure))
            return
        assert peer.rank is not None
        if verb == "call":
            self._referee.call(what[0], now_s)
        elif verb == "wait":
            self._referee.wait(peer.rank, what[0], now_s)
        elif verb == "leave":
            self._referee.leave(peer.rank, what[0], now_s)

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.outbox:
                sent = peer.socket.send(peer.outbox)
                del peer.outbox[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._num_open -= 1
        if peer.rank is not None:
            del self._peers[peer.rank]
            if not self._referee.has_left(peer.rank):
                self._referee.leave(peer.rank, "its connection ended", time.monotonic())


def main(name: str, num_ranks: str, mode: str) -> None:
    server = Server(name, Referee(int(num_ranks), read_mode(mode)), int(num_ranks))
    print("ready", flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
