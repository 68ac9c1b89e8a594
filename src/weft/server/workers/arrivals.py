"""The gradients of one worker that are on their way into the weights: buckets as they came, until a clock is complete.

A clock is complete when every rank of the worker has said what it sent, and all of that is there. Buckets stay the
memory in which they were received. A worker is at most `MOST_CLOCKS` ahead of what was applied, which only happens when
a server has lost updates and gets them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.plan.exchange.push_format import PushFormat
from weft.server.protocol.message import Buffer, Commit, Malformed, Message
from weft.server.protocol.pushes import read_push

MOST_CLOCKS = 1024


@dataclass(slots=True)
class Arrival:
    """What has come of one clock."""

    buckets: dict[int, tuple[Buffer, ...]] = field(default_factory=dict)
    """The frames of each bucket (`protocol/pushes.py`). Of buckets without any gradient nothing comes."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """By rank of the worker."""

    @property
    def said(self) -> Commit:
        """What the worker says of its batch: all its ranks say the same."""
        return next(iter(self.commits.values()))

    @property
    def is_finite(self) -> bool:
        return all(one.is_finite for one in self.commits.values())

    @property
    def compute_s(self) -> float:
        return max(one.compute_s for one in self.commits.values())


class Arrivals:
    """One worker's clocks that are not applied yet."""

    def __init__(self, *, num_ranks: int, pushes: Sequence[PushFormat], owners: Sequence[int]) -> None:
        """`pushes`: how every bucket travels; `owners`: the rank that sends it."""
        self._num_ranks, self._pushes, self._owners = num_ranks, pushes, owners
        self.next_clock = 0
        """The first clock that is not applied."""
        self.num_repeated = 0
        """Messages of clocks that are whole, or were applied before; they change nothing."""
        self._clocks: dict[int, Arrival] = {}

    def begin_with(self, clock: int) -> None:
        """The worker has nothing of earlier clocks, or they are not waited for."""
        self.next_clock = max(self.next_clock, clock)

    def push(self, message: Message) -> None:
        """Take a bucket; raises Malformed if it is not of this server's layout."""
        arrival = self._open(message.clock)
        if arrival is None:
            return
        if message.bucket >= len(self._pushes):
            raise Malformed(f"bucket {message.bucket} of {len(self._pushes)}")
        if self._owners[message.bucket] != message.place:
            raise Malformed(f"bucket {message.bucket} is sent by rank {self._owners[message.bucket]}")
        read_push(self._pushes[message.bucket], message.frames)
        if message.place in arrival.commits:  # a whole clock that is sent again
            self.num_repeated += 1
            return
        arrival.buckets[message.bucket] = message.frames

    def commit(self, message: Message, commit: Commit) -> bool:
        """A rank has sent all of a clock; True if the clock is complete by that."""
        arrival = self._open(message.clock)
        if arrival is None:
            return False
        sent = sum(self._owners[bucket] == message.place for bucket in arrival.buckets)
        if sent != commit.num_buckets:
            raise Malformed(f"{sent} buckets of the {commit.num_buckets} that were sent")
        arrival.commits[message.place] = commit
        return len(arrival.commits) == self._num_ranks

    def take(self, clock: int) -> Arrival:
        """The arrival of a complete clock, which is applied, or dropped, now; later copies of it change nothing."""
        self.next_clock = max(self.next_clock, clock + 1)
        found = self._clocks.pop(clock)
        for old in [one for one in self._clocks if one < self.next_clock]:
            del self._clocks[old]
        return found

    def skip_to(self, clock: int) -> bool:
        """Leave out all before a clock; False if that is done already. Raises Malformed."""
        if clock >= self.next_clock + MOST_CLOCKS:
            raise Malformed(f"clock {clock}, and {self.next_clock} is the next one")
        if clock <= self.next_clock:
            return False
        self.next_clock = clock
        self._clocks = {one: arrival for one, arrival in self._clocks.items() if one >= clock}
        return True

    def whole(self, clock: int) -> Arrival:
        """What has come of a clock that is complete."""
        assert self.is_complete(clock)
        return self._clocks[clock]

    def is_complete(self, clock: int) -> bool:
        return clock in self._clocks and len(self._clocks[clock].commits) == self._num_ranks

    @property
    def is_open(self) -> bool:
        """Something of the next clock is there."""
        return self.next_clock in self._clocks

    @property
    def end(self) -> int:
        """The first clock that is neither applied nor complete."""
        return max((clock + 1 for clock in self._clocks if self.is_complete(clock)), default=self.next_clock)

    def drop_from(self, clock: int) -> None:
        """Forget this clock and later ones."""
        self._clocks = {one: arrival for one, arrival in self._clocks.items() if one < clock}

    def drop_open(self) -> None:
        """Forget clocks that are not complete: their worker is gone, or starts again to send them."""
        self._clocks = {clock: one for clock, one in self._clocks.items() if self.is_complete(clock)}

    def _open(self, clock: int) -> Arrival | None:
        """The arrival of a clock; None if it was applied before."""
        if clock < self.next_clock:
            self.num_repeated += 1
            return None
        if clock >= self.next_clock + MOST_CLOCKS:
            raise Malformed(f"clock {clock}, and {self.next_clock} is the next one")
        return self._clocks.setdefault(clock, Arrival())
