"""Asynchronous updates, one server's part: every gradient is an update, as soon as all of it is there.

Workers wait for nobody, or, with bounded staleness, for those that are too far behind (`workers/clocks.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from weft.server.protocol.message import Kind, Malformed, Message
from weft.server.protocol.worker_rank import SESSION_BITS
from weft.server.weights.updates import Told, Updates
from weft.server.workers.arrivals import Arrivals
from weft.server.workers.clocks import Clocks


class EachAlone:
    """The updates of an asynchronous run, on one server."""

    agrees = False
    """Servers agree on nothing."""
    is_behind = False
    """What workers send again is applied as it comes."""
    is_in_update = False
    """Updates are made at once."""
    num_dropped = 0
    """No gradient is too late for its version."""
    num_known = 0
    """Decisions of several servers."""
    num_lost = 0
    """Nothing is decided on before it is made."""

    def __init__(self, *, num_workers: int, staleness: int | None, arrivals: Mapping[int, Arrivals]) -> None:
        self._num_workers, self._arrivals = num_workers, arrivals
        self.clocks = Clocks(staleness)
        self.has_begun = False
        self._starts: dict[int, int] = {}
        """The last start of each worker, by the upper half of its sessions."""
        self._used: dict[int, int] = {}
        """Of each worker, the clock after the last one of which an update was made; 0 if there is none."""
        self.outbox: deque[Message] = deque()
        """Stays empty."""
        self._updates: Updates | None = None

    def begin(self, updates: Updates) -> None:
        """Weights are there."""
        self._updates = updates

    def join(self, worker: int, session: int, first: int) -> None:
        """A worker is there, with all its ranks. One that has just been started begins with the slowest of the others,
        one whose connection was lost where it was: what it sends again must not be left out on some servers. `first`:
        the first clock that it can send, -1 if it has begun none."""
        arrivals, start = self._arrivals[worker], session >> SESSION_BITS
        if first >= 0:
            arrivals.begin_with(first)
        elif self._starts.get(worker) != start:
            arrivals.begin_with(self.clocks.slowest)
        self._starts[worker] = start
        self.clocks.join(worker, arrivals.next_clock)
        self.has_begun = self.has_begun or len(self.sharing) >= self._num_workers

    def skip(self, worker: int, clock: int) -> None:
        """A worker goes on with a later clock, with which it has begun on other servers."""
        self.clocks.join(worker, clock)

    def leave(self, worker: int, session: int) -> None:
        """A worker is gone."""
        self.clocks.leave(worker)

    def complete(self, worker: int, session: int) -> None:
        """A worker has sent all of a clock, and maybe of later ones, which were sent again."""
        assert self._updates is not None
        arrivals = self._arrivals[worker]
        while arrivals.is_complete(clock := arrivals.next_clock):
            is_used = self._updates.by_one(worker, arrivals.take(clock))
            self._used[worker] = clock + 1 if is_used else self._used.get(worker, 0)
            self.clocks.finish(worker, clock)

    def may_begin(self, worker: int) -> bool:
        """True if a worker that waits may begin its next clock, and does."""
        return self.has_begun and worker in self.clocks and self.clocks.may_begin(worker)

    @property
    def sharing(self) -> tuple[int, ...]:
        """The workers that share the data now."""
        return self.clocks.workers

    def used(self, worker: int) -> int:
        """The clock after the last one of a worker that is in the weights; that before its next one, for a server that
        has not seen any."""
        return self._used.get(worker, self._arrivals[worker].next_clock)

    def told(self, worker: int) -> Told:
        """What a worker is told of its last gradient."""
        assert self._updates is not None
        return self._updates.last_of(worker)

    # Started again.

    def as_plain(self) -> dict[str, Any]:
        """What `go_on` needs."""
        return {
            "starts": sorted(self._starts.items()),
            "used": sorted(self._used.items()),
            "sharing": self.sharing,
            "begun": self.has_begun,
        }

    def go_on(self, plain: Mapping[str, Any], records: Sequence[object]) -> None:
        """Begin where an earlier process was, with its workers, who are to come again."""
        del records
        self.has_begun = plain["begun"]
        self._starts, self._used = dict(plain["starts"]), dict(plain["used"])
        for worker in plain["sharing"]:
            self.clocks.join(worker, self._arrivals[worker].next_clock)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Workers for which the others may have to wait."""
        return self.sharing

    def give_up(self, worker: int) -> None:
        """A worker has not come again."""
        self.clocks.leave(worker)

    def advance(self) -> None:
        """Nothing was decided that waits for a worker."""

    def say_again(self, leaving: Mapping[int, int]) -> None:
        """Nothing is said to other servers."""

    def meet(self, server: int, num_known: int) -> str | None:
        """Another server is there, which nothing has to be told."""
        return None

    def saved(self, num_made: int) -> None:
        """Nothing is kept for other servers."""

    def hear(self, message: Message) -> Sequence[tuple[int, int]]:
        """Another server says something, which can only be that it knew of no decision before the first hello."""
        if message.kind == Kind.KNOWN:
            return ()
        raise Malformed(f"{message.kind.name}, and servers agree on nothing in this mode")
