"""Shares of microbatches: given out by speed, kept in noise, given back after a recovery; parts of a batch that fit."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.layout import part_of
from weft.plan.partition.shares import (
    TOLERANCE,
    decide_shares,
    even_place,
    even_shares,
    median_times,
    passes_s,
    samples_of,
    shares_by_speed,
)


@pytest.mark.parametrize(
    ("seconds", "total", "shares"),
    [
        ([1, 1, 1, 1], 16, (4, 4, 4, 4)),
        ([1, 3], 8, (6, 2)),
        ([1, 1, 3, 1], 16, (5, 5, 1, 5)),  # as in the drawing
        ([1, 100], 4, (3, 1)),  # every rank computes one at least
        ([1, 100, 1], 3, (1, 1, 1)),
        ([2, 1], 3, (1, 2)),
        ([7], 5, (5,)),
    ],
)
def test_shares_by_speed(seconds: list[float], total: int, shares: tuple[int, ...]) -> None:
    assert shares_by_speed(seconds, total) == shares


def test_no_other_shares_are_done_earlier() -> None:
    draw = random.Random(0)
    for _ in range(50):
        seconds = [draw.uniform(0.5, 4) for _ in range(3)]
        total = draw.randint(3, 9)
        others = (one for one in itertools.product(range(1, total + 1), repeat=3) if sum(one) == total)
        assert passes_s(seconds, shares_by_speed(seconds, total)) == min(passes_s(seconds, one) for one in others)


def test_thousands_of_ranks() -> None:
    """Within a step: looking for the first rank among all, for each microbatch, would take a minute."""
    shares = shares_by_speed([3.0, *[1.0] * 4095], 4096 * 8)
    assert shares[0] == 3 and set(shares[1:]) == {8, 9} and sum(shares) == 4096 * 8


@pytest.mark.parametrize(
    ("seconds", "now", "then"),
    [
        ([1, 1], (4, 4), (4, 4)),
        ([1, 3], (4, 4), (6, 2)),
        ([1, 1], (6, 2), (4, 4)),  # recovered
        ([1, 1.24], (4, 4), (4, 4)),  # 5 and 3 would take longer
        ([1, 1.05], (32, 32), (32, 32)),  # 33 and 31 would not be worth it
        ([1, 1.05], (20, 44), (32, 32)),  # nor when other shares are left for them
        ([1, 0], (6, 2), (6, 2)),  # a time that nobody knows decides nothing
        ([1, float("nan")], (6, 2), (6, 2)),
        ([float("inf"), 1], (6, 2), (6, 2)),
    ],
)
def test_shares_change_where_it_pays(seconds: list[float], now: tuple[int, ...], then: tuple[int, ...]) -> None:
    assert decide_shares(seconds, now) == then


def test_noise_within_the_tolerance_never_moves_shares() -> None:
    draw = random.Random(1)
    for num_ranks, microbatches in ((2, 2), (4, 4), (4, 64)):
        now = even = even_shares(num_ranks, microbatches)
        for _ in range(200):
            now = decide_shares([draw.uniform(1, 1 + TOLERANCE) for _ in even], now)
        assert now == even


def test_the_median_leaves_out_a_step_that_was_slow_for_another_reason() -> None:
    assert median_times([[1, 2], [1, 2], [90, 2], [1, 90], [1, 2]]) == [1, 2]
    assert median_times([[3, 1], [5, 1]]) == [3, 1]


@pytest.mark.parametrize("num_samples", [0, 1, 7, 16, 35])
@pytest.mark.parametrize("shares", [(4, 4), (6, 2), (5, 5, 2, 4), (1, 1, 1, 13), (3,)])
def test_parts_of_a_batch_fit_together(num_samples: int, shares: tuple[int, ...]) -> None:
    parts = [samples_of(num_samples, rank, shares) for rank in range(len(shares))]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == num_samples
    if num_samples % sum(shares) == 0:
        each = num_samples // sum(shares)
        assert [stop - start for start, stop in parts] == [each * share for share in shares]
    if len(set(shares)) == 1:
        assert parts == [part_of(num_samples, rank, len(shares)) for rank in range(len(shares))]


def test_a_microbatch_draws_what_it_draws_where_shares_are_even() -> None:
    shares = (5, 5, 2, 4)
    places = [even_place(rank, number, shares) for rank, share in enumerate(shares) for number in range(share)]
    assert places == list(itertools.product(range(4), range(4)))
