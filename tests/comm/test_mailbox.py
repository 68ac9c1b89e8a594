"""Messages through shared memory: in the order of their tag, never waiting for the receiver, whatever is in the way."""

from __future__ import annotations

import os
import resource

import pytest
import torch
import torch.distributed as dist
from exchanges import kept_group, new_group, values
from ranks import ranks

from weft.comm.p2p import receive, send
from weft.comm.shared_memory.mailbox import NUM_ENVELOPES

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
both = pytest.mark.parametrize("transport", ["shared", "c10d"])


@ranks(2)
@both
def test_messages_of_many_tags_are_taken_in_any_order(transport: str) -> None:
    group, _ = kept_group(transport)
    other, order = 1 - group.index, [3, 0, 2, 1, 4]
    sent = [send(values(group.index, 100 + tag, torch.float32, tag), group, to=other, tag=tag) for tag in range(5)]
    sent += [send(values(group.index, 200 + tag, torch.float32, tag), group, to=other, tag=tag) for tag in range(5)]
    for first in (100, 200):
        for tag in order:
            got = torch.empty(first + tag)
            receive(got, group, source=other, tag=tag).wait()
            assert torch.equal(got, values(other, first + tag, torch.float32, tag))
    for exchange in sent:
        exchange.wait()


@ranks(2)
@both
def test_receipts_are_waited_for_in_any_order(transport: str) -> None:
    """What is awaited first gets the first message of its tag, whichever is waited for first."""
    group, _ = kept_group(transport)
    other = 1 - group.index
    got = [torch.empty(10 + number) for number in range(6)]
    awaited = [receive(tensor, group, source=other, tag=number % 2) for number, tensor in enumerate(got)]
    sent = [send(values(group.index, 10 + k, torch.float32, k), group, to=other, tag=k % 2) for k in range(6)]
    for number in (5, 0, 3, 4, 1, 2):
        awaited[number].wait()
        awaited[number].wait()
        assert torch.equal(got[number], values(other, 10 + number, torch.float32, number))
    for exchange in sent:
        exchange.wait()


@ranks(3)
@both
def test_every_size_and_dtype_between_all_pairs(transport: str) -> None:
    group, _ = kept_group(transport)
    me, others = group.index, [rank for rank in range(3) if rank != group.index]
    for dtype in DTYPES if transport == "shared" else DTYPES[:4]:
        for numel in (0, 1, 7, 20_001) if transport == "shared" else (1, 20_001):
            sent = [send(values(me, numel, dtype, other), group, to=other) for other in others]
            for other in others:
                got = torch.zeros(numel, dtype=dtype)
                receive(got, group, source=other).wait()
                assert torch.equal(got, values(other, numel, dtype, me))
            for exchange in sent:
                exchange.wait()


@ranks(2)
def test_a_sent_tensor_may_change_at_once_and_have_any_strides() -> None:
    group, _ = kept_group("shared")
    other, given = 1 - group.index, torch.arange(12.0).view(3, 4)
    turned = given.t()
    send(turned, group, to=other)
    send(given[:, ::2], group, to=other)
    send(torch.tensor(5.0), group, to=other)
    given.zero_()
    got, halves, scalar = torch.empty(4, 3), torch.empty(3, 2), torch.tensor(0.0)
    for tensor in (got, halves, scalar):
        receive(tensor, group, source=other).wait()
    true = torch.arange(12.0).view(3, 4)
    assert torch.equal(got, true.t()) and torch.equal(halves, true[:, ::2]) and scalar == 5.0


@ranks(2)
def test_messages_come_round_the_ring_of_envelopes() -> None:
    """Many more than there are envelopes, some left lying for long; and their memory is used again."""
    group = new_group("shared", "ring")
    other = 1 - group.index
    send(torch.tensor([-1]), group, to=other, tag=9)
    got, laid = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    for number in range(2 * NUM_ENVELOPES + 3):
        if number == NUM_ENVELOPES - 2:
            receive(laid, group, source=other, tag=9).wait()
        send(torch.tensor([number]), group, to=other)
        receive(got, group, source=other).wait()
        assert got.item() == number
    assert laid.item() == -1
    assert len(group.shared.mailbox._outgoing[other]._blocks) <= 4  # type: ignore[union-attr]


@ranks(2, fresh=True)
def test_unread_messages_fit_the_usual_limit_of_open_files() -> None:
    group = new_group("shared", "files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    other = 1 - group.index
    for number in range(NUM_ENVELOPES):
        send(torch.tensor([number]), group, to=other)
    dist.barrier()
    got = torch.empty(1, dtype=torch.int64)
    for number in range(NUM_ENVELOPES):
        receive(got, group, source=other).wait()
        assert got.item() == number
    dist.barrier()
    send(torch.tensor([0]), group, to=other)  # it looks which are free again
    receive(got, group, source=other).wait()
    assert len(os.listdir("/proc/self/fd")) < 200, "descriptors of messages that were read long ago"


@ranks(2, fresh=True)
def test_a_message_of_another_size_is_an_error_and_the_next_one_arrives() -> None:
    group = new_group("shared", "size")
    if group.index == 0:
        send(torch.ones(10), group, to=1)
        dist.barrier()
        send(torch.ones(3), group, to=1)  # in the memory of the first, which nobody has ever opened
        dist.barrier()
        return
    with pytest.raises(RuntimeError, match="sent 40 bytes with tag 0, 16 were awaited"):
        receive(torch.empty(4), group, source=0).wait()
    dist.barrier()
    got = torch.empty(3)
    receive(got, group, source=0).wait()
    assert got.tolist() == [1.0, 1.0, 1.0]
    dist.barrier()
