"""Exchanges of all kinds one after another, waiting and beside each other, in orders drawn by lot: what one leaves in a
slot, a table or a counter must never reach the next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from exchanges import kept_group, new_group, true_sum, values
from ranks import ranks
from torch import Tensor

from weft.comm import collectives
from weft.comm.collectives import Pending
from weft.comm.exchange_buffers import BufferAllocator, common_empty
from weft.comm.group import Group
from weft.comm.p2p import receive, send

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
NUMELS = (1, 63, 64, 65, 255, 256, 257, 1000, 1025, 3000)
"""Around the limits below."""


@contextmanager
def tiny_slots() -> Iterator[None]:
    """Slots of 4 KB, so that small tensors, which are quickly made and compared, need many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.comm.shared_memory.barrier.SLOT_BYTES", 4096)
        patch.setattr("weft.comm.shared_memory.transport.SMALL_BYTES", 256)
        for module in ("native", "reduction"):
            patch.setattr(f"weft.comm.shared_memory.{module}.LEAST_BYTES", 64)
        yield


def set_counters(group: Group, count: int) -> None:
    """As if that many meetings had been."""
    assert group.shared is not None
    dist.barrier(group.handle)
    mine = group.shared.barrier._mine
    mine.count = mine._word[0] = count
    dist.barrier(group.handle)


class Draw:
    """One exchange after another; what kind, of what and how are drawn alike on all ranks, the rest is each rank's."""

    def __init__(self, group: Group, *, seed: int) -> None:
        self.group, self.room = group, BufferAllocator(group, torch.device("cpu"), num_bytes=2**22)
        self.alike, self.own = random.Random(seed), random.Random(100 * seed + group.index)
        common = common_empty(group, torch.device("cpu"), 100 * group.size, torch.int64)
        assert common is not None
        self.common, self.epoch = common.view(group.size, -1), 0
        self.under_way: list[tuple[str, Pending, Tensor, Tensor | None]] = []

    def run(self, num_exchanges: int) -> None:
        kinds: list[Callable[[], None]] = [
            self.all_reduce, self.all_reduce, self.broadcast, self.all_gather, self.reduce_scatter,
            self.all_to_all, self.message, self.arrive,
        ]  # fmt: skip
        for _ in range(num_exchanges):
            self.numel, self.dtype = self.alike.choice(NUMELS), self.alike.choice(DTYPES)
            self.wait, self.root = self.alike.random() < 0.5, self.alike.randrange(self.group.size)
            self.salt, self.offset = self.alike.randrange(5), self.alike.randrange(3)
            self.in_arena = self.alike.choice((True, False, None))  # None: each rank as it likes
            if self.own.random() < 0.05:
                time.sleep(self.own.random() * 0.003)
            kind = self.alike.choice(kinds)
            self.kind = kind.__name__
            kind()
            if self.alike.random() < 0.2:
                self.settle()
        self.settle()

    def settle(self) -> None:
        for kind, pending, found, true in self.under_way:
            pending.wait()
            assert true is None or torch.equal(found, true), f"{kind} of {found.numel()} {found.dtype}"
        self.under_way.clear()

    def table(self, numel: int) -> list[Tensor]:
        return [values(rank, numel, self.dtype, self.salt) for rank in range(self.group.size)]

    def put(self, tensor: Tensor) -> Tensor:
        in_arena = self.own.random() < 0.5 if self.in_arena is None else self.in_arena
        numel = tensor.numel() + self.offset
        memory = self.room.empty(numel, tensor.dtype, shared=in_arena)
        return memory[self.offset :].copy_(tensor)

    def note(self, pending: Pending, found: Tensor, true: Tensor | None) -> None:
        self.under_way.append((self.kind, pending, found, true))

    def all_reduce(self) -> None:
        table, op = self.table(self.numel), self.alike.choice(("sum", "max", "min"))
        mine = self.put(table[self.group.index])
        pile = torch.stack(table)
        true = true_sum(table) if op == "sum" else pile.amax(0) if op == "max" else pile.amin(0)
        self.note(collectives.all_reduce(mine, self.group, op=op, wait=self.wait), mine, true)

    def broadcast(self) -> None:
        table = self.table(self.numel)
        mine = self.put(table[self.group.index])
        self.note(collectives.broadcast(mine, self.group, root=self.root, wait=self.wait), mine, table[self.root])

    def all_gather(self) -> None:
        table = self.table(self.numel)
        output = self.put(torch.zeros(self.numel * self.group.size, dtype=self.dtype))
        mine = self.put(table[self.group.index])
        if self.alike.random() < 0.5:
            mine = output.view(self.group.size, -1)[self.group.index].copy_(mine)
        self.note(collectives.all_gather(output, mine, self.group, wait=self.wait), output, torch.cat(table))

    def reduce_scatter(self) -> None:
        table = self.table(self.numel * self.group.size)
        output = torch.empty(self.numel, dtype=self.dtype)
        true = true_sum([long.view(self.group.size, -1)[self.group.index] for long in table])
        mine = self.put(table[self.group.index])
        self.note(collectives.reduce_scatter(output, mine, self.group, wait=self.wait), output, true)

    def all_to_all(self) -> None:
        size, me = self.group.size, self.group.index
        splits = [[self.alike.choice((0, 1, 70, 900)) for _ in range(size)] for _ in range(size)]
        given = [values(rank, sum(splits[rank]), self.dtype, self.salt) for rank in range(size)]
        received = [splits[rank][me] for rank in range(size)]
        true = torch.cat([one.split(split)[me] for one, split in zip(given, splits, strict=True)])
        output = torch.empty(sum(received), dtype=self.dtype)
        pending = collectives.all_to_all(
            output, self.put(given[me]), self.group, output_splits=received, input_splits=splits[me], wait=self.wait
        )
        self.note(pending, output, true)

    def message(self) -> None:
        table, me, size = self.table(self.numel), self.group.index, self.group.size
        send(self.put(table[me]), self.group, to=(me + 1) % size, tag=self.salt)
        got, before = torch.empty(self.numel, dtype=self.dtype), (me - 1) % size
        self.note(receive(got, self.group, source=before, tag=self.salt), got, table[before])

    def arrive(self) -> None:
        """A gather of common memory, with another exchange before it is waited for; then it may be written again."""
        self.epoch += 1
        self.common[self.group.index].fill_(self.epoch)
        pending = collectives.all_gather(self.common.view(-1), self.common[self.group.index], self.group, wait=False)
        if self.alike.random() < 0.5:
            self.all_reduce()
        pending.wait()
        assert bool((self.common == self.epoch).all())
        collectives.all_reduce(torch.zeros(1), self.group)


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("start", [0, 2**32 - 100], ids=["from 0", "over the wrap"])
def test_two_ranks_in_any_order(start: int) -> None:
    with tiny_slots():
        group = new_group("shared", f"order {start}")
        set_counters(group, start)
        Draw(group, seed=1 + start).run(300)
        assert start == 0 or group.shared.barrier._mine.count < start  # type: ignore[union-attr]


