"""The strict stand-in for NCCL names every planted fault, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from strict_nccl.calls import StrictError
from strict_nccl.mode import StrictMode
from strict_nccl.world import strict_world
from test_strict_nccl import strict_group, tensor_of, zeros
from torch import Tensor

QUICK = StrictMode(stall_s=0.5)
QUICK_EAGER = StrictMode(is_eager=True, stall_s=0.5)


@contextmanager
def refused(*words: str, mode: StrictMode = QUICK) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """The body breaks a rule, and this rank is told so in these words."""
    with pytest.raises(StrictError) as caught, strict_world(mode):
        yield dist.get_rank(), strict_group()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def fails(
    *words: str, mode: StrictMode = QUICK
) -> Callable[[Callable[[int, dist.ProcessGroup], None]], Callable[[], None]]:
    """The body breaks a rule, and every rank is told so in these words."""

    def decorate(body: Callable[[int, dist.ProcessGroup], None]) -> Callable[[], None]:
        def on_rank() -> None:
            with refused(*words, mode=mode) as (rank, group):
                body(rank, group)

        on_rank.__name__ = on_rank.__qualname__ = body.__name__
        on_rank.__module__ = body.__module__
        return ranks(2)(on_rank)

    return decorate


def sum_of(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


@fails("never waited for: all_reduce(sum, 4 float32) on 'test' (test_strict_nccl_faults.py")
def test_a_missing_wait(rank: int, group: dist.ProcessGroup) -> None:
    tensor = tensor_of(rank, 4)
    sum_of(tensor, group)
    time.sleep(0.1)
    assert tensor.isnan().all()  # long over, and still not to be seen


@fails(
    "ranks called different operations",
    "rank 0: all_reduce(sum, 4 float32) on 'test'",
    "rank 1: broadcast(from rank 0, 4 float32) on 'test'",
)
def test_a_swapped_order(rank: int, group: dist.ProcessGroup) -> None:
    tensor = tensor_of(rank, 4)
    calls = [lambda: dist.all_reduce(tensor, group=group), lambda: dist.broadcast(tensor, 0, group)]
    for call in calls if rank == 0 else reversed(calls):
        call()


@fails("rank 0: all_reduce(sum, 4 float32)", "rank 1: all_reduce(sum, 4 float64)")
def test_another_dtype(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(zeros(4, [torch.float32, torch.float64][rank]), group=group)


@fails("rank 0: all_reduce(max, 4 float32)", "rank 1: all_reduce(sum, 4 float32)")
def test_another_reduction(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(zeros(4), [dist.ReduceOp.MAX, dist.ReduceOp.SUM][rank], group)


@fails("rank 0: all_to_all(sends [1, 2] rows, receives [1, 1]", "rank 1: all_to_all(sends [2, 1] rows, receives [2, 1]")
def test_parts_of_another_size(rank: int, group: dist.ProcessGroup) -> None:
    received, given = ([1, 1], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    dist.all_to_all_single(zeros(sum(received)), zeros(3), received, given, group)


@fails(
    "rank 0 waits for send to rank 1, 4 float32 on 'test'",
    "the first message of this direction, which blocks the host until rank 1 comes",
    "rank 1 has left; its last call was none at all",
)
def test_a_one_sided_opening(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.isend(zeros(4), 1, group)


@fails(
    "rank 0 waits for receive from rank 1, 9 float32 on 'other'",
    "rank 1 waits for send to rank 0, 4 float32 on 'test'",
    "the first message of this direction, which blocks the host until rank 0 comes",
)
def test_only_one_direction_was_opened(rank: int, group: dist.ProcessGroup) -> None:
    """A stage that sends its first gradient back blocks, and never comes to what the other waits for."""
    other = strict_group(name="other")
    dist.isend(zeros(4), 1, group).wait() if rank == 0 else dist.irecv(zeros(4), 0, group).wait()
    if rank == 0:
        dist.irecv(zeros(9), 1, other)
    else:
        dist.isend(zeros(4), 0, group)


@ranks(2)
@pytest.mark.parametrize("maker", ["torch.tensor([1.0])", "torch.zeros(4)[:2]", "torch.ones(2, device='cpu').cpu()"])
def test_a_tensor_of_the_host(maker: str) -> None:
    with refused("would lie in host memory", "made without a device at <string>:1 < test_strict_nccl_faults.py") as (
        rank,
        group,
    ):
        tensor = eval(maker)
        dist.all_reduce(tensor.to("cpu"), group=group)
        dist.all_reduce(tensor, group=group)


@ranks(2)
def test_tensors_of_the_device() -> None:
    with strict_world():
        group, layer = strict_group(), torch.nn.Linear(2, 2).to("cpu")
        layer(torch.ones(1, 2)).sum().backward()
        host = torch.zeros(2)
        with torch.device("cpu"):
            placed = torch.zeros(2)
        assert layer.weight.grad is not None
        made = [host.to("cpu"), torch.empty_like(host), host * 2, host.new_zeros(2), placed]
        for tensor in [layer.weight.data, layer.weight.grad, *made]:
            dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)


@fails("the memory of an output was freed or resized before wait, from 16 to 0 bytes: all_reduce")
def test_a_buffer_freed_before_wait(rank: int, group: dist.ProcessGroup) -> None:
    tensor = tensor_of(rank, 4)
    work = sum_of(tensor, group)
    tensor.untyped_storage().resize_(0)
    work.wait()


@fails("message 0 -> 1: ranks called different", "rank 0: send to rank 1, 5 float32", "rank 1: receive from rank 0, 4")
def test_a_stale_receive(rank: int, group: dist.ProcessGroup) -> None:
    """A receive that a failed step left behind takes the next step's message."""
    dist.isend(zeros(4), 1, group).wait() if rank == 0 else dist.irecv(zeros(4), 0, group).wait()
    if rank == 1:
        dist.irecv(zeros(4), 0, group)
        dist.irecv(zeros(5), 0, group).wait()
    else:
        dist.isend(zeros(5), 1, group).wait()


