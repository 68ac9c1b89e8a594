"""Every exchange on every transport against its meaning computed directly, and the bytes it counts, to the byte."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from oracle import data_plan
from ranks import ranks
from torch import Tensor

from weft.comm import collectives
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.comm.p2p import receive, send
from weft.mesh import Mesh, make_mesh
from weft.plan.partition.wire import Collective, sent_bytes
from weft.world import World, join_world

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
both_transports = pytest.mark.parametrize("transport", ["shared", "c10d"])


@functools.cache
def mesh(transport: str) -> Mesh:
    """Made once per rank: the pool keeps groups, and their threads, for the whole run."""
    keys = [("data", purpose) for purpose in ("test", "ring", "control", "background")]
    return make_mesh(
        data_plan(dist.get_world_size(), transport=transport), join_world("cpu"), groups=[("world", "control"), *keys]
    )


def group_on(transport: str) -> Group:
    group = mesh(transport).group("data", "test")
    assert (group.shared is not None) == (transport == "shared")
    return group


def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in every dtype."""
    return ((torch.arange(numel) * 3 + rank * 5) % 11).to(dtype)


def everyones(numel: int, dtype: torch.dtype, size: int) -> Tensor:
    return torch.stack([tensor_of(rank, numel, dtype) for rank in range(size)])


@contextmanager
def counted(group: Group, collective: Collective, buffer_bytes: int) -> Iterator[None]:
    """The body makes one exchange, and exactly what wire.py says is counted; nothing in a group of one."""
    calls, sent = group.traffic.num_calls, group.traffic.sent_bytes
    yield
    assert group.traffic.num_calls - calls == (group.size > 1)
    assert group.traffic.sent_bytes - sent == sent_bytes(collective, buffer_bytes, group.size)


def check_all_reduce(group: Group, wait: bool) -> None:
    for dtype in DTYPES:
        table = everyones(13, dtype, group.size)
        for op, true in (("sum", table.sum(0).to(dtype)), ("max", table.amax(0)), ("min", table.amin(0))):
            mine = tensor_of(group.index, 13, dtype)
            with counted(group, "all-reduce", 13 * mine.element_size()):
                collectives.all_reduce(mine, group, op=op, wait=wait).wait()  # type: ignore[arg-type]
            assert torch.equal(mine, true)


def check_broadcast(group: Group, wait: bool) -> None:
    for root in range(group.size):
        mine = tensor_of(group.index, 7, torch.float32)
        with counted(group, "broadcast", 28):
            collectives.broadcast(mine, group, root=root, wait=wait).wait()
        assert torch.equal(mine, tensor_of(root, 7, torch.float32))


def check_all_gather(group: Group, wait: bool) -> None:
    for dtype in DTYPES:
        mine, output = tensor_of(group.index, 5, dtype), torch.empty(5 * group.size, dtype=dtype)
        with counted(group, "all-gather", output.nbytes):
            collectives.all_gather(output, mine, group, wait=wait).wait()
        assert torch.equal(output, everyones(5, dtype, group.size).flatten())


def check_reduce_scatter(group: Group, wait: bool) -> None:
    whole, output = tensor_of(group.index, 3 * group.size, torch.float32), torch.empty(3)
    with counted(group, "reduce-scatter", whole.nbytes):
        collectives.reduce_scatter(output, whole, group, wait=wait).wait()
    total = everyones(3 * group.size, torch.float32, group.size).sum(0)
    assert torch.equal(output, total[3 * group.index : 3 * group.index + 3])
    assert torch.equal(whole, tensor_of(group.index, 3 * group.size, torch.float32)), "the input was changed"


def check_all_to_all(group: Group, wait: bool) -> None:
    mine, output = tensor_of(group.index, 2 * group.size, torch.float32), torch.empty(2 * group.size)
    with counted(group, "all-to-all", mine.nbytes):
        collectives.all_to_all(output, mine, group, wait=wait).wait()
    rows = everyones(2 * group.size, torch.float32, group.size)
    assert torch.equal(output, rows[:, 2 * group.index : 2 * group.index + 2].flatten())


def check_nothing(group: Group, wait: bool) -> None:
    """Tensors without elements go through every exchange like others."""
    for exchange in (collectives.all_reduce, collectives.broadcast):
        exchange(torch.empty(0), group, wait=wait).wait()
    for exchange in (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all):
        output = torch.empty(0)
        exchange(output, torch.empty(0), group, wait=wait).wait()
        assert output.numel() == 0


def check_uneven_all_to_all(group: Group, wait: bool) -> None:
    """Rank r sends k elements to rank k, none to rank 0: so it receives r from each."""
    splits = list(range(group.size))
    mine = tensor_of(group.index, sum(splits), torch.float32)
    output = torch.empty(group.index * group.size)
    before = group.traffic.sent_bytes
    collectives.all_to_all(
        output, mine, group, output_splits=[group.index] * group.size, input_splits=splits, wait=wait
    ).wait()
    assert group.traffic.sent_bytes - before == (sum(splits) - group.index) * mine.element_size(), "but for its own"
    start = sum(splits[: group.index])
    rows = everyones(sum(splits), torch.float32, group.size)
    assert torch.equal(output, rows[:, start : start + group.index].flatten())


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_all_reduce,
        check_broadcast,
        check_all_gather,
        check_reduce_scatter,
        check_all_to_all,
        check_uneven_all_to_all,
        check_nothing,
    )
}