@ranks(3)
@pytest.mark.parametrize("futex", [True, False], ids=["futex", "naps"])
def test_three_ranks_in_any_order(futex: bool) -> None:
    with tiny_slots(), pytest.MonkeyPatch.context() as patch:
        if not futex:
            patch.setattr("weft.comm.shared_memory.counters._find_futex", lambda: None)
        Draw(new_group("shared", f"order {futex}"), seed=3).run(150)


@ranks(8)
def test_eight_ranks_in_any_order() -> None:
    with tiny_slots():
        Draw(new_group("shared", "order"), seed=4).run(40)


@pytest.mark.long
@ranks(2, timeout_s=300)
def test_two_ranks_for_long() -> None:
    with tiny_slots():
        for seed in range(10, 20):
            group = new_group("shared", f"long {seed}")
            set_counters(group, 2**32 - 1000)
            Draw(group, seed=seed).run(2000)


@pytest.mark.long
@ranks(5, timeout_s=300)
def test_more_ranks_than_cores_for_long() -> None:
    with tiny_slots():
        for seed in range(20, 24):
            Draw(new_group("shared", f"long {seed}"), seed=seed).run(500)


@ranks(2)
def test_an_exchange_goes_on_beside_its_caller() -> None:
    """The call returns although the other rank has not come; computing goes on; the answer is there when waited for."""
    group, room = kept_group("shared")
    bucket = room.empty(300_000, torch.float32).fill_(1.0)
    if group.index == 0:
        pending = [collectives.all_reduce(bucket, group, wait=False)]
        pending.append(collectives.all_reduce(torch.ones(10), group, wait=False))
        dist.barrier()  # only now does rank 1 begin
    else:
        dist.barrier()
        pending = [collectives.all_reduce(bucket, group, wait=False)]
        pending.append(collectives.all_reduce(torch.ones(10), group, wait=False))
    for exchange in pending:
        exchange.wait()
    assert bool((bucket == 2.0).all())


@ranks(3)
def test_arriving_keeps_nobody() -> None:
    """A gather of common memory returns at once too, and is over when all have arrived."""
    group = new_group("shared", "arriving")
    common = common_empty(group, torch.device("cpu"), 3, torch.int64)
    assert common is not None
    if group.index != 0:
        dist.barrier()
    common[group.index] = 5 + group.index
    pending = collectives.all_gather(common, common[group.index : group.index + 1], group, wait=False)
    if group.index == 0:
        dist.barrier()
    pending.wait()
    assert common.tolist() == [5, 6, 7]
