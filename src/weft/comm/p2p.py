"""Send and receive between two ranks of a group, never blocking the host at the start.

Through shared memory and gloo every message has a tag, and no order of calls deadlocks. NCCL's rules are stricter
(`Group.is_stream_ordered`): messages have no tags and match first in, first out per group and direction, and a message
runs only after all earlier operations of its group. So a group whose ranks send *and* receive uses `exchange`, which
starts both as one operation; a group of two ranks with messages in one direction only, sent and received in the same
order, may use `send` and `receive`, and both ranks must wait for its first message (`warm_up.py`).

gloo cannot send from CUDA memory (the write fails and breaks the group), so there a message goes through host memory
on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.collectives import Pending, hide_from_modes, require_device
from weft.comm.group import Group
from weft.comm.pairwise import WaitAll
from weft.plan.partition.wire import sent_bytes


def send(tensor: torch.Tensor, group: Group, *, to: int, tag: int = 0) -> Pending:
    """Start sending to a place in the group. The tensor must not change before `wait` returns."""
    group.traffic.add(num_calls=1, sent_bytes=sent_bytes("send", tensor.nbytes, group.size))
    require_device(tensor, group)
    wire = group.wire(tensor)
    if wire is not None:
        with hide_from_modes():
            wire.mailbox.send(tensor, to=to, tag=tag)
        return Pending(None, group.traffic)
    message = tensor.cpu() if group.through_host and tensor.is_cuda else tensor.contiguous()
    if group.is_stream_ordered:
        return _start([dist.P2POp(dist.isend, message, group.ranks[to], group.handle)], group)
    return _noted(dist.isend(message, group.ranks[to], group.handle, tag), group, "send", tensor, to)


def receive(tensor: torch.Tensor, group: Group, *, source: int, tag: int = 0) -> Pending:
    """Start receiving from a place in the group. The tensor holds the message once `wait` has returned."""
    if not tensor.is_contiguous():
        raise ValueError("receive needs a contiguous tensor: the message is written straight into it")
    group.traffic.add(num_calls=1)
    require_device(tensor, group)
    wire = group.wire(tensor)
    if wire is not None:
        with hide_from_modes():
            return _noted(wire.mailbox.receive(tensor, source=source, tag=tag), group, "receive", tensor, source)
    if group.is_stream_ordered:
        return _start([dist.P2POp(dist.irecv, tensor, group.ranks[source], group.handle)], group)
    if not (group.through_host and tensor.is_cuda):
        return _noted(dist.irecv(tensor, group.ranks[source], group.handle, tag), group, "receive", tensor, source)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    work = dist.irecv(staged, group.ranks[source], group.handle, tag)
    return _noted(work, group, "receive", tensor, source, lambda: tensor.copy_(staged))


def _noted(
    work: Any,
    group: Group,
    kind: str,
    tensor: torch.Tensor,
    peer: int,
    after: Callable[[], object] | None = None,
) -> Pending:
    """A message under way, whose wait is noted for the watch over waiting ranks."""
    record = group.record
    record.begun = number = record.begun + 1
    return Pending(work, group.traffic, after, False, record, (kind, tensor.nbytes, number, (group.ranks[peer],)))


Message = tuple[torch.Tensor, int]
"""A contiguous tensor, and the index in the group of the rank that it is sent to or received from."""


def exchange(outgoing: Sequence[Message], incoming: Sequence[Message], group: Group, *, tag: int = 0) -> Pending:
    """Start messages in both directions as one operation, for ranks that send and receive at the same time: rings,
    halos.

    NCCL runs operations in order, and no rank would receive if all sent first, so there all messages are one batch.
    """
    if not group.is_stream_ordered:
        sent = [send(tensor, group, to=to, tag=tag) for tensor, to in outgoing]
        came = [receive(tensor, group, source=source, tag=tag) for tensor, source in incoming]
        return Pending(WaitAll([*sent, *came]), group.traffic)
    batch = []
    for start, messages in ((dist.isend, outgoing), (dist.irecv, incoming)):
        for tensor, peer in messages:
            require_device(tensor, group)
            batch.append(dist.P2POp(start, tensor, group.ranks[peer], group.handle))
    if not batch:
        return Pending(None, group.traffic)
    num_bytes = sum(sent_bytes("send", tensor.nbytes, group.size) for tensor, _ in outgoing)
    group.traffic.add(num_calls=len(batch), sent_bytes=num_bytes)
    return _start(batch, group)


def _start(batch: list[dist.P2POp], group: Group) -> Pending:
    """Start messages as one operation of the group's communicator.

    A single message too: outside of a batch, torch would make another communicator for the pair, unless the group was
    made with a `device_id`.
    """
    return Pending(WaitAll(dist.batch_isend_irecv(batch)), group.traffic, _waits_on_stream=group.waits_on_stream)
