"""The strict stand-in for NCCL: every exchange has the right values in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from strict_nccl.mode import VARIABLE, StrictMode, read_mode
from strict_nccl.world import strict_world
from torch import Tensor

MODES = {
    "lazy": StrictMode(),
    "eager": StrictMode(is_eager=True),
    "one stream": StrictMode(one_stream=True),
    "delays": StrictMode(delay_ms=3.0, seed=1),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def strict_group(*members: int, name: str = "test") -> dist.ProcessGroup:
    return dist.new_group(list(members or range(dist.get_world_size())), backend="strict", group_desc=name)


def tensor_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in every dtype."""
    return ((torch.arange(numel, device="cpu") * 3 + rank * 5) % 11).to(dtype)


def everyones(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([tensor_of(rank, numel, dtype) for rank in range(dist.get_world_size())])


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")


def check_reductions(group: dist.ProcessGroup, rank: int, size: int) -> None:
    for dtype in DTYPES:
        table = everyones(13, dtype)
        for op, true in (("SUM", table.sum(0).to(dtype)), ("MAX", table.amax(0)), ("MIN", table.amin(0))):
            mine = tensor_of(rank, 13, dtype)
            dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
            assert torch.equal(mine, true)
        table, part = everyones(3 * size, dtype), zeros(3, dtype)
        reduce_scatter(part, tensor_of(rank, 3 * size, dtype), group=group)
        assert torch.equal(part, table.sum(0).to(dtype)[3 * rank : 3 * rank + 3])
        whole = tensor_of(rank, 3 * size, dtype)
        own = whole[3 * rank : 3 * rank + 3]
        reduce_scatter(own, whole, group=group)  # in place
        assert torch.equal(own, part)


def check_copies(group: dist.ProcessGroup, rank: int, size: int) -> None:
    for root in range(size):
        mine = tensor_of(rank, 7)
        dist.broadcast(mine, root, group)
        assert torch.equal(mine, tensor_of(root, 7))
    for dtype in DTYPES:
        gathered = zeros(5 * size, dtype)
        all_gather(gathered, tensor_of(rank, 5, dtype), group)
        assert torch.equal(gathered, everyones(5, dtype).view(-1))
        own = gathered[5 * rank : 5 * rank + 5]
        work = all_gather(gathered, own, group, True)
        assert torch.equal(own, tensor_of(rank, 5, dtype))  # in place, one's own part is never written
        work.wait()
        assert torch.equal(gathered, everyones(5, dtype).view(-1))
    dist.barrier(group)


def check_all_to_all(group: dist.ProcessGroup, rank: int, size: int) -> None:
    output = zeros(2 * size)
    dist.all_to_all_single(output, tensor_of(rank, 2 * size), group=group)
    assert torch.equal(output, everyones(2 * size, torch.float32)[:, 2 * rank : 2 * rank + 2].reshape(-1))
    # Rank i sends j rows to rank j, so nothing at all to rank 0.
    given, total = list(range(size)), sum(range(size))
    rows = torch.full((total, 2), rank, dtype=torch.float32, device="cpu")
    output = torch.zeros(rank * size, 2, device="cpu")
    dist.all_to_all_single(output, rows, [rank] * size, given, group)
    assert output.tolist() == [[float(source)] * 2 for source in range(size) for _ in range(rank)]


def check_messages(group: dist.ProcessGroup, rank: int, size: int) -> None:
    before, after = (rank - 1) % size, (rank + 1) % size
    for _ in range(3):
        incoming = zeros(6)
        both = [
            dist.P2POp(dist.isend, tensor_of(rank, 6), after, group),
            dist.P2POp(dist.irecv, incoming, before, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert torch.equal(incoming, tensor_of(before, 6))
    # One direction at a time, tags ignored: matched first in, first out.
    first, second = zeros(4), zeros(4)
    if rank % 2 == 0:
        for work in [dist.isend(tensor_of(number, 4), rank + 1, group, tag=number) for number in (8, 9)]:
            work.wait()
    else:
        works = [dist.irecv(one, rank - 1, group, tag=tag) for one, tag in ((first, 9), (second, 8))]
        for work in reversed(works):
            work.wait()
        assert torch.equal(first, tensor_of(8, 4)) and torch.equal(second, tensor_of(9, 4))


def check_coalesced(group: dist.ProcessGroup, rank: int, size: int) -> None:
    tensors = [tensor_of(rank, numel) for numel in (1, 5)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    assert all(tensor.isnan().all() for tensor in tensors)
    manager.wait()
    assert all(torch.equal(tensor, everyones(tensor.numel(), torch.float32).sum(0)) for tensor in tensors)


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_every_exchange_has_the_right_values(mode: str) -> None:
    with strict_world(MODES[mode]):
        group, rank, size = strict_group(), dist.get_rank(), dist.get_world_size()
        for check in (check_reductions, check_copies, check_all_to_all, check_messages, check_coalesced):
            check(group, rank, size)
        dist.destroy_process_group(group)


@ranks(4)
def test_sums_are_those_of_a_ring_in_their_own_dtype() -> None:
    """256 + 1 is 256 in bfloat16: what a sum of 256, 1 and 1 is depends on which comes first."""
    with strict_world():
        group = strict_group(0, 1, 2)
        if dist.get_rank() < 3:
            mine = torch.full((6,), [256.0, 1.0, 1.0][dist.get_rank()], dtype=torch.bfloat16, device="cpu")
            part = mine[:2].clone()
            reduce_scatter(part, mine.clone(), group=group)
            assert part.tolist() == [[258.0] * 2, [256.0] * 2, [256.0] * 2][dist.get_rank()]
            dist.all_reduce(mine, group=group)
            assert mine.tolist() == [258.0, 258.0, 256.0, 256.0, 256.0, 256.0]
            dist.destroy_process_group(group)


def test_modes_as_text() -> None:
    for mode in (*MODES.values(), StrictMode(is_eager=True, one_stream=True, delay_ms=0.5, seed=3, stall_s=2.5)):
        assert read_mode(mode.text()) == mode
    with pytest.raises(ValueError, match=f"{VARIABLE} has 'fast'; known: lazy, eager"):
        read_mode("eager, fast")
