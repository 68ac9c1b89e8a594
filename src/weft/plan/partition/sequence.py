"""The tokens of a sequence that each rank holds, and the blocks of attention that it computes.

One sequence is split over ring × ulysses ranks. It is padded at its end and cut into chunks for the ring; the tokens of
a ring rank are cut into contiguous parts for its ulysses ranks. The ring has two layouts:

    contiguous    ring 4:  0 | 1 | 2 | 3                         rank r has chunk r
    zigzag        ring 4:  0 1 2 3 | 4 5 6 7 -> 07 16 25 34      rank r has chunks r and 2·ring - 1 - r

Under a causal mask the last rank of the contiguous layout has nearly all the work, and every step lasts as long as
that; with zigzag every rank has the same work at every step, which `allowed_pairs` counts.

During attention each ulysses rank has all tokens of some heads. With at least as many key heads as ranks, key heads are
divided, each with the query heads that attend to it; with fewer, query heads are divided, and every rank gets the key
heads that its query heads attend to.

In both layouts a rank's tokens ascend, so that the causal mask within one rank is the ordinary triangle, the keys of
another rank that a run of queries may attend to are a prefix, and padding is a suffix. Where attention has a window,
`window.py` finds the blocks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from weft.errors import ModelError
from weft.plan.model_refusals import TOO_FEW_HEADS
from weft.plan.partition.tensor import Range, share_of, shares

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The distribution of one sequence's tokens over ranks."""

    num_tokens: int
    """Real tokens."""
    padded: int
    """Tokens of all ranks together, with the padding at the end."""
    ring: int
    ulysses: int
    layout: str

    def __post_init__(self) -> None:
        assert self.layout in LAYOUTS and 0 <= self.num_tokens <= self.padded
        assert self.padded % self.num_chunks == 0 and self.padded % (self.ring * self.ulysses) == 0

    @property
    def num_chunks(self) -> int:
        return _num_chunks(self.ring, self.layout)

    @property
    def tokens_per_ring(self) -> int:
        """Tokens of one ring rank, which its ulysses ranks divide."""
        return self.padded // self.ring

    @property
    def tokens_per_rank(self) -> int:
        return self.padded // (self.ring * self.ulysses)

    def chunks(self, ring_rank: int) -> tuple[Range, ...]:
        """The chunks of a ring rank, ascending, neighbours not joined."""
        length = self.padded // self.num_chunks
        numbers = [ring_rank]
        if self.num_chunks == 2 * self.ring:
            numbers.append(self.num_chunks - 1 - ring_rank)
        return tuple((number * length, (number + 1) * length) for number in numbers)

    def ring_ranges(self, ring_rank: int) -> tuple[Range, ...]:
        """The tokens of a ring rank, ascending; neighbouring chunks are one range."""
        chunks = self.chunks(ring_rank)
        (start, middle), (other, stop) = chunks[0], chunks[-1]
        return ((start, stop),) if middle == other else chunks

    def ranges(self, ring_rank: int, ulysses_rank: int) -> tuple[Range, ...]:
        """The tokens of one rank, ascending."""
        first = ulysses_rank * self.tokens_per_rank
        last, passed, found = first + self.tokens_per_rank, 0, []
        for start, stop in self.ring_ranges(ring_rank):
            begin, end = max(first - passed, 0), min(last - passed, stop - start)
            if begin < end:
                found.append((start + begin, start + end))
            passed += stop - start
        return tuple(found)


