"""Exchanges through shared memory: right to the bit wherever tensors lie, and like gloo's to rounding."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    DTYPES,
    GLOO_DTYPES,
    PLACES,
    assert_same_bits,
    assert_same_to_rounding,
    kept_group,
    new_group,
    results_of,
    true_sum,
    truths_of,
    values,
)
from ranks import ranks

from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.connect import WAYS
from weft.comm.shared_memory.segments import Way

NAMES = Path("/dev/shm")
SIZES = (1, 63, 5000, 17_001)
"""Around the limits: one element; a slice that some ranks have nothing of; small; in place or by slots."""


def check_bits(dtype: torch.dtype, sizes: tuple[int, ...], places: tuple[str, ...] = PLACES) -> None:
    transport = kept_group("shared")
    size, me = dist.get_world_size(), dist.get_rank()
    for number, numel in enumerate(sizes):
        true = truths_of(size, me, numel, dtype)
        for place in places:
            offset = (number + len(place)) % 4
            found = results_of(transport, numel, dtype, place=place, offset=offset, wait=(number + offset) % 2 == 0)
            assert_same_bits(found, true)


@pytest.mark.sampled(5)
@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_to_the_bit(dtype: torch.dtype) -> None:
    check_bits(dtype, SIZES)


@ranks(2)
def test_many_slots_to_the_bit() -> None:
    check_bits(torch.float32, (300_001,), ("mixed",))


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_three_ranks_to_the_bit(dtype: torch.dtype) -> None:
    check_bits(dtype, SIZES[1:4])


@ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_four_ranks_to_the_bit(dtype: torch.dtype) -> None:
    check_bits(dtype, SIZES[1:4])


@ranks(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_ranks_to_the_bit(dtype: torch.dtype) -> None:
    check_bits(dtype, (63, 9001), ("mixed", "arena"))


def check_gloo(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """gloo's answers are the same every time, and the same to rounding as those through shared memory."""
    size, me = dist.get_world_size(), dist.get_rank()
    for number, numel in enumerate(sizes):
        first = results_of(kept_group("c10d"), numel, dtype, wait=number % 2 == 0, offset=number)
        assert_same_bits(results_of(kept_group("c10d"), numel, dtype, wait=number % 2 == 1, offset=number + 1), first)
        assert_same_to_rounding(first, truths_of(size, me, numel, dtype), size)


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("dtype", GLOO_DTYPES, ids=str)
def test_two_ranks_over_gloo_agree(dtype: torch.dtype) -> None:
    check_gloo(dtype, (1, 63, 17_001))


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_ranks_over_gloo_agree(dtype: torch.dtype) -> None:
    check_gloo(dtype, (17_001,))


@ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_four_ranks_over_gloo_agree(dtype: torch.dtype) -> None:
    check_gloo(dtype, (17_001,))


@ranks(8)
def test_eight_ranks_over_gloo_agree() -> None:
    check_gloo(torch.float32, (9001,))


@ranks(3, fresh=True)
def write_digests(path: Path) -> None:
    """The results of every exchange on this rank, on either transport, in a process of its own."""
    digest = hashlib.sha256()
    for transport in ("shared", "c10d"):
        for dtype in (torch.float32, torch.bfloat16):
            for tensor in results_of(kept_group(transport), 17_001, dtype, place="mixed", wait=False).values():
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
    (path / str(dist.get_rank())).write_text(digest.hexdigest())


