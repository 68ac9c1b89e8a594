"""Send and receive between two ranks of a group; never blocking at the start, so that no order of calls deadlocks.

gloo cannot send from CUDA memory (the write fails and breaks the group), so there a message goes through host memory
on both sides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.collectives import Pending, hide_from_modes
from weft.comm.group import Group
from weft.comm.pairwise import WaitAll
from weft.plan.partition.wire import sent_bytes


def send(tensor: torch.Tensor, group: Group, *, to: int, tag: int = 0) -> Pending:
    """Start sending to a place in the group. The tensor must not change before `wait` returns."""
    group.traffic.add(num_calls=1, sent_bytes=sent_bytes("send", tensor.nbytes, group.size))
    wire = group.wire(tensor)
    if wire is not None:
        with hide_from_modes():
            wire.mailbox.send(tensor, to=to, tag=tag)
        return Pending(None, group.traffic)
    message = tensor.cpu() if group.through_host and tensor.is_cuda else tensor.contiguous()
    return Pending(dist.isend(message, group.ranks[to], group.handle, tag), group.traffic)


def receive(tensor: torch.Tensor, group: Group, *, source: int, tag: int = 0) -> Pending:
    """Start receiving from a place in the group. The tensor holds the message once `wait` has returned."""
    if not tensor.is_contiguous():
        raise ValueError("receive needs a contiguous tensor: the message is written straight into it")
    group.traffic.add(num_calls=1)
    wire = group.wire(tensor)
    if wire is not None:
        with hide_from_modes():
            return Pending(wire.mailbox.receive(tensor, source=source, tag=tag), group.traffic)
    if not (group.through_host and tensor.is_cuda):
        return Pending(dist.irecv(tensor, group.ranks[source], group.handle, tag), group.traffic)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    work = dist.irecv(staged, group.ranks[source], group.handle, tag)
    return Pending(work, group.traffic, lambda: tensor.copy_(staged))


def exchange(
    outgoing: torch.Tensor, incoming: torch.Tensor, group: Group, *, to: int, source: int, tag: int = 0
) -> WaitAll:
    """Start a send and a receive as one, for rings, where every rank does both at every step; both are contiguous."""
    if outgoing.device.type == "cpu" or group.through_host:
        sent = send(outgoing, group, to=to, tag=tag)
        return WaitAll([sent, receive(incoming, group, source=source, tag=tag)])
    # NCCL runs what it is given in order: if every rank's send came before its receive, all would wait for ever.
    group.traffic.add(num_calls=2, sent_bytes=sent_bytes("send", outgoing.nbytes, group.size))
    both = [
        dist.P2POp(dist.isend, outgoing, group.ranks[to], group.handle, tag),
        dist.P2POp(dist.irecv, incoming, group.ranks[source], group.handle, tag),
    ]
    return WaitAll([Pending(work, group.traffic) for work in dist.batch_isend_irecv(both)])
