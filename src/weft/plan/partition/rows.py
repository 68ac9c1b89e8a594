"""Images split by height: each rank's rows, the rows it needs from others (a *halo*), and the bytes on the wire.

Every feature map is split by its own height as `shares` of `plan/partition/tensor.py` does: contiguous rows, one more
for the first ranks where it does not divide. A window at the edge of a rank's part covers rows of other ranks:

    height 8, 2 ranks, kernel 3, padding 1

    rank 0 makes rows 0-3    its windows cover  -1 .. 4     row -1 is padding, row 4 comes from rank 1
    rank 1 makes rows 4-7    its windows cover   3 .. 8     row 3 comes from rank 0, row 8 is padding

With thin parts, large strides or uneven heights, rows come from further than the next rank, and a rank may have none.
`parallel/spatial/halo.py` executes these exchanges.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from weft.plan.partition.tensor import Range, shares
from weft.plan.partition.wire import sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The input rows that an operation reads for each output row."""

    kernel: int = 1
    stride: int = 1
    before: int = 0
    """Rows of padding above the image; negative: rows cropped."""
    after: int = 0
    """Rows of padding below it."""
    dilation: int = 1
    ceil: bool = False
    """ceil_mode of pools: a last window may reach past the padding if it starts before it."""

    @property
    def reach(self) -> int:
        """Rows from a window's first to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def out_height(self, height: int) -> int:
        """Output rows; not positive if the window does not fit."""
        room = height + self.before + self.after - self.reach
        number = (room + (self.stride - 1) * self.ceil) // self.stride + 1
        if self.ceil and (number - 1) * self.stride >= height + self.before:
            number -= 1
        return number

    def span(self, made: Range) -> Range:
        """Input rows, padding included, that the windows of some output rows cover; may reach outside the image."""
        first, stop = made
        if first == stop:
            return 0, 0
        start = first * self.stride - self.before
        return start, start + (stop - first - 1) * self.stride + self.reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rows that one rank sends another, numbered as in the whole image."""

    source: int
    target: int
    rows: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All ranks' rows and messages for one operation."""

    height: int
    out_height: int
    have: tuple[Range, ...]
    """Input rows per rank."""
    make: tuple[Range, ...]
    """Output rows per rank."""
    spans: tuple[Range, ...]
    """Rows that each rank's windows cover, padding included."""
    moves: tuple[Move, ...]
    """At most one per pair of source and target."""


@functools.cache
def exchange_for(window: Window, height: int, num_ranks: int) -> Exchange:
    """The messages that give every rank the rows of its windows; the window must fit the image."""
    out_height = window.out_height(height)
    have, make = shares(height, num_ranks), shares(out_height, num_ranks)
    spans = tuple(window.span(made) for made in make)
    moves = [
        Move(source=source, target=target, rows=rows)
        for target, span in enumerate(spans)
        for source, owned in enumerate(have)
        if source != target and (rows := overlap(span, owned))[0] < rows[1]
    ]
    return Exchange(height=height, out_height=out_height, have=have, make=make, spans=spans, moves=tuple(moves))


def overlap(one: Range, other: Range) -> Range:
    """The intersection of two ranges; an empty one begins where it ends."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (start, start)


def window_counts(window: Window, height: int, made: Range, *, counts_padding: bool) -> tuple[int, ...]:
    """Divisor along height of each output row of an average pool: rows in the image, or with padding."""
    low = -window.before if counts_padding else 0
    high = height + (window.after if counts_padding else 0)
    starts = (row * window.stride - window.before for row in range(*made))
    return tuple(min(start + window.kernel, high) - max(start, low) for start in starts)


def widest_part(height: int, num_ranks: int) -> int:
    """Rows of the largest part, to which parts are padded when gathered."""
    return -(-height // num_ranks)


def halo_bytes(exchange: Exchange, rank: int, *, row_bytes: int, backward: bool) -> int:
    """Bytes that a rank sends for halos; backward: for gradients of the halo it received."""
    sent = (move.rows for move in exchange.moves if (move.target if backward else move.source) == rank)
    return sum(stop - start for start, stop in sent) * row_bytes


def join_bytes(height: int, num_ranks: int, *, row_bytes: int) -> int:
    """Bytes that a rank sends to gather a map on all ranks; as many again in the backward pass."""
    return sent_bytes("all-gather", widest_part(height, num_ranks) * num_ranks * row_bytes, num_ranks)