def test_two_runs_give_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_digests(path=folder)
        runs.append([(folder / str(rank)).read_text() for rank in range(3)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 3


@ranks(3)
@pytest.mark.parametrize("without", ["futex", "compiler", "compiler on one rank", "memory without a name"])
def test_what_a_system_lacks_changes_no_bit(without: str) -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if without == "futex":
            patch.setattr("weft.comm.shared_memory.counters._find_futex", lambda: None)
        elif without == "compiler" or (without == "compiler on one rank" and me == 1):
            patch.setattr("weft.comm.shared_memory.native.find_kernels", lambda: None)
            patch.setattr("weft.comm.shared_memory.reduction.find_kernels", lambda: None)
        ways: tuple[Way, ...] = ("named",) if without == "memory without a name" else WAYS
        group = new_group("shared", f"without {without}", ways=ways)
        room = BufferAllocator(group, torch.device("cpu"), num_bytes=2**23)
        for dtype, place in ((torch.float32, "arena"), (torch.bfloat16, "mixed")):
            found = results_of((group, room), 17_001, dtype, place=place, offset=1, wait=True)
            assert_same_bits(found, truths_of(size, me, 17_001, dtype))


@pytest.mark.skipif(not NAMES.is_dir(), reason="this system does not show such names")
@ranks(2)
def test_names_are_gone_once_all_have_opened_them() -> None:
    before = set(NAMES.glob("weft-*"))
    group = new_group("shared", "names", ways=("named",))
    room = BufferAllocator(group, torch.device("cpu"), num_bytes=2**22)
    results_of((group, room), 17_001, torch.float32, place="arena", wait=False)
    dist.barrier()
    assert set(NAMES.glob("weft-*")) <= before


@ranks(2)
def test_booleans_go_everywhere() -> None:
    group, _ = kept_group("shared")
    mine, output = torch.tensor([group.index == 0, False, True]), torch.zeros(6, dtype=torch.bool)
    collectives.all_gather(output, mine, group)
    assert output.tolist() == [True, False, True, False, False, True]
    collectives.broadcast(mine, group, root=1)
    assert mine.tolist() == [False, False, True]
    collectives.all_reduce(mine, group, op="max")
    assert mine.tolist() == [False, False, True]


@ranks(3)
@pytest.mark.parametrize("in_arena", [False, True], ids=["slots", "arena"])
def test_tensors_with_gaps(in_arena: bool) -> None:
    """Every other element of some memory: those between stay what they were."""
    group, room = kept_group("shared")
    memory = room.empty(120_000, torch.float32) if in_arena else torch.empty(120_000)
    memory.fill_(7.0)
    spread = memory[::2].copy_(values(group.index, 60_000, torch.float32))
    collectives.all_reduce(spread, group)
    total = true_sum([values(rank, 60_000, torch.float32) for rank in range(3)])
    assert torch.equal(spread, total) and bool((memory[1::2] == 7.0).all())
    memory.fill_(7.0)
    collectives.reduce_scatter(memory[:40_000:2], total, group)
    part = total.view(3, -1)[group.index]
    assert torch.equal(memory[:40_000:2], part + part + part) and bool((memory[1::2] == 7.0).all())


@ranks(3)
def test_halves_sum_to_what_one_rank_would_round() -> None:
    """Two numbers that 1 would each swallow are not lost together."""
    group, _ = kept_group("shared")
    for numel in (10, 20_000, 600_000):
        mine = torch.full((numel,), 1.0 if group.index == 0 else 2**-8, dtype=torch.bfloat16)
        collectives.all_reduce(mine, group)
        assert set(mine.tolist()) == {1.0 + 2**-7}


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2, timeout_s=300)
@pytest.mark.parametrize("transport", ["shared", "c10d"])
@pytest.mark.parametrize("num_bytes", [25 * 10**6, 400 * 10**6])
def test_large_tensors_on_two_ranks(transport: str, num_bytes: int) -> None:
    check_large(transport, num_bytes)


@pytest.mark.long
@ranks(4, timeout_s=300)
@pytest.mark.parametrize("transport", ["shared", "c10d"])
def test_large_tensors_on_four_ranks(transport: str) -> None:
    check_large(transport, 100 * 10**6)


@pytest.mark.long
@ranks(8, timeout_s=300)
@pytest.mark.parametrize("transport", ["shared", "c10d"])
def test_large_tensors_on_eight_ranks(transport: str) -> None:
    check_large(transport, 40 * 10**6)


def check_large(transport: str, num_bytes: int) -> None:
    """Small whole numbers, whose sums are exact in every order; one element more or less than a round number."""
    group, _ = kept_group(transport)
    size, me = group.size, group.index
    for in_arena in (False, True) if transport == "shared" else (False,):
        numel = num_bytes // 4 - size - num_bytes // 4 % size
        room = BufferAllocator(group, torch.device("cpu"), num_bytes=num_bytes)
        mine = room.empty(numel + 1, torch.float32, shared=in_arena)[1:]
        pattern = torch.arange(numel, dtype=torch.float32) % 1000
        for wait in (True, False):
            torch.add(pattern, me, out=mine)
            collectives.all_reduce(mine, group, wait=wait).wait()
            assert torch.equal(mine, pattern * size + size * (size - 1) / 2)
            torch.add(pattern, me, out=mine)
            collectives.broadcast(mine, group, root=1, wait=wait).wait()
            assert torch.equal(mine, pattern + 1)
            part = torch.empty(numel // size)
            torch.add(pattern, me, out=mine)
            collectives.reduce_scatter(part, mine, group, wait=wait).wait()
            place = slice(me * len(part), (me + 1) * len(part))
            assert torch.equal(part, pattern[place] * size + size * (size - 1) / 2)
            mine.zero_()
            collectives.all_gather(mine, mine[place].copy_(pattern[place]), group, wait=wait).wait()
            assert torch.equal(mine, pattern)
        sent = send(mine, group, to=(me + 1) % size)
        got = torch.empty(numel)
        receive(got, group, source=(me - 1) % size).wait()
        sent.wait()
        assert torch.equal(got, pattern)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(3, timeout_s=300)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_size_on_three_ranks(dtype: torch.dtype) -> None:
    check_bits(dtype, (*SIZES, 140_001, 262_144, 350_003))


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(8, timeout_s=300)
@pytest.mark.parametrize("dtype", GLOO_DTYPES, ids=str)
def test_every_dtype_and_size_on_eight_ranks(dtype: torch.dtype) -> None:
    check_bits(dtype, SIZES)
    check_gloo(dtype, (1, 63, 17_001))
