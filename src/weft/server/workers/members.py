"""Who takes part: the ranks of every worker, the connections by which they are reached, and when each was last heard.

A worker is there once all its ranks have said hello, and gone when one of them says so or none of its heartbeats came
for `dead_after_s`. A *session* is of a whole worker and lasts until a server gives it up: the upper half of its number
is drawn at the worker's start, the lower half counts. So a second worker of the same number is refused while the first
one lives, and one that says hello anew, because a server has ended its session, takes its own place, with all its ranks
(`hello.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.errors import LaunchError
from weft.server.protocol.worker_rank import SESSION_BITS

DEAD_AFTER_S = 5.0


@dataclass(slots=True)
class Member:
    """A worker."""

    session: int
    heard_s: float
    peers: dict[int, bytes] = field(default_factory=dict)
    """The connection of each of its ranks."""
    clocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: the first clock that it can send, -1 before it has begun any, and the first that it has not sent yet."""


class Members:
    """The workers of a run, as one server knows them. Times are given by the caller."""

    def __init__(self, *, num_ranks: int, dead_after_s: float = DEAD_AFTER_S) -> None:
        self.num_ranks, self._dead_after_s = num_ranks, dead_after_s
        self._members: dict[int, Member] = {}
        self._numbers: dict[bytes, tuple[int, int]] = {}
        """Worker and rank of each connection."""
        self.num_joined = 0
        """Workers so far, whether they are there or gone."""
        self._over: dict[int, int] = {}
        """The last session of each worker that is over here."""
        self._last_gone: tuple[int, int] | None = None
        """Number and start of the worker that went last."""
        self.ended: dict[int, int] = {}
        """The start of each worker that has said that it ends, here or to another server, and was not started again."""

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that are there, in order."""
        return tuple(sorted(number for number, one in self._members.items() if len(one.peers) == self.num_ranks))

    @property
    def is_over(self) -> bool:
        """Nobody is there any more, and whoever went last did not die: it said that it ends."""
        if self._last_gone is None:  # this process has seen nobody, and was told
            return self.is_empty and bool(self.ended)
        worker, start = self._last_gone
        return self.is_empty and self.ended.get(worker) == start

    @property
    def is_empty(self) -> bool:
        """Nobody is there."""
        return not self._members

    def free_number(self) -> int:
        """A number for a worker that has none."""
        return max([self.num_joined - 1, *self._members]) + 1

    def comes_again(self, worker: int, place: int, *, session: int, peer: bytes) -> bool:
        """True if a rank that is there says hello by another connection: what was on its way by the old one is lost."""
        member = self._members.get(worker)
        return member is not None and member.session == session and member.peers.get(place, peer) != peer

    def is_earlier(self, worker: int, session: int) -> bool:
        """A worker is there in an earlier session of the same start."""
        return _is_later(session, self.session_of(worker))

    def is_over_for(self, worker: int, session: int) -> bool:
        """A session is over here, or its worker is there in a later one."""
        over = self._over.get(worker, -1)
        return over == session or _is_later(over, session) or _is_later(self.session_of(worker), session)

    def next_session(self, worker: int, session: int) -> int:
        """The session of a worker after this one, which is over."""
        if _is_later(here := self.session_of(worker), session):
            return here
        return (over if _is_later(over := self._over.get(worker, -1), session) else session) + 1

    def session_of(self, worker: int) -> int:
        """The session of a worker; -1 if it is gone."""
        return self._members[worker].session if worker in self._members else -1

    def clocks_of(self, worker: int) -> tuple[int, int]:
        """From which clock on a worker that is there can send gradients, -1 if it has begun none, and up to which it
        has sent them before it said hello, which come again."""
        clocks = self._members[worker].clocks.values()
        first = min(one for one, _ in clocks)
        return max(one for one, _ in clocks) if first >= 0 else first, min(end for _, end in clocks)

    def hello(
        self, worker: int, place: int, *, session: int, peer: bytes, now_s: float, clocks: tuple[int, int] = (-1, 0)
    ) -> bool:
        """A rank is there; True if its worker is whole by that. Raises LaunchError if another one has its number."""
        member = self._members.get(worker)
        if member is not None and member.session != session:
            raise LaunchError(
                f"worker {worker} is there already; join by --join (WEFT_JOIN), which gives another number, or wait "
                f"{self._dead_after_s:g} s until the old one is given up"
            )
        if member is None:
            member = self._members[worker] = Member(session, now_s)
        if self.ended.get(worker) != session >> SESSION_BITS:
            self.ended.pop(worker, None)
        was_whole = len(member.peers) == self.num_ranks
        member.peers[place], member.clocks[place], member.heard_s = peer, clocks, now_s
        self._numbers[peer] = worker, place
        self.num_joined = max(self.num_joined, worker + 1)
        return len(member.peers) == self.num_ranks and not was_whole

    def who(self, peer: bytes) -> tuple[int, int, int] | None:
        """Worker, rank and session behind a connection; None if it has not said hello."""
        if peer not in self._numbers:
            return None
        worker, place = self._numbers[peer]
        return worker, place, self._members[worker].session

    def peers_of(self, worker: int) -> dict[int, bytes]:
        """The connections of a worker's ranks; none if it is gone."""
        return self._members[worker].peers if worker in self._members else {}

    def heard(self, worker: int, now_s: float, *, session: int | None = None) -> None:
        """A worker is alive; `session`: where its connection does not say who it is."""
        member = self._members.get(worker)
        if member is not None and session in (None, member.session):
            member.heard_s = now_s

    def silent(self, now_s: float) -> list[int]:
        """Workers that were not heard for too long."""
        return [number for number, one in self._members.items() if now_s - one.heard_s > self._dead_after_s]

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        if worker in self._members:
            session = self._over[worker] = self._members[worker].session
            self._last_gone = worker, session >> SESSION_BITS
        member = self._members.pop(worker, None)
        for peer in member.peers.values() if member is not None else ():
            self._numbers.pop(peer, None)

    def said_goodbye(self, worker: int, session: int) -> bool:
        """A worker ends, which may be gone already, or be there for a moment still; False if that was known, or another
        start of it is there."""
        start, session_here = session >> SESSION_BITS, self.session_of(worker)
        if self.ended.get(worker) == start or (session_here >= 0 and session_here >> SESSION_BITS != start):
            return False
        self.ended[worker] = start
        return True


def _is_later(one: int, other: int) -> bool:
    """The first session is a later one of the same start."""
    return one > other >= 0 and one >> SESSION_BITS == other >> SESSION_BITS
