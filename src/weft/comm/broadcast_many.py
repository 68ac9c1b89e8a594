"""Many tensors of a group's first rank sent to the others as a few: a collective costs more than a small tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from weft.comm.buckets import member_of
from weft.comm.collectives import broadcast
from weft.comm.group import Group
from weft.plan.partition.wire import Member, assign_buckets

_BUCKET_BYTES = 1 << 20
"""Tensors up to this many bytes are sent together; larger ones alone, without a copy where they are contiguous."""


def copy_from_first(tensors: Sequence[torch.Tensor], groups: Sequence[Group]) -> None:
    """Every rank starts from the first one's values, whatever its own random state was.

    They go from the first rank of each group to its others, one group after the other (`Mesh.axis_groups`).
    """
    for bucket in assign_buckets([member_of(tensor) for tensor in tensors], _BUCKET_BYTES, first_bytes=_BUCKET_BYTES):
        together = [tensors[index].detach() for index in bucket]
        is_flat = len(together) == 1 and together[0].is_contiguous()
        flat = together[0] if is_flat else torch.cat([tensor.reshape(-1) for tensor in together])
        for group in groups:
            broadcast(flat, group)
        if not is_flat:
            for tensor, part in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def float64_of_first(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Group
) -> Iterator[torch.Tensor]:
    """The first rank's tensors in float64, in their order, on the group's device; others give none.

    Few are in memory at a time. `shapes` are those of the tensors, the same on every rank.
    """
    members = [Member(numel=math.prod(shape), item_bytes=8, kind="float64") for shape in shapes]
    for bucket in assign_buckets(members, _BUCKET_BYTES, first_bytes=_BUCKET_BYTES):
        numels = [members[index].numel for index in bucket]
        flat = torch.empty(sum(numels), dtype=torch.float64, device=group.device)
        parts = flat.split(numels)
        if group.index == 0:
            for index, part in zip(bucket, parts, strict=True):
                part.copy_(tensors[index].detach().reshape(-1))
        broadcast(flat, group)
        for index, part in zip(bucket, parts, strict=True):
            yield part.view(tuple(shapes[index]))
