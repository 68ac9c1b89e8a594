"""Where things lie in the memory that a rank and a server of one host share; both compute it alike, so that no message
says a place or a length.

A *share* belongs to one rank of a worker: a few words, and a place for the gradients of each bucket that it sends. The
server makes it, and the rank writes to it. The *weights* are in memory of their own, which all ranks of the host read
and only the server can write. What passes over ZeroMQ is then the header of each message, at its time and in its order.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

from weft.plan.partition.flat_buffers import item_bytes
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.settings import MASTER

LEAST_BYTES = 1 << 17
"""Of a bucket that goes through shared memory: below that a frame is as fast. `benchmarks/server_transport.py` found
no gain at 0.13 MB, and shared memory 1.4 times as fast as ipc at 0.26 MB."""
LINE_BYTES = 128
"""Places begin at multiples of it, and words of two writers are not in one line of a cache."""
WORD_BYTES = 8

OPENED, TAKEN = 0, 1
"""Words that the rank writes: it has opened the share; the clock after the last one whose weights it has taken."""
CLOCK, TOKEN, PID, DESCRIPTOR, NUM_BYTES, GENERATION = range(16, 22)
"""Words that the server writes, in the next line: a clock, and where the weights for it are."""
_WORDS_BYTES = 2 * LINE_BYTES
GIVEN_UP = (1 << 64) - 1
"""In the place of a generation: this memory is not used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlaces:
    """One rank's share, by server."""

    flags: dict[int, int]
    """By bucket, where a byte for each of its parts says whether it has a gradient. Other buckets are not here."""
    gradients: dict[int, tuple[tuple[int, int], ...]]
    """Of each of its parts, where the gradient begins, and its length."""
    num_bytes: int

    @classmethod
    def of(cls, layout: ServerLayout, place: int) -> SharePlaces:
        """Of the buckets that the rank `place` of a worker sends, but for those that codecs compress and small ones."""
        owners, lengths = layout.owners, layout.frame_bytes()
        buckets = [
            bucket
            for bucket, push in enumerate(layout.pushes)
            if owners[bucket] == place and not push.coded and sum(lengths[bucket]) >= LEAST_BYTES
        ]
        counts = [len(lengths[bucket]) for bucket in buckets]
        first_flags = list(itertools.accumulate(counts, initial=_WORDS_BYTES))
        gradients, end = {}, _rounded_up(first_flags[-1])
        for bucket in buckets:
            starts, end = _line_up(lengths[bucket], end)
            gradients[bucket] = tuple(zip(starts, lengths[bucket], strict=True))
        return cls(flags=dict(zip(buckets, first_flags, strict=False)), gradients=gradients, num_bytes=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlaces:
    """The memory of one server's weights, behind a line whose first word is the generation of what is there: it changes
    before anything else does."""

    starts: tuple[int, ...]
    """By part."""
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    """In which they travel."""
    num_bytes: int

    @classmethod
    def of(cls, layout: ServerLayout) -> WeightPlaces:
        pull, parts = layout.settings.pull, range(len(layout.parts))
        dtypes = tuple(layout.dtype(part) if pull == MASTER else pull for part in parts)
        sizes = [layout.parts[part].numel * item_bytes(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        starts, end = _line_up(sizes, LINE_BYTES)
        return cls(starts=tuple(starts), lengths=tuple(sizes), dtypes=dtypes, num_bytes=end)


def fence() -> None:
    """What was written before is seen by whoever sees what is written after. To take a lock and give it back, twice, is
    one everywhere; x86 would need none."""
    for _ in range(2):
        with threading.Lock():
            pass


def words_of(memory: memoryview) -> memoryview:
    """The words at the beginning of shared memory."""
    return memory[:_WORDS_BYTES].cast("Q") if len(memory) >= _WORDS_BYTES else memory[:LINE_BYTES].cast("Q")


def _line_up(sizes: tuple[int, ...] | list[int], first: int) -> tuple[list[int], int]:
    """Where each of some sizes begins, and the end of all."""
    starts = list(itertools.accumulate(map(_rounded_up, sizes), initial=first))
    return starts[:-1], starts[-1]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
