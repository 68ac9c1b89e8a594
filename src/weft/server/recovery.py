"""What a server knows of its own death: what of each worker is in its last snapshot, and who is to come again.

    snapshot ── updates ── dies      starts again from the snapshot ── workers send again what came after it
                                                                    ── one that does not come is given up

A worker keeps what it has pushed until a snapshot covers it. One that dies leaves nobody who could send its gradients
again, so a snapshot is due at once. If both die before it is there, what was applied of the worker's gradients after
the last snapshot is gone; everything else is in the weights exactly once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from weft.server.protocol.message import Malformed
from weft.server.workers.arrivals import MOST_CLOCKS

MOST_AHEAD = MOST_CLOCKS // 2
"""Clocks that a worker may be ahead of the last snapshot: it keeps the gradients of all of them."""
COMES_AGAIN_S = 30.0
"""Seconds that a server which was started again waits for workers of which it hears nothing."""


class Recovery:
    """One server's account of it. Times are given by the caller."""

    def __init__(self, *, attempt: int, comes_back_s: float) -> None:
        """`attempt`: earlier processes of this server. `comes_back_s`: how long workers wait for the next one; 0: there
        is none."""
        self.attempt, self.comes_back_s = attempt, comes_back_s
        self.is_on = comes_back_s > 0
        self.was_saved = False
        """There is a snapshot."""
        self._saved: dict[int, int] = {}
        """By worker: its first clock that is not in the last snapshot."""
        self._left: dict[int, int] = {}
        """By worker that is gone: the end of its clocks here."""
        self._seen: dict[int, int] = {}
        """The last session of each worker that this process knows of."""
        self._comes_until_s: dict[int, float] = {}
        self._given_up: set[int] = set()

    # Workers.

    def see(self, worker: int, session: int) -> None:
        """A worker says hello."""
        self._seen[worker] = session

    def has_seen(self, worker: int, session: int) -> bool:
        """False for a session that an earlier process of this server knew: its worker is about to say hello again."""
        return self.attempt == 0 or self._seen.get(worker) == session

    def join(self, worker: int, clock: int) -> None:
        """A worker takes part. One that is in no snapshot has nothing before this clock."""
        self._saved.setdefault(worker, clock)

    def leave(self, worker: int, end: int) -> None:
        """A worker is gone, which has sent all clocks before this one."""
        if self.is_on and end > self._saved.get(worker, 0):
            self._left[worker] = end

    def may_begin(self, worker: int, clock: int) -> bool:
        """False for a worker that is too far ahead of the last snapshot."""
        return not self.is_on or clock < self._saved.get(worker, clock) + MOST_AHEAD

    def saved_of(self, worker: int, clock: int) -> int:
        """The first clock that a worker has to keep when it begins this one."""
        return self._saved.get(worker, 0) if self.is_on else clock

    def hear(self, worker: int, now_s: float) -> None:
        """A worker lives. One that computes for long says hello later."""
        if worker in self._comes_until_s:
            self._comes_until_s[worker] = now_s + COMES_AGAIN_S

    def awaits(self, awaited: Iterable[int], present: Sequence[int]) -> bool:
        """Somebody is to come again to this server, which was started again."""
        return self.attempt > 0 and bool(set(awaited).difference(present, self._given_up))

    def overdue(
        self, awaited: Iterable[int], present: Sequence[int], now_s: float, *, ended: Container[int] = ()
    ) -> list[int]:
        """Workers that this server was to wait for, and that have not come for too long, or have `ended`."""
        if self.attempt == 0:
            return []
        missing = set(awaited).difference(present, self._given_up)
        self._comes_until_s = {
            worker: self._comes_until_s.get(worker, now_s + COMES_AGAIN_S) for worker in sorted(missing)
        }
        found = [worker for worker, until_s in self._comes_until_s.items() if now_s >= until_s or worker in ended]
        self._given_up = (self._given_up | set(found)).difference(present)
        return found

    # Snapshots.

    def must_save(self, next_clocks: Mapping[int, int]) -> bool:
        """A snapshot is due whatever the time. `next_clocks`: of each worker, the first clock that is not applied."""
        if not self.is_on:
            return False
        return not self.was_saved or any(
            self._saved.get(worker, 0) < min(end, next_clocks.get(worker, 0)) for worker, end in self._left.items()
        )

    def most_ahead(self, next_clocks: Mapping[int, int]) -> int:
        """Clocks that some worker has to keep, at most."""
        return max((clock - self._saved.get(worker, clock) for worker, clock in next_clocks.items()), default=0)

    def saved(self, next_clocks: Mapping[int, int]) -> None:
        """A snapshot is in a file, with all clocks before these."""
        self.was_saved = True
        self._saved |= next_clocks
        self._left = {worker: end for worker, end in self._left.items() if end > self._saved.get(worker, 0)}


def read_clocks(found: list[Any]) -> tuple[int, int]:
    """What a hello says of the clocks that a rank can send; raises Malformed."""
    if len(found) != 2 or not all(isinstance(one, int) and -1 <= one < 1 << 62 for one in found):
        raise Malformed("clocks that are none")
    return found[0], found[1]
