"""Reduce-scatter and all-gather by direct messages between all pairs, for host tensors over gloo.

gloo's own reduce-scatter is an all-reduce in disguise, and its all-gather goes round in a ring with a copy at every
stop. Sending each rank its part directly moves the same bytes in one round, two to three times as fast on one host, and
neither needs the sender's own part to be copied out. Sums are made here. Messages win from 64 bytes on wherever ranks
have cores of their own (2 to 16 ranks were measured), so there is no size below which gloo's own calls are used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.group import Group


class Messages:
    """Sends and receives under way, waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_all_gather(output: torch.Tensor, tensor: torch.Tensor, group: Group) -> Messages:
    """Begin to bring all ranks' tensors together in `output`; `tensor` may be this rank's place in it."""
    parts = output.view(group.size, -1)
    messages = _exchange(list(parts), [tensor] * group.size, group)
    if parts[group.index].data_ptr() != tensor.data_ptr():
        parts[group.index].copy_(tensor.view(-1))
    return messages


def start_reduce_scatter(tensor: torch.Tensor, received: torch.Tensor, group: Group) -> Messages:
    """Begin to bring the other ranks' versions of this rank's part of `tensor` to the rows of `received`."""
    parts = tensor.view(group.size, -1)
    rows = received[: (group.size - 1) * parts.shape[1]].view(group.size - 1, -1)
    # No row for this rank itself; the place that stands for it is never received into.
    places = [
        parts[index] if index == group.index else rows[index - (index > group.index)] for index in range(len(parts))
    ]
    return _exchange(places, list(parts), group)


def add_up(output: torch.Tensor, own: torch.Tensor, received: torch.Tensor, group: Group, *, add: bool) -> None:
    """`output` ends as (or grows by) this rank's own part and those received, added in the finer of the two dtypes."""
    rows = received[: (group.size - 1) * own.numel()].view(group.size - 1, -1)
    if torch.promote_types(output.dtype, own.dtype) != output.dtype:  # messages are finer: round once, at the end
        total = rows[0].add_(own)
        for row in rows[1:]:
            total.add_(row)
        if add:
            output.add_(total)
        else:
            output.copy_(total)
        return
    first = 0
    if add:
        output.add_(own)
    elif output.dtype == own.dtype:
        torch.add(own, rows[0], out=output)
        first = 1
    else:
        output.copy_(own)
    for row in rows[first:]:
        output.add_(row)


def _exchange(places: list[torch.Tensor], messages: list[torch.Tensor], group: Group) -> Messages:
    """Send message k to rank k and receive into place k from it, for every other rank, nearest neighbours first."""
    works = []
    for distance in range(1, group.size):
        source, target = (group.index - distance) % group.size, (group.index + distance) % group.size
        works.append(dist.irecv(places[source], group.ranks[source], group.handle))
        works.append(dist.isend(messages[target], group.ranks[target], group.handle))
    assert all(works)
    return Messages(works)  # type: ignore[arg-type]
