"""Images split by height: which rows each rank has, which it needs of others, and what they cost on the wire.

Every map of a model, whatever its height, is shared out like `shares` of `plan/partition/tensor.py`: contiguous rows,
the first ranks with one more where it does not divide. An operation that looks at a window of rows needs, at the edges
of a rank's part, rows that others have (a *halo*):

    height 8, 2 ranks, kernel 3, padding 1

    rank 0 makes rows 0-3    its windows cover  -1 .. 4     row -1 is padding, row 4 comes from rank 1
    rank 1 makes rows 4-7    its windows cover   3 .. 8     row 3 comes from rank 0, row 8 is padding

Where parts are thin, strides large or heights uneven, rows come from further than the next rank, and a rank may have
none at all. Everything here is arithmetic over whole numbers; `parallel/spatial/halo.py` does what it says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from weft.plan.partition.tensor import Range, shares
from weft.plan.partition.wire import sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The rows that an operation looks at for each row that it makes."""

    kernel: int = 1
    stride: int = 1
    before: int = 0
    """Rows of padding above the image; negative: rows left out."""
    after: int = 0
    """Rows of padding below it."""
    dilation: int = 1
    ceil: bool = False
    """A last window may stick out below the padding, as pools allow, if it begins above it."""

    @property
    def reach(self) -> int:
        """Rows from the first to the last that a window looks at."""
        return self.dilation * (self.kernel - 1) + 1

    def out_height(self, height: int) -> int:
        """Rows that are made of so many; not positive where the window does not fit."""
        room = height + self.before + self.after - self.reach
        number = (room + (self.stride - 1) * self.ceil) // self.stride + 1
        if self.ceil and (number - 1) * self.stride >= height + self.before:
            number -= 1
        return number

    def span(self, made: Range) -> Range:
        """The rows that windows of these rows cover, padding included: it may begin below 0 and end past the image."""
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

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What all ranks have, make and send for one operation."""

    height: int
    out_height: int
    have: tuple[Range, ...]
    """Of each rank, the rows it has before."""
    make: tuple[Range, ...]
    """The rows it has afterwards."""
    spans: tuple[Range, ...]
    """The rows its windows cover, padding included."""
    moves: tuple[Move, ...]
    """At most one from each rank to each other."""


@functools.cache
def exchange_for(window: Window, height: int, num_ranks: int) -> Exchange:
    """Who sends which rows to whom so that every rank can make its part; the window must fit the image."""
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
    """What two ranges have in common; empty ones begin where they end."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (start, start)


def window_counts(window: Window, height: int, made: Range, *, counts_padding: bool) -> tuple[int, ...]:
    """Of each of these rows, how many rows its window counts for an average: inside the image, or the padding too."""
    low = -window.before if counts_padding else 0
    high = height + (window.after if counts_padding else 0)
    starts = (row * window.stride - window.before for row in range(*made))
    return tuple(min(start + window.kernel, high) - max(start, low) for start in starts)


def widest_part(height: int, num_ranks: int) -> int:
    """Rows of the rank that has most; parts travel as wide as this where all are gathered."""
    return -(-height // num_ranks)


def halo_bytes(exchange: Exchange, rank: int, *, row_bytes: int, backward: bool) -> int:
    """Bytes a rank sends for the rows that others need of it; backward: their gradients, to where they came from."""
    moves = (move for move in exchange.moves if (move.target if backward else move.source) == rank)
    return sum(move.num_rows for move in moves) * row_bytes


def join_bytes(height: int, num_ranks: int, *, row_bytes: int) -> int:
    """Bytes a rank sends to make a map whole on all ranks; as many come back in the backward pass."""
    return sent_bytes("all-gather", widest_part(height, num_ranks) * num_ranks * row_bytes, num_ranks)