@ranks(2)
def on_2(name: str, wait: bool, transport: str) -> None:
    CHECKS[name](group_on(transport), wait)


@ranks(3)
def on_3(name: str, wait: bool, transport: str) -> None:
    CHECKS[name](group_on(transport), wait)


@ranks(4)
def on_4(name: str, wait: bool, transport: str) -> None:
    CHECKS[name](group_on(transport), wait)


@pytest.mark.sampled(12)
@both_transports
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "pending"])
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("on_ranks", [on_2, on_3, on_4], ids=lambda body: body.__name__)
def test_collective(on_ranks, name: str, wait: bool, transport: str) -> None:
    on_ranks(name=name, wait=wait, transport=transport)


@pytest.mark.parametrize("name", CHECKS)
def test_a_group_of_one_needs_no_process_group(name: str) -> None:
    assert not dist.is_initialized()
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    alone = make_mesh(data_plan(1), world).group("data", "test")
    assert alone.handle is None and alone.size == 1
    CHECKS[name](alone, True)


def test_a_group_of_one_takes_transposed_tensors() -> None:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    alone = make_mesh(data_plan(1), world).group("data", "test")
    turned, output = torch.arange(6.0).view(2, 3).t(), torch.empty(6)
    collectives.all_gather(output, turned, alone)
    assert torch.equal(output, turned.flatten())
    output.zero_()
    collectives.reduce_scatter(output, turned, alone)
    assert torch.equal(output, turned.flatten())


@ranks(4)
@both_transports
def test_groups_of_a_mesh_are_separate(transport: str) -> None:
    """Every rank of the run in one group, counted apart from the data axis."""
    everyone, along_data = mesh(transport).everyone("control"), group_on(transport)
    assert everyone.ranks == (0, 1, 2, 3) and everyone.handle is not along_data.handle
    assert everyone.shared is None or everyone.shared is not along_data.shared
    assert mesh(transport).everyone("control") is everyone
    before = along_data.traffic.sent_bytes
    check_all_reduce(everyone, True)
    assert along_data.traffic.sent_bytes == before and mesh(transport).traffic["world"].sent_bytes > 0


@ranks(3)
@both_transports
def test_send_and_receive_round_a_ring(transport: str) -> None:
    """Everybody sends first, in both directions; a blocking send would deadlock."""
    ring = mesh(transport).group("data", "ring")
    after, before = (ring.index + 1) % 3, (ring.index - 1) % 3
    sent = ring.traffic.sent_bytes
    message, fromleft, fromright = tensor_of(ring.index, 9, torch.float32), torch.empty(9), torch.empty(9)
    pending = [send(message, ring, to=after, tag=1), send(message * 2, ring, to=before, tag=2)]
    pending += [receive(fromright, ring, source=after, tag=2), receive(fromleft, ring, source=before, tag=1)]
    for exchange in pending:
        exchange.wait()
        exchange.wait()  # waiting again is harmless
    assert torch.equal(fromleft, tensor_of(before, 9, torch.float32))
    assert torch.equal(fromright, tensor_of(after, 9, torch.float32) * 2)
    assert ring.traffic.sent_bytes - sent == 2 * sent_bytes("send", 36, 3) == 72


@ranks(2)
@both_transports
def test_send_takes_any_tensor_and_receive_only_a_contiguous_one(transport: str) -> None:
    pair = mesh(transport).group("data", "ring")
    turned, got = torch.arange(6.0).view(2, 3).t(), torch.empty(3, 2)
    if pair.index == 0:
        send(turned, pair, to=1).wait()
    else:
        receive(got, pair, source=0).wait()
        assert torch.equal(got, turned)
    with pytest.raises(ValueError, match="contiguous"):
        receive(torch.empty(3, 2).t(), pair, source=0)


@ranks(3)
@both_transports
def test_values_of_any_length_are_gathered(transport: str) -> None:
    control = mesh(transport).group("data", "control")
    mine = {"rank": control.index, "text": "ä" * control.index, "list": [None, 1.5, float("inf")] * control.index}
    found = gather_values(mine, control)
    assert [value["rank"] for value in found] == [0, 1, 2]
    assert found[control.index] == mine and found[2]["text"] == "ää"


@ranks(2)
@both_transports
def test_two_threads_with_a_group_each(transport: str) -> None:
    """Both exchange along one axis at once: the answers are right and no byte is lost in counting."""
    rounds, groups = 150, (group_on(transport), mesh(transport).group("data", "background"))
    traffic, wrong = mesh(transport).traffic["data"], []
    before, calls = traffic.sent_bytes, traffic.num_calls

    def exchange(group: Group, numel: int) -> None:
        for number in range(rounds):
            tensor = torch.full((numel,), float(group.index + number))
            collectives.all_reduce(tensor, group)
            if tensor.tolist() != [2.0 * number + 1] * numel:
                wrong.append((numel, number))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=exchange, args=(group, 8 * (k + 1))) for k, group in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert traffic.num_calls - calls == 2 * rounds
    assert traffic.sent_bytes - before == rounds * (sent_bytes("all-reduce", 32, 2) + sent_bytes("all-reduce", 64, 2))
