"""Flat buffers for gradients: many tensors are exchanged as a few, and each is a view into one of them.

The last member is the tail (`plan/partition/wire.py`): the loss, the count of targets, the compute time of each rank
and the flags of used parameters, which go with the gradients instead of costing a collective of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.plan.partition.wire import CODED, Member, assign_buckets, coded_member, tail_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Flat buffers in the order of exchange, and each tensor's place in them."""

    buckets: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]
    """Each given tensor's part of a bucket, in its shape and, where possible, its strides."""
    bucket_of: tuple[int, ...]
    """Each given tensor's bucket."""
    tail: torch.Tensor
    """The end of the last bucket."""


def member_of(tensor: torch.Tensor) -> Member:
    return Member(numel=tensor.numel(), item_bytes=tensor.element_size(), kind=str(tensor.dtype))


def bucket_memory_bytes(tensors: Sequence[torch.Tensor], *, num_ranks: int, extra_words: int = 0) -> int:
    """Bytes that buckets of tensors like these take, in whatever order they are filled."""
    tail = tail_of([member_of(tensor) for tensor in tensors], num_ranks=num_ranks, extra_words=extra_words)
    tail_bytes = 8 * tail.numel  # at the widest
    return tail_bytes + bytes_for([tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors])


def make_buckets(
    tensors: Sequence[torch.Tensor],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    num_ranks: int,
    allocator: BufferAllocator,
    coded: Collection[int] = (),
    extra_words: int = 0,
) -> Buckets:
    """Allocate buckets for tensors like these, filled in the given order (the order in which gradients get ready), and
    exchanged by `num_ranks`. Those of `coded` are compressed: they share no bucket with others, and are not sent from
    where they lie. `extra_words`: at the end of the tail."""
    members = [member_of(tensors[index]) for index in order]
    members.append(tail_of(members, num_ranks=num_ranks, extra_words=extra_words))
    members = [
        coded_member(member) if place < len(order) and order[place] in coded else member
        for place, member in enumerate(members)
    ]
    dtypes = {str(tensor.dtype): tensor.dtype for tensor in tensors}
    flats: list[torch.Tensor] = []
    places: dict[int, tuple[int, torch.Tensor]] = {}
    for number, inside in enumerate(assign_buckets(members, bucket_bytes)):
        numels = [members[position].numel for position in inside]
        kind = members[inside[0]].kind
        dtype = dtypes.get(kind.removeprefix(CODED), torch.float32)  # a tail wider than every gradient is float32
        flats.append(allocator.empty(sum(numels), dtype, shared=not kind.startswith(CODED)).zero_())
        for position, part in zip(inside, flats[-1].split(numels), strict=True):
            places[position] = (number, part)
    position_of = {index: position for position, index in enumerate(order)}
    return Buckets(
        buckets=tuple(flats),
        views=tuple(_view_like(places[position_of[i]][1], tensor) for i, tensor in enumerate(tensors)),
        bucket_of=tuple(places[position_of[i]][0] for i in range(len(tensors))),
        tail=places[len(order)][1],
    )


def _view_like(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    # Fused optimizers read a gradient in the parameter's memory order without looking at its strides.
    dense = torch.empty_like(tensor, device="meta")  # has the tensor's strides only where these leave no gaps
    return part.as_strided(tensor.shape, dense.stride(), part.storage_offset())
