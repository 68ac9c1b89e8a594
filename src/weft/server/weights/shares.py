"""What a server and the ranks of its host share, from the server's side: a place for the gradients of each.

The server makes all shared memory, of a size that nobody can change, so no peer can make it touch what is not there. A
rank that has opened its share says so in it; others get frames. A share is over with its session: what was sent by it
and is complete stays until it is applied, and a rank that says hello anew gets another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.comm.shared_memory.segments import SegmentOwner
from weft.server.protocol import shared_places
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer, Kind, Malformed, Message
from weft.server.protocol.shared_places import (
    CLOCK,
    DESCRIPTOR,
    GENERATION,
    NUM_BYTES,
    OPENED,
    PID,
    TAKEN,
    TOKEN,
    SharePlaces,
    WeightPlaces,
    fence,
    words_of,
)
from weft.server.weights.shared_weights import WeightMemory


class Share:
    """The memory that one rank and this server share. OSError if there is none."""

    def __init__(self, places: SharePlaces) -> None:
        self._places = places
        self._owner = SegmentOwner(places.num_bytes, "anonymous", sealed="writes")
        self.token = self._owner.handle.token
        self._memory = self._owner.segment.part(0, places.num_bytes)
        self._words = words_of(self._memory)
        self.is_over = False
        self._shown = -1
        """The last clock for which it was shown weights."""

    @property
    def handle(self) -> dict[str, int]:
        """Where the rank finds it."""
        one = self._owner.handle
        return {"pid": one.pid, "fd": one.fd, "num_bytes": one.num_bytes, "token": one.token}

    @property
    def is_open(self) -> bool:
        """The rank has opened it; nobody else can from now on."""
        if not self._words[OPENED]:
            return False
        self._owner.close()
        return True

    def gradients(self, bucket: int) -> Iterator[Buffer]:
        """The frames of a bucket as they lie here, empty for parts without a gradient; raises Malformed."""
        if bucket not in self._places.flags:
            raise Malformed(f"bucket {bucket} is not in the memory that is shared with this rank")
        first_flag, gradients = self._places.flags[bucket], self._places.gradients[bucket]
        flags = bytes(self._memory[first_flag : first_flag + len(gradients)])
        if not set(flags) <= {0, 1}:
            raise Malformed("a part that has a gradient or not")
        for is_there, (start, length) in zip(flags, gradients, strict=True):
            yield self._memory[start : start + length] if is_there else b""

    def show(self, clock: int, weights: WeightMemory) -> None:
        """Say where the weights for a clock are, before its messages do."""
        handle, words = weights.handle, self._words
        self._shown = clock
        words[CLOCK] = (1 << 64) - 1
        fence()
        words[TOKEN], words[PID], words[DESCRIPTOR] = handle.token, handle.pid, handle.fd
        words[NUM_BYTES], words[GENERATION] = handle.num_bytes, weights.generation
        fence()
        words[CLOCK] = clock

    def has_taken(self, clock: int) -> bool:
        """The rank does not read the weights of a clock any more, or what it reads is of no use: a later one has begun,
        whatever the rank says."""
        return self.is_over or self._shown > clock or self._words[TAKEN] > clock

    def close(self) -> None:
        """The rank's session is over."""
        self.is_over = True
        self._owner.close()


class Shares:
    """Those of all ranks that are there."""

    def __init__(self, host: str) -> None:
        """`host`: this server's (`weft.hosts.host_id`); empty if it shares nothing."""
        self._host = host
        self._shares: dict[tuple[int, int], Share] = {}
        """By worker and rank."""
        self._weight_places: WeightPlaces | None = None

    def weight_places(self, layout: ServerLayout) -> WeightPlaces:
        """Of this server's weights."""
        if self._weight_places is None:
            self._weight_places = WeightPlaces.of(layout)
        return self._weight_places

    def has_weights(self, layout: ServerLayout, bucket: int) -> bool:
        """A bucket of weights is large enough to be read from there."""
        places = self.weight_places(layout)
        return sum(places.lengths[part] for part in layout.buckets[bucket]) >= shared_places.LEAST_BYTES

    def offer(self, layout: ServerLayout, worker: int, place: int, host: Any) -> dict[str, int] | None:
        """New memory for a rank that says hello, which may open it; None for one of another host."""
        self._close(worker, place)
        if not self._host or host != self._host:
            return None
        try:
            share = Share(SharePlaces.of(layout, place))
        except OSError:  # too many files are open, or this system has no such memory
            return None
        self._shares[worker, place] = share
        return share.handle

    def of(self, worker: int, place: int) -> Share | None:
        """The share of a rank, if it has opened it."""
        share = self._shares.get((worker, place))
        return share if share is not None and share.is_open else None

    def read(self, message: Message) -> Message:
        """A push whose gradients are in shared memory, with them; raises Malformed."""
        share = self.of(message.worker, message.place)
        if share is None or message.version != share.token or message.frames:
            raise Malformed("a bucket in memory that is not shared with this rank")
        return replace(message, kind=Kind.PUSH, version=0, frames=tuple(share.gradients(message.bucket)))

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        for place in [place for one, place in self._shares if one == worker]:
            self._close(worker, place)

    def _close(self, worker: int, place: int) -> None:
        if (share := self._shares.pop((worker, place), None)) is not None:
            share.close()
