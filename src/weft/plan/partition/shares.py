"""How many of a step's microbatches each data rank computes, decided from measured speeds.

A global batch is cut into data ranks × `[step] microbatches` equal microbatches. Data rank r takes `shares[r]` of them,
one at least: the first ranks the first ones, so that every rank has a contiguous part of the batch.

    data rank       0   1   2   3          seconds per microbatch 1, 1, 3, 1, and 4 microbatches each
    even            4   4   4   4          a step takes 12 s, of which three ranks wait 8
    by speed        5   5   1   5          5 s

Every rank decides for itself, with the same numbers and these pure functions, so nothing has to be told. Times are
medians of the last few steps: one step that was slow for another reason decides nothing.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence

WINDOW_STEPS = 5
"""Steps of which the median is taken."""

FEWEST_STEPS = 3
"""Steps that must have been measured before shares are decided."""

DECIDE_EVERY = 3
"""Steps between two decisions. With the window, and a step in which a decision is known but not yet in force, other
shares answer a change of speed after 4 to 6 steps, and 2 steps later on a GPU, whose times are read late."""

TOLERANCE = 0.1
"""Shares change only where passes would otherwise take longer than they need to by more than this part: below that,
noise would move them back and forth."""

Shares = tuple[int, ...]
"""The number of microbatches of each data rank."""


def even_shares(num_ranks: int, microbatches: int) -> Shares:
    return (microbatches,) * num_ranks


def shares_by_speed(seconds: Sequence[float], total: int) -> Shares:
    """`total` microbatches given out so that the slowest rank is done as early as possible.

    `seconds` are those of one microbatch on each rank. Each one goes to the rank that would be done with it first, and
    to the first of those that would be done together.
    """
    assert total >= len(seconds), f"{total} microbatches do not give one to each of {len(seconds)} ranks"
    shares = [1] * len(seconds)
    done_s = [(2 * each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(done_s)
    for _ in range(total - len(seconds)):
        rank = done_s[0][1]
        shares[rank] += 1
        heapq.heapreplace(done_s, ((shares[rank] + 1) * seconds[rank], rank))
    return tuple(shares)


def passes_s(seconds: Sequence[float], shares: Shares) -> float:
    """Seconds until the slowest rank is done with its microbatches."""
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def decide_shares(seconds: Sequence[float], now: Shares) -> Shares:
    """The shares to use from now on: those in use, unless others are better by more than the tolerance.

    Even shares are preferred to others that are hardly better, so that equal ranks return to them.
    """
    if not all(math.isfinite(each) and each > 0 for each in seconds):
        return now
    total = sum(now)
    best = shares_by_speed(seconds, total)
    limit_s = (1 + TOLERANCE) * passes_s(seconds, best)
    if passes_s(seconds, now) <= limit_s:
        return now
    even = even_shares(len(now), total // len(now))
    return even if passes_s(seconds, even) <= limit_s else best


def median_times(window: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's median over the steps of a window; of an even number, the lower of the middle two."""
    return [statistics.median_low(times) for times in zip(*window, strict=True)]


def samples_of(num_samples: int, rank: int, shares: Shares) -> tuple[int, int]:
    """The first sample of a data rank's part of a batch, and the one after its last.

    With even shares parts are as even as can be, and the first ones take what is left over.
    """
    num_ranks, total = len(shares), sum(shares)
    if len(set(shares)) == 1:
        each, left = divmod(num_samples, num_ranks)
        start = rank * each + min(rank, left)
        return start, start + each + (rank < left)
    before = sum(shares[:rank])
    # Rounded up: exact in integers, which a float would not be.
    start, stop = (-(-num_samples * count // total) for count in (before, before + shares[rank]))
    return start, stop


def even_place(rank: int, number: int, shares: Shares) -> tuple[int, int]:
    """The data rank and number that microbatch `number` of a data rank has where shares are even.

    Random numbers follow the microbatch, not the rank that computes it.
    """
    return divmod(sum(shares[:rank]) + number, sum(shares) // len(shares))
