"""A rank of a worker at its servers: what it sends and waits for, over connections that may be lost and come back.

All waiting is here. Whoever waits for weights takes part in what else has to be said meanwhile, and learns by an error
what a person has to mend: a server that nobody answers at, one that refuses this worker, one that is gone.

Weights may be used as they come: then they are received in the background (`background.py`), and nothing else is sent
or received until all of them are here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from weft.comm.group import Traffic
from weft.errors import LaunchError
from weft.server.protocol.background import Background
from weft.server.protocol.connection import Lost, ServerConnection
from weft.server.protocol.keys import JobKey
from weft.server.protocol.message import Buffer, Commit, Kind, Malformed, Message
from weft.server.protocol.one_clock import Board, OneClock
from weft.server.protocol.optimizer_state import PartState
from weft.server.protocol.worker_rank import State, WorkerRank

log = logging.getLogger("weft")
JOIN_TIMEOUT_S = 20.0
SILENT_AFTER_S = 10.0
"""A server that was not heard for so long is gone, unless it said that it would be started again."""
LEAVES_WITHIN_S = 10.0
"""For so long a rank waits for others of its worker before it leaves."""
_LOOK_S = 0.5
"""Seconds after which a wait looks whether servers are still there."""
_LOOK_RANKS_S = 0.001
"""The same for other ranks of the worker, of which no message comes."""
_BEGINNINGS = (Kind.BEGIN, Kind.WEIGHTS, Kind.WEIGHTS_SHARED)


class ServerClient:
    """One rank's side of a run with servers."""

    def __init__(
        self,
        addresses: Sequence[str],
        key: JobKey | None,
        rank: WorkerRank,
        *,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        traffic: Traffic | None = None,
        board: Board | None = None,
    ) -> None:
        """Joins the run; raises LaunchError if that cannot be. `traffic`: where what is sent is counted. `board`: where
        the ranks of a worker agree on what they begin; None for a worker of one rank."""
        if len(addresses) != len(rank.layouts):
            raise LaunchError(
                f"{len(addresses)} addresses of servers for [server] shards = {len(rank.layouts)}: give one for each, "
                "in their order"
            )
        self.rank = rank
        self._connection = ServerConnection(addresses, key, traffic=traffic)
        self._one_clock = None if board is None else OneClock(board)
        self._put_off: deque[Message] = deque()
        """What came of later beginnings while this rank had begun a clock with the others."""
        self._warned: set[int] = set()
        """Servers whose silence was told."""
        self._background = Background()
        self._is_closing = False
        try:
            self._say(rank.hello())
            self._join(join_timeout_s)
        except BaseException:
            self._background.close()
            self._connection.close()
            raise
        self._connection.begin_heartbeat(rank.alive)

    def push(self, server: int, bucket: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send a bucket of this clock's gradients, from where they lie, or through shared memory; None for a part
        without one. They must stay as they are until the weights of the next clock are here."""
        self._connection.send(self.rank.push_gradients(server, bucket, gradients))

    def push_frames(self, server: int, bucket: int, frames: Sequence[Buffer]) -> None:
        """Send a bucket of this clock's gradients that was packed (`pushes.py`); as `push`."""
        self._background.wait()
        self._connection.send(self.rank.push(server, bucket, frames))

    def commit(self, said: Commit) -> None:
        """All gradients of this clock were pushed."""
        self._background.wait()
        self._say(self.rank.commit(said))

    def wait_for_weights(self, *, timeout_s: float) -> None:
        """Return when all weights of the next clock are here, on all ranks of the worker; raises LaunchError if they do
        not come."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._until(lambda: self.rank.state == State.HERE, deadline - time.monotonic(), self._no_weights)
            if self._one_clock is None or self._agree(self._one_clock, deadline - time.monotonic()):
                return

    def _agree(self, one_clock: OneClock, timeout_s: float) -> bool:
        """True if all ranks of the worker have begun the same clock; else all begin anew."""
        one_clock.post(self.rank.session, self.rank.begun)
        self._until(lambda: one_clock.is_whole, timeout_s, self._no_ranks, puts_off=True)
        if (session := one_clock.next_session()) is None:
            return True
        self._say(self.rank.go_back(session))
        return False

    def wait_for_clock(self, *, timeout_s: float) -> None:
        """Return when all servers have begun the next clock: its weights are on their way. In a worker of several ranks
        they are there: the others would wait in a collective for one that loses a connection meanwhile."""
        if self._one_clock is not None:
            self.wait_for_weights(timeout_s=timeout_s)
        else:
            self._until(lambda: self.rank.has_begun, timeout_s, self._no_weights)

    def use_weights(self, *, timeout_s: float) -> None:
        """Use the weights of this clock from now on, of which the others come in the background."""
        self.rank.use()
        if self.rank.state != State.HERE:
            self._background.start(lambda: self.wait_for_weights(timeout_s=timeout_s))

    def wait_for_buckets(self, buckets: Collection[tuple[int, int]]) -> None:
        """Return when these buckets, by server and number, of the weights that are in use are here."""
        self._background.wait_for(lambda: self._has(buckets))
        if not self._has(buckets):
            raise LaunchError("this worker has left its run before all weights came; read weights before it leaves")

    def _has(self, buckets: Collection[tuple[int, int]]) -> bool:
        return all(self.rank.has_bucket(*one) for one in buckets)

    def wait_for_all(self) -> None:
        """Return when all weights that are in use are here."""
        self._background.wait()

    def fetch_state(self, *, timeout_s: float) -> Iterator[tuple[int, int, torch.Tensor, PartState]]:
        """Server, part, weights and the optimizer's state of all that this rank holds; of one version on all servers
        where they have common ones, which others may be about to leave."""
        self._background.wait()
        asked = self.rank.state_of_optimizer
        while True:
            self._say(self.rank.ask_state())
            self._until(
                lambda: asked.is_here and self.rank.state == State.HERE,
                timeout_s,
                self._no_weights,
                puts_off=self._one_clock is not None,
            )
            if not self.rank.settings.is_sync or len(asked.versions) <= 1:
                return asked.hand_over()

    @property
    def exchanged_bytes(self) -> list[tuple[int, int]]:
        """Sent to each server so far, and received from it; also through shared memory."""
        by_socket, shared = self._connection.received_bytes, self.rank.shares.read_bytes
        received = [one + other for one, other in zip(by_socket, shared, strict=True)]
        return list(zip(self._connection.sent_bytes, received, strict=True))

    def close(self, *, failed: bool = False) -> None:
        """Leave the run. A server that is being started again gets first what it has lost, for nobody else has it.
        `failed`: other ranks of the worker may not leave."""
        self._is_closing = True
        self._background.close()
        self._is_closing = False
        if any(self.rank.comes_back_s.values()):
            with suppress(LaunchError, Malformed):
                self._bring_lost(max(self.rank.comes_back_s.values()))
        if self._one_clock is not None and not failed:
            with suppress(LaunchError, Malformed, RuntimeError):  # of a store that is gone with its rank
                self._meet_to_leave(self._one_clock)
        self._say(self.rank.leave())
        self._connection.close()

    def _bring_lost(self, timeout_s: float) -> None:
        while (found := self._connection.receive(0.0)) is not None:
            self._say(self.rank.hello_again(found.server) if isinstance(found, Lost) else self.rank.receive(found))
        self._until(lambda: len(self.rank.welcomed) == len(self.rank.layouts), timeout_s, lambda: "it does not answer")

    def _meet_to_leave(self, one_clock: OneClock) -> None:
        """No rank of a worker leaves before all are about to: servers end when the last worker leaves, and another rank
        of it would then wait for them to come back."""
        one_clock.post(self.rank.session, [])
        self._until(lambda: one_clock.is_whole, LEAVES_WITHIN_S, self._no_ranks, puts_off=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, timeout_s: float) -> None:
        def missing() -> str:
            silent = [
                address for number, address in enumerate(self._connection.addresses) if number not in self.rank.welcomed
            ]
            return (
                f"no server of this run answers at {', '.join(silent)} (waited {timeout_s:g} s): start it first, and "
                "look whether the address is right, the port open, and the key that of the same job"
            )

        self._until(lambda: len(self.rank.welcomed) == len(self.rank.layouts), timeout_s, missing)

    def _no_weights(self) -> str:
        missing = [number for number in range(len(self.rank.layouts)) if number not in self.rank.begins]
        whose = f"server {', '.join(map(str, missing))}" if missing else "a server that has begun to send them"
        return (
            f"worker {self.rank.worker} waited too long for the weights after its step {self.rank.clock + 1}, from "
            f"{whose}; other workers may be stuck: see their output"
        )

    def _no_ranks(self) -> str:
        return (
            f"a rank of worker {self.rank.worker} waited too long for the worker's others to begin step "
            f"{self.rank.clock + 1}; see their output"
        )

    def _until(
        self, is_done: Callable[[], bool], timeout_s: float, problem: Callable[[], str], *, puts_off: bool = False
    ) -> None:
        """`puts_off`: what begins another clock waits for the next time."""
        deadline, look_s = time.monotonic() + timeout_s, _LOOK_RANKS_S if puts_off else _LOOK_S
        while self._put_off and not puts_off:
            self._say(self.rank.receive(self._put_off.popleft()))
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LaunchError(problem())
            found = self._connection.receive(min(left_s, look_s))
            if self._is_closing:
                return
            with self._background.changed:
                if isinstance(found, Lost):
                    self._say(self.rank.hello_again(found.server))
                elif found is not None and puts_off and found.kind in _BEGINNINGS:
                    self._put_off.append(found)
                elif found is not None:
                    self._say(self.rank.receive(found))
                self._background.changed.notify_all()
            if found is None:
                self._require_servers()
            if self.rank.refused is not None:
                raise LaunchError(self.rank.refused)

    def _require_servers(self) -> None:
        """Raise LaunchError if a server is gone for longer than it takes to start it again."""
        for server, silent_s in enumerate(self._connection.silent_s):
            limit_s = max(SILENT_AFTER_S, self.rank.comes_back_s.get(server, 0.0))
            if silent_s > limit_s:
                raise LaunchError(
                    f"the server at {self._connection.addresses[server]} does not answer any more (waited "
                    f"{limit_s:g} s); see its output"
                )
            if silent_s > SILENT_AFTER_S and server not in self._warned:
                self._warned.add(server)
                log.warning(
                    "the server at %s does not answer; worker %d waits for it to be started again, for %g s at most",
                    self._connection.addresses[server],
                    self.rank.worker,
                    limit_s,
                )

    def _say(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._connection.send(message)