@fails("rank 1 waits for receive from rank 0, 4 float32", "for which rank 0 has called no send")
def test_a_stale_receive_of_the_same_size(rank: int, group: dist.ProcessGroup) -> None:
    dist.isend(zeros(4), 1, group).wait() if rank == 0 else dist.irecv(zeros(4), 0, group).wait()
    if rank == 1:
        stale, expected = zeros(4), zeros(4)
        works = [dist.irecv(one, 0, group) for one in (stale, expected)]
        works[0].wait()
        assert stale.tolist() == [1.0] * 4
        works[1].wait()
    else:
        dist.isend(torch.ones(4, device="cpu"), 1, group).wait()


@fails("an input was changed between the call and wait: broadcast(from rank 0, 4 float32)")
def test_a_touched_input(rank: int, group: dist.ProcessGroup) -> None:
    tensor = tensor_of(rank, 4)
    work = dist.broadcast(tensor, 0, group, async_op=True)
    assert work is not None
    if rank == 0:
        tensor[2] += 1
    work.wait()
    dist.barrier(group)


@fails("an output was changed between the call and wait: all_reduce")
def test_a_touched_output(rank: int, group: dist.ProcessGroup) -> None:
    tensor = tensor_of(rank, 4)
    work = sum_of(tensor, group)
    tensor.zero_()
    work.wait()


@fails("uses memory of an operation that was not waited for: all_reduce(sum, 4 float32) on 'test'")
def test_a_result_sent_on_without_a_wait(rank: int, group: dist.ProcessGroup) -> None:
    other, tensor = strict_group(name="other"), tensor_of(rank, 4)
    sum_of(tensor, group)
    sum_of(tensor, other)


@fails(
    "nothing has moved for",
    "rank 0 waits for send to rank 1, 4 float32 on 'test'",
    "rank 1 waits for send to rank 0, 4 float32 on 'test'",
    "for which rank 0 has called no receive",
    mode=QUICK_EAGER,
)
def test_both_sides_send_first(rank: int, group: dist.ProcessGroup) -> None:
    other, incoming = 1 - rank, zeros(4)
    both = [dist.P2POp(dist.isend, zeros(4), other, group), dist.P2POp(dist.irecv, incoming, other, group)]
    dist.batch_isend_irecv(both)[0].wait()  # so that both directions are open
    dist.isend(zeros(4), other, group).wait()
    dist.irecv(incoming, other, group).wait()


def use_two_streams(rank: int, group: dist.ProcessGroup) -> None:
    """Right only where communicators are independent: one rank sends last, the other receives first."""
    other, tensor, message = strict_group(name="other"), tensor_of(rank, 4), zeros(4)
    dist.barrier(other)
    dist.isend(message, 1, group).wait() if rank == 0 else dist.irecv(message, 0, group).wait()
    if rank == 0:
        works = [sum_of(tensor, other), dist.isend(message, 1, group)]
    else:
        works = [dist.irecv(message, 0, group), sum_of(tensor, other)]
    for work in works:
        work.wait()


@ranks(2)
def test_communicators_are_independent() -> None:
    with strict_world(QUICK):
        use_two_streams(dist.get_rank(), strict_group())


@fails(
    "rank 0 waits for all_reduce(sum, 4 float32) on 'other'",
    "rank 1 waits for receive from rank 0, 4 float32 on 'test'",
    mode=StrictMode(one_stream=True, stall_s=0.5),
)
def test_communicators_in_one_stream(rank: int, group: dist.ProcessGroup) -> None:
    use_two_streams(rank, group)


@ranks(2)
def test_an_error_of_one_rank_reaches_the_others() -> None:
    with pytest.raises((StrictError, ZeroDivisionError)) as caught, strict_world():
        group = strict_group()
        if dist.get_rank() == 1:
            raise ZeroDivisionError("planted")
        dist.all_reduce(zeros(4), group=group)
    assert "planted" in str(caught.value)


@fails("rank 0 waits for send to rank 1, 5 float32 on 'test'", "for which rank 1 has called no receive", "1 has left")
def test_a_send_that_nobody_receives(rank: int, group: dist.ProcessGroup) -> None:
    dist.isend(zeros(4), 1, group).wait() if rank == 0 else dist.irecv(zeros(4), 0, group).wait()
    if rank == 0:
        dist.isend(zeros(5), 1, group)
