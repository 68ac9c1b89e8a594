"""What a rank and a server of its host share, by the rank: it puts gradients there, and reads weights from it.

Of the memory that a server says is there nothing is believed but what can be seen: that it is the right one (its
token), that it cannot become shorter, and that weights were not changed while they were read. A rank that cannot open
it goes on with frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from weft.comm.shared_memory.native import copy
from weft.comm.shared_memory.segments import Segment, SegmentHandle, open_segment
from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer, Malformed
from weft.server.protocol.shared_places import (
    CLOCK,
    DESCRIPTOR,
    GENERATION,
    GIVEN_UP,
    LINE_BYTES,
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

_HANDLE = ("pid", "fd", "num_bytes", "token")


class RankShare:
    """The memory that one rank shares with one server."""

    def __init__(self, layout: ServerLayout, place: int, said: Mapping[str, Any]) -> None:
        """`said`: by the server, where it is. OSError if it cannot be opened; raises Malformed."""
        if not all(isinstance(said.get(name), int) and 0 <= said[name] < 1 << 63 for name in _HANDLE):
            raise Malformed(f"memory at {said}")
        self._layout, self._places, self._weight_places = layout, SharePlaces.of(layout, place), WeightPlaces.of(layout)
        if said["num_bytes"] != self._places.num_bytes:
            raise Malformed(f"{said['num_bytes']} bytes of memory instead of {self._places.num_bytes}")
        self.token: int = said["token"]
        segment = open_segment(_handle(*(said[name] for name in _HANDLE)), sealed="writes")
        self._memory = segment.part(0, segment.num_bytes)
        self._words = words_of(self._memory)
        self._weights: dict[int, Segment] = {}
        """Opened memory of weights, by token."""
        self._words[OPENED] = 1

    def has_gradients(self, bucket: int) -> bool:
        """There is a place for the gradients of a bucket."""
        return bucket in self._places.gradients

    @torch.no_grad()
    def put(self, bucket: int, gradients: Sequence[torch.Tensor | None]) -> tuple[Buffer, ...]:
        """Copy a bucket's gradients to their place; returns them as frames there. The server has no more need of what
        was there before."""
        frames, first_flag = [], self._places.flags[bucket]
        places, parts = self._places.gradients[bucket], self._layout.buckets[bucket]
        for number, (gradient, (start, length)) in enumerate(zip(gradients, places, strict=True)):
            self._memory[first_flag + number] = gradient is not None
            frame = self._memory[start : start + length] if gradient is not None else b""
            if gradient is not None and length:
                copy(tensor_of(frame, self._layout.dtype(parts[number])), gradient.detach().reshape(-1))
            frames.append(frame)
        fence()
        return tuple(frames)

    def weights(self, clock: int, bucket: int) -> tuple[tuple[Buffer, ...], Callable[[], bool]] | None:
        """The frames of a bucket of weights for a clock, and what says afterwards whether all that was read was of it;
        None if it is not there any more. OSError if it cannot be opened."""
        found = tuple(self._words[word] for word in (PID, DESCRIPTOR, NUM_BYTES, TOKEN, GENERATION))
        fence()
        if self._words[CLOCK] != clock:
            return None
        *numbers, generation = found
        if numbers[2] != self._weight_places.num_bytes:
            raise OSError(f"{numbers[2]} bytes of weights instead of {self._weight_places.num_bytes}")
        if (token := numbers[3]) not in self._weights:
            self._weights[token] = open_segment(_handle(*numbers), sealed="reads")
        segment, places = self._weights[token], self._weight_places
        parts = self._layout.buckets[bucket]
        frames = tuple(segment.part(places.starts[part], places.lengths[part]) for part in parts)

        def is_whole() -> bool:
            fence()
            return _generation(segment) == generation

        return frames, is_whole

    def took(self, clock: int) -> None:
        """All weights of a clock are taken: the server may write there. What it has given up is closed, or its memory
        would stay."""
        fence()
        self._words[TAKEN] = clock + 1
        self._weights = {token: one for token, one in self._weights.items() if _generation(one) != GIVEN_UP}


class RankShares:
    """The memory that one rank shares with servers, in one session with each."""

    def __init__(self, layouts: Sequence[ServerLayout], place: int, host: str) -> None:
        """`host`: the rank's own (`weft.hosts.host_id`); empty if it shares nothing."""
        self.host, self._layouts, self._place = host, layouts, place
        self._shares: dict[int, RankShare] = {}
        self.read_bytes = [0] * len(layouts)
        """Of weights that were read from each server's memory."""
        self._num_failures = 0

    def failed(self) -> None:
        """Weights could not be opened: their server may just have died. Frames travel if it comes again."""
        self._num_failures += 1
        if self._num_failures > 1:
            self.host = ""

    def open(self, server: int, said: object) -> None:
        """A session begins with what a server offers to a rank of its host, if it does; without it, or where it cannot
        be opened, frames travel. Raises Malformed."""
        self.forget(server)
        if self.host and isinstance(said, dict):
            with suppress(OSError):
                self._shares[server] = RankShare(self._layouts[server], self._place, said)

    def forget(self, server: int) -> None:
        """The session with a server may be over."""
        self._shares.pop(server, None)

    def forget_all(self) -> None:
        """All sessions are over."""
        self._shares = {}

    def of(self, server: int) -> RankShare | None:
        return self._shares.get(server)

    def took(self, server: int, clock: int) -> None:
        """All weights of a clock are here."""
        if (share := self.of(server)) is not None:
            share.took(clock)


def _generation(weights: Segment) -> int:
    """Of what is there."""
    return words_of(weights.part(0, LINE_BYTES))[0]


def _handle(pid: int, fd: int, num_bytes: int, token: int) -> SegmentHandle:
    return SegmentHandle(way="anonymous", num_bytes=num_bytes, token=token, pid=pid, fd=fd)