def make_places(num_tokens: int, *, ring: int, ulysses: int, layout: str, multiple: int = 1) -> Places:
    """Pad to the least length that gives every rank equally many tokens, a multiple of `multiple`."""
    unit = math.lcm(_num_chunks(ring, layout), ring * ulysses * multiple)
    padded = -(-num_tokens // unit) * unit
    return Places(num_tokens=num_tokens, padded=padded, ring=ring, ulysses=ulysses, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A window of attention: a query sees the keys at most so many places before and after itself."""

    before: int
    """-1: a query does not even see itself."""
    after: int
    """0: causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Queries of one ring rank that attend to the same keys of another, both numbered within their rank."""

    q: Range
    k: Range
    """A prefix of the keys, unless attention has a window."""
    is_causal: bool
    """True for a square of which only the lower triangle counts."""
    band: Band | None = None
    """The window, where it hides some of these keys from some of these queries; then `is_causal` is False."""
    distance: int = 0
    """With `band`: how many places the first query is behind the first key in the sequence."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        (first, last), (start, stop) = self.q, self.k
        length, num_keys = last - first, stop - start
        if self.band is not None:
            places = range(self.distance, self.distance + length)
            before, after = self.band.before, self.band.after
            return sum(max(min(place + after + 1, num_keys) - max(place - before, 0), 0) for place in places)
        return length * (length + 1) // 2 if self.is_causal else length * num_keys


@functools.lru_cache(maxsize=4096)  # asked for every block of every layer
def rectangles(places: Places, queries: int, keys: int, *, is_causal: bool) -> tuple[Rectangle, ...]:
    """The work of ring rank `queries` with the keys of ring rank `keys`; empty if it may attend to none of them.

    Padding comes after every real token, so causal queries never see it; without causality it is left out here.
    """
    length = places.tokens_per_ring
    if is_causal and queries == keys:
        return (Rectangle(q=(0, length), k=(0, length), is_causal=True),) if length else ()
    if not is_causal:
        real = sum(max(min(stop, places.num_tokens) - start, 0) for start, stop in places.chunks(keys))
        return (Rectangle(q=(0, length), k=(0, real), is_causal=False),) if real else ()
    found: list[Rectangle] = []
    first = 0
    for start, stop in places.chunks(queries):
        seen = sum(end - begin for begin, end in places.chunks(keys) if begin < start)
        last = first + stop - start
        if found and found[-1].k == (0, seen):
            found[-1] = Rectangle(q=(found[-1].q[0], last), k=(0, seen), is_causal=False)
        elif seen:
            found.append(Rectangle(q=(first, last), k=(0, seen), is_causal=False))
        first = last
    return tuple(found)


def allowed_pairs(places: Places, rank: int, *, is_causal: bool = True) -> tuple[int, ...]:
    """Pairs that a ring rank computes at each step; at step s it has the keys of the rank s places before it."""
    return tuple(
        sum(one.num_pairs for one in rectangles(places, rank, (rank - step) % places.ring, is_causal=is_causal))
        for step in range(places.ring)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShares:
    """The heads of each ulysses rank during attention."""

    queries: tuple[Range, ...]
    """Each query head is on one rank, ascending."""
    keys: tuple[Range, ...]
    """The key heads that the rank's query heads attend to; a head may be on several ranks."""
    num_repeats: int
    """Query heads per key head."""

    def local_keys(self, rank: int) -> list[int] | None:
        """For each query head of a rank, the index of its key head among the rank's key heads.

        None if every key head has equally many query heads, in order, which kernels handle themselves.
        """
        (first, last), (start, stop) = self.queries[rank], self.keys[rank]
        looked_at = [head // self.num_repeats - start for head in range(first, last)]
        each, remainder = divmod(last - first, stop - start)
        is_regular = not remainder and looked_at == [place // each for place in range(last - first)]
        return None if is_regular else looked_at


@functools.lru_cache(maxsize=1024)  # asked for every call of attention
def share_heads(num_queries: int, num_keys: int, *, ulysses: int, ring: int = 1) -> HeadShares:
    """Divide heads among the ulysses ranks; more ranks than query heads are refused."""
    if num_queries % num_keys:
        raise ModelError(
            f"attention has {num_queries} query heads and {num_keys} key heads; the first must be a multiple of the "
            "second"
        )
    if num_queries < ulysses:
        possible = max(number for number in range(1, num_queries + 1) if ulysses * ring % number == 0)
        heads = f"{num_queries} head{'s' * (num_queries > 1)}"
        raise ModelError(
            TOO_FEW_HEADS.message(heads=heads, num_ranks=ulysses, possible=possible, ring=ulysses * ring // possible)
        )
    out_of = num_keys if num_keys >= ulysses else num_queries
    parts = shares(out_of, ulysses)
    return HeadShares(
        queries=tuple(share_of(num_queries, part, out_of) for part in parts),
        keys=tuple(share_of(num_keys, part, out_of) for part in parts),
        num_repeats=num_queries // num_keys,
    )


def _num_chunks(ring: int, layout: str) -> int:
    return 2 * ring if layout == "zigzag" and ring > 1 else ring
