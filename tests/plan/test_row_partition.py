"""Who needs which rows of whom, against counting them one by one, and against what torch makes of the same windows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from weft.plan.partition.rows import (
    Exchange,
    Window,
    exchange_for,
    halo_bytes,
    join_bytes,
    overlap,
    widest_part,
    window_counts,
)
from weft.plan.partition.tensor import shares
from weft.plan.partition.wire import sent_bytes


def windows(number: int) -> Iterator[tuple[Window, int, int]]:
    """Windows that fit, a height and a number of ranks."""
    draw = random.Random(0)
    while number:
        kernel = draw.randint(1, 7)
        window = Window(
            kernel=kernel,
            stride=draw.randint(1, 4),
            before=draw.randint(-2, kernel),
            after=draw.randint(-2, kernel),
            dilation=draw.randint(1, 3),
        )
        height, num_ranks = draw.randint(1, 30), draw.randint(1, 7)
        if window.out_height(height) > 0:
            number -= 1
            yield window, height, num_ranks


def looked_at(window: Window, made: range) -> set[int]:
    """Rows, padding included, one by one."""
    return {row * window.stride - window.before + tap * window.dilation for row in made for tap in range(window.kernel)}


def test_every_rank_gets_what_its_windows_look_at() -> None:
    for window, height, num_ranks in windows(500):
        exchange = exchange_for(window, height, num_ranks)
        assert exchange.have == shares(height, num_ranks)
        assert exchange.make == shares(window.out_height(height), num_ranks)
        for rank, (made, span) in enumerate(zip(exchange.make, exchange.spans, strict=True)):
            rows = looked_at(window, range(*made))
            assert span == ((min(rows), max(rows) + 1) if rows else (0, 0))
            fetched = [row for move in exchange.moves if move.target == rank for row in range(*move.rows)]
            here = set(range(*exchange.have[rank]))
            assert len(fetched) == len(set(fetched)), "nothing comes twice"
            assert set(fetched) == set(range(*span)) & set(range(height)) - here


def test_rows_come_from_who_has_them() -> None:
    for window, height, num_ranks in windows(200):
        exchange = exchange_for(window, height, num_ranks)
        pairs = [(move.source, move.target) for move in exchange.moves]
        assert len(pairs) == len(set(pairs))
        for move in exchange.moves:
            assert move.source != move.target and move.rows[0] < move.rows[1]
            assert overlap(move.rows, exchange.have[move.source]) == move.rows


def test_heights_are_those_of_torch() -> None:
    for window, height, _ in windows(200):
        image = torch.zeros(1, 1, height, 1)
        padded = F.pad(image, (0, 0, window.before, window.after))
        kernel = torch.zeros(1, 1, window.kernel, 1)
        made = F.conv2d(padded, kernel, stride=(window.stride, 1), dilation=(window.dilation, 1))
        assert made.shape[2] == window.out_height(height)


def pools() -> Iterator[tuple[Window, int]]:
    draw = random.Random(1)
    for _ in range(300):
        kernel = draw.randint(1, 6)
        padding = draw.randint(0, kernel // 2)
        window = Window(
            kernel=kernel, stride=draw.randint(1, 7), before=padding, after=padding, ceil=draw.random() < 0.7
        )
        height = draw.randint(1, 20)
        if window.out_height(height) > 0 and height + 2 * padding >= kernel:
            yield window, height


@pytest.mark.parametrize("counts_padding", [True, False])
def test_pools_count_as_torch_does(counts_padding: bool) -> None:
    for window, height in pools():
        pooled = F.avg_pool2d(
            torch.ones(1, 1, height, 1, dtype=torch.float64),
            (window.kernel, 1),
            (window.stride, 1),
            (window.before, 0),
            ceil_mode=window.ceil,
            count_include_pad=counts_padding,
        ).flatten()
        assert len(pooled) == window.out_height(height)
        made = (0, len(pooled))
        inside = window_counts(window, height, made, counts_padding=False)
        counted = window_counts(window, height, made, counts_padding=counts_padding)
        assert pooled.tolist() == pytest.approx([i / c for i, c in zip(inside, counted, strict=True)])


def test_the_drawing() -> None:
    """The example at the head of the file."""
    exchange = exchange_for(Window(kernel=3, before=1, after=1), 8, 2)
    assert exchange.spans == ((-1, 5), (3, 9))
    assert [(move.source, move.target, move.rows) for move in exchange.moves] == [(1, 0, (4, 5)), (0, 1, (3, 4))]


def test_thin_parts_fetch_from_further_than_the_next_rank() -> None:
    exchange = exchange_for(Window(kernel=7, before=3, after=3), 4, 4)
    assert {(move.source, move.target) for move in exchange.moves} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }


def sent(exchange: Exchange, *, backward: bool) -> list[int]:
    return [halo_bytes(exchange, rank, row_bytes=10, backward=backward) for rank in range(len(exchange.have))]


def test_bytes() -> None:
    exchange = exchange_for(Window(kernel=3, before=1, after=1), 8, 4)
    assert sent(exchange, backward=False) == sent(exchange, backward=True) == [10, 20, 20, 10]
    # Windows of 3 at every second row look one row down: what goes up in the forward pass comes back in the other.
    exchange = exchange_for(Window(kernel=3, stride=2, after=1), 8, 4)
    assert sent(exchange, backward=False) == [0, 10, 10, 10]
    assert sent(exchange, backward=True) == [10, 10, 10, 0]


def test_joined_parts_are_as_wide_as_the_widest() -> None:
    assert widest_part(9, 4) == 3
    assert join_bytes(9, 4, row_bytes=10) == sent_bytes("all-gather", 120, 4) == 90
    assert join_bytes(9, 1, row_bytes=10) == 0
