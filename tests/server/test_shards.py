"""Which server has what."""

from __future__ import annotations

import random

import pytest
import torch

from weft.errors import PlanError
from weft.plan.partition.server_shards import (
    LEAST_PART_BYTES,
    MOST_PARTS_TOGETHER,
    ServedTensor,
    assign_buckets,
    assign_parts,
)
from weft.server.protocol.message import Kind, Message, pack_message, read_message
from weft.server.protocol.optimizer_state import pack_states


def model(seed: int) -> list[ServedTensor]:
    chance = random.Random(seed)
    found = []
    for number in range(chance.randrange(1, 40)):
        row = chance.choice([1, 1, 64, 768])
        rows = chance.choice([0, 1, 3, 100, 5000])
        found.append(ServedTensor(name=str(number), numel=rows * row, item_bytes=chance.choice([4, 8]), row_numel=row))
    return found


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_every_element_is_on_one_server(seed: int, num_servers: int, splits: bool) -> None:
    tensors = model(seed)
    parts = assign_parts(tensors, num_servers, splits=splits, most_bytes=1 << 20)
    for number, one in enumerate(tensors):
        ranges = sorted((part.start, part.stop) for held in parts for part in held if part.tensor == number)
        assert sum(stop - start for start, stop in ranges) == one.numel
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
        assert all(start % one.row_numel == 0 for start, _ in ranges)
        most_bytes = max(1 << 20, one.row_numel * one.item_bytes)
        assert all((stop - start) * one.item_bytes <= most_bytes for start, stop in ranges)
        having = sum(any(part.tensor == number for part in held) for held in parts)
        assert splits or having <= 1
    for held in parts:
        assert [part.tensor for part in held] == sorted(part.tensor for part in held)


@pytest.mark.parametrize("num_servers", [2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_servers_have_nearly_the_same_bytes(seed: int, num_servers: int) -> None:
    tensors = model(seed)
    parts = assign_parts(tensors, num_servers)
    num_bytes = [sum(part.numel * tensors[part.tensor].item_bytes for part in held) for held in parts]
    rows = sum(one.row_numel * one.item_bytes for one in tensors if one.num_bytes >= num_servers * LEAST_PART_BYTES)
    assert max(num_bytes) - min(num_bytes) <= num_servers * LEAST_PART_BYTES + rows


def test_buckets_keep_holders_apart_and_their_order() -> None:
    tensors = [
        ServedTensor(name=str(number), numel=100, item_bytes=4, holders=(0, 1) if number % 3 == 0 else (number % 2,))
        for number in range(12)
    ]
    (parts,) = assign_parts(tensors, 1)
    buckets = assign_buckets(tensors, parts, bucket_bytes=1000)
    assert sorted(part for bucket in buckets for part in bucket) == list(range(12))
    assert all(len({tensors[parts[part].tensor].holders for part in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) <= 2 for bucket in buckets)
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)


def test_a_part_larger_than_a_bucket_travels_by_itself() -> None:
    tensors = [ServedTensor(name="wide", numel=3000, item_bytes=4, row_numel=1000)]
    (parts,) = assign_parts(tensors, 1, most_bytes=100)
    assert [(part.start, part.stop) for part in parts] == [(0, 1000), (1000, 2000), (2000, 3000)]
    assert assign_buckets(tensors, parts, bucket_bytes=100) == ((0,), (1,), (2,))


def test_no_message_has_more_parts_than_a_header_can_count_with_their_state() -> None:
    """Adam keeps two tensors and a number of each part, and a rank that asks for them gets its weights, too."""
    tensors = [ServedTensor(name=str(number), numel=3, item_bytes=4) for number in range(3 * MOST_PARTS_TOGETHER - 1)]
    (parts,) = assign_parts(tensors, 1)
    buckets = assign_buckets(tensors, parts, bucket_bytes=1 << 25)
    assert [len(one) for one in buckets] == [MOST_PARTS_TOGETHER, MOST_PARTS_TOGETHER, MOST_PARTS_TOGETHER - 1]
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    frames = [b"" for _ in buckets[0]] + pack_states([state] * len(buckets[0]))
    assert read_message(pack_message(Message(kind=Kind.STATE, frames=tuple(frames)))).frames == tuple(frames)


def test_no_servers() -> None:
    with pytest.raises(PlanError, match="shards to 1 or more"):
        assign_parts([], 0)
