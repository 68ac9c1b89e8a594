"""Servers in threads that keep back all but the first layers of a clock's weights, until a test lets them go; or that
send one bucket of weights to each worker at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from served_in_threads import TURN_MS, servers_in_threads

from weft.server.outgoing import Reply
from weft.server.process import ServerLoop
from weft.server.protocol.client import ServerClient
from weft.server.protocol.message import Kind


class HeldWeights:
    """What is kept back: all buckets of a clock's weights but the first ones of each server."""

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first
        self.num_sent = 0
        """Buckets that were kept back for a while."""
        self.num_held = 0
        self._goes = threading.Event()
        self._let_go = 0
        """The last clock of which all is sent; that of the first weights at the beginning."""
        self._newest = 0
        self._held: dict[int, list[Reply]] = {}
        """By server."""
        self._lock = threading.Lock()

    def let_go(self) -> None:
        """Send all that is kept back."""
        with self._lock:
            self._let_go = self._newest

    def let_all_go(self) -> None:
        """Keep nothing back any more."""
        self._let_go = 1 << 62

    @property
    def is_holding(self) -> bool:
        return any(self._held.values())

    def sort(self, server: int, replies: Sequence[Reply]) -> list[Reply]:
        """What is sent now, of what was kept back before and of what is new."""
        with self._lock:
            kept, now = self._held.setdefault(server, []), []
            for reply in [*kept, *replies]:
                message = reply.message
                self._newest = max(self._newest, message.clock if message.kind == Kind.WEIGHTS else 0)
                is_first = message.kind != Kind.WEIGHTS or message.bucket < self.num_first
                now += [reply] if is_first or message.clock <= self._let_go else []
            sent = set(map(id, now))
            self._held[server] = [one for one in [*kept, *replies] if id(one) not in sent]
            return now


@contextmanager
def holding_weights(num_first: int, *, goes_when_waited: bool = False) -> Iterator[HeldWeights]:
    """Context in which a trainer's servers are threads that keep back weights. `goes_when_waited`: until somebody waits
    for some of them."""
    held = HeldWeights(num_first)
    send, turn, wait = ServerLoop._send, ServerLoop.turn, ServerClient.wait_for_buckets

    def hold_and_send(self: ServerLoop, replies: Sequence[Reply]) -> None:
        send(self, held.sort(self.server.number, replies))

    def send_and_turn(self: ServerLoop, *given: Any) -> None:
        hold_and_send(self, ())
        turn(self, *given)

    def let_go_and_wait(self: ServerClient, *given: Any) -> None:
        if goes_when_waited:
            held.let_go()
        wait(self, *given)

    with (
        servers_in_threads(),
        mock.patch.object(ServerLoop, "_send", hold_and_send),
        mock.patch.object(ServerLoop, "turn", send_and_turn),
        mock.patch.object(ServerClient, "wait_for_buckets", let_go_and_wait),
    ):
        try:
            yield held
        finally:
            held.let_all_go()


@contextmanager
def trickling_weights() -> Iterator[None]:
    """Context in which a trainer's servers are threads that send a bucket of weights to each connection, look whether
    something has come, and send the next one."""
    send, turn = ServerLoop._send, ServerLoop.turn
    waiting: dict[tuple[int, bytes], deque[Reply]] = {}

    def hold_and_send(self: ServerLoop, replies: Sequence[Reply]) -> None:
        weights = [one for one in replies if one.message.kind == Kind.WEIGHTS]
        for one in weights:
            waiting.setdefault((self.server.number, one.peer), deque()).append(one)
        send(self, [one for one in replies if one.message.kind != Kind.WEIGHTS])

    def send_and_turn(self: ServerLoop, *given: Any) -> None:
        mine = [queue for (number, _), queue in list(waiting.items()) if number == self.server.number and queue]
        send(self, [queue.popleft() for queue in mine])
        turn(self, 1 if mine else TURN_MS)

    with (
        servers_in_threads(),
        mock.patch.object(ServerLoop, "_send", hold_and_send),
        mock.patch.object(ServerLoop, "turn", send_and_turn),
    ):
        yield
