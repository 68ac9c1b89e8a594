"""Exchanges in two levels, on ranks that take themselves for several hosts; `tests/lab` has hosts of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from meshes import data_group
from oracle import ADAMW, data_plan, image_batch, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor

from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.plan.partition.wire import sent_bytes
from weft.verification.verify import verify
from weft.world import World, join_world

EVEN, INTERLEAVED, UNEVEN = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)
SIZES = (1, 63, 1000, 12_345, 700_001)


@contextmanager
def on_hosts(hosts: tuple[int, ...]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.world.number_hosts", lambda locations: hosts)
        yield


@functools.cache
def group_on(hosts: tuple[int, ...]) -> Group:
    world: World = replace(join_world("cpu"), hosts=hosts)
    return data_group("levels", transport="auto", world=world)


def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 5).to(dtype)


def placed(tensor: Tensor, group: Group, in_arena: bool) -> Tensor:
    """A copy, in memory that ranks of this host share or not."""
    if not in_arena:
        return tensor.clone()
    room = BufferAllocator(group, torch.device("cpu"), num_bytes=tensor.nbytes + 256)
    return room.empty(tensor.numel(), tensor.dtype).copy_(tensor)


def check_all(hosts: tuple[int, ...], in_arena: bool, dtype: torch.dtype) -> None:
    group = group_on(hosts)
    assert group.levels is not None and group.shared is None
    for numel, wait in zip(SIZES, (True, False, True, False, True), strict=True):
        table = torch.stack([tensor_of(rank, numel, dtype) for rank in range(group.size)])
        mine = placed(table[group.index], group, in_arena)
        for op, true in (("sum", table.sum(0).to(dtype)), ("max", table.amax(0)), ("min", table.amin(0))):
            mine.copy_(table[group.index])
            collectives.all_reduce(mine, group, op=op, wait=wait).wait()  # type: ignore[arg-type]
            assert torch.equal(mine, true), (op, numel)
        for root in range(group.size):
            mine.copy_(table[group.index])
            collectives.broadcast(mine, group, root=root, wait=wait).wait()
            assert torch.equal(mine, table[root])
        whole = placed(torch.zeros(group.size * numel, dtype=dtype), group, in_arena)
        part = whole.view(group.size, -1)[group.index].copy_(table[group.index])
        collectives.all_gather(whole, part, group, wait=wait).wait()
        assert torch.equal(whole, table.flatten())
        collectives.all_gather(whole.zero_(), table[group.index], group, wait=wait).wait()
        assert torch.equal(whole, table.flatten())
        rows = torch.stack([tensor_of(rank, group.size * numel, dtype) for rank in range(group.size)])
        given = placed(rows[group.index], group, in_arena)
        total = rows.sum(0).view(group.size, -1)[group.index].to(dtype)
        for add in (False, True):
            output = torch.ones(numel, dtype=dtype)
            collectives.reduce_scatter(output, given, group, add=add, wait=wait).wait()
            assert torch.equal(output, total + add)
        assert torch.equal(given, rows[group.index]), "the input was changed"


@pytest.mark.long
@pytest.mark.sampled(1, long=3)
@ranks(4)
@pytest.mark.parametrize("in_arena", [False, True], ids=["slots", "arena"])
@pytest.mark.parametrize("hosts", [EVEN, INTERLEAVED, UNEVEN], ids=str)
def test_every_exchange_of_two_levels(hosts: tuple[int, ...], in_arena: bool) -> None:
    check_all(hosts, in_arena, torch.float32)


@pytest.mark.long
@ranks(3)
def test_hosts_of_two_and_one() -> None:
    check_all((0, 1, 1), True, torch.float64)


@ranks(4)
def test_exchanges_without_levels_of_their_own_are_right_too() -> None:
    group = group_on(EVEN)
    mine, output = tensor_of(group.index, 8, torch.float32), torch.empty(8)
    collectives.all_to_all(output, mine, group)
    rows = torch.stack([tensor_of(rank, 8, torch.float32) for rank in range(4)])
    assert torch.equal(output, rows[:, 2 * group.index : 2 * group.index + 2].flatten())


@ranks(4)
def test_bytes_are_counted_as_in_one_level() -> None:
    group = group_on(EVEN)
    before = group.traffic.sent_bytes
    collectives.all_reduce(torch.ones(50_000), group)
    assert group.traffic.sent_bytes - before == sent_bytes("all-reduce", 200_000, 4)


@ranks(4)
def test_one_rank_a_host_needs_no_levels() -> None:
    assert group_on((0, 1, 2, 3)).levels is None and group_on((0, 1, 2, 3)).shared is None
    assert group_on((0, 0, 0, 0)).levels is None and group_on((0, 0, 0, 0)).shared is not None


@pytest.mark.sampled(1, long=3)
@ranks(4)
@pytest.mark.parametrize("hosts", [EVEN, INTERLEAVED, UNEVEN], ids=str)
@pytest.mark.parametrize("shard", ["nothing", pytest.param("gradients", marks=pytest.mark.long), "parameters"])
def test_training_on_several_hosts_equals_one_process(shard: str, hosts: tuple[int, ...]) -> None:
    batches = [token_batch(size, seed=seed) for seed, size in enumerate((9, 4))]
    with on_hosts(hosts):
        plan = data_plan(4, shard=shard, clip_norm=0.1)
        verify(small_gpt(), plan, loss="cross-entropy", optimizer=ADAMW, batches=batches).require()


@ranks(4)
@pytest.mark.parametrize("hosts", [EVEN, INTERLEAVED], ids=str)
def test_hybrid_sharding_inside_and_across_hosts(hosts: tuple[int, ...]) -> None:
    """The data axis inside a host and replicas across, and the other way round."""
    batches = [image_batch(size, seed=seed) for seed, size in enumerate((8, 5))]
    with on_hosts(hosts):
        plan = data_plan(2, replicate=2, shard="parameters")
        verify(small_convnet(), plan, loss="cross-entropy", optimizer=ADAMW, batches=batches).require()
