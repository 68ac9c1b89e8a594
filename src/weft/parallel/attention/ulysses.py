"""Ulysses: two all-to-alls around attention, from some tokens of all heads to all tokens of some heads and back.

    rank 0: tokens 0-3, heads a b c d          rank 0: tokens 0-7, heads a b
    rank 1: tokens 4-7, heads a b c d   ──>    rank 1: tokens 4-7 and 0-3, in order, heads c d

Queries, keys and values are one message. It is packed so that all tokens arrive in order and kernels use them in place;
the message back is packed so that heads arrive in order. Ranks may have different numbers of heads, and where there are
fewer key heads than ranks, several ranks have the same and their gradients are summed.

Dims: B samples, H query heads, G key heads, T tokens of one rank, U·T those of all; D and E entries of a key and value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.collectives import all_to_all
from weft.comm.group import Group
from weft.plan.partition.tensor import Range

Shared = tuple[Tensor, tuple[Range, ...]]
"""A tensor of heads, and each rank's range of them."""


def to_heads(tensors: Sequence[Shared], group: Group) -> tuple[Tensor, list[Tensor]]:
    """From this rank's tokens of all heads, [B, heads, T, X] each, to all tokens of its heads, [B, heads, U·T, X].

    Returns the received message and these views of it.
    """
    batch, _, tokens, _ = tensors[0][0].shape
    widths = [one.shape[-1] for one, _ in tensors]
    rows = [
        [(stop - start) * width for (start, stop), width in zip(ranges, widths, strict=True)]
        for ranges in zip(*(ranges for _, ranges in tensors), strict=True)
    ]
    lengths = [tokens * batch * sum(row) for row in rows]
    outgoing = tensors[0][0].new_empty(sum(lengths))
    for rank, part in enumerate(outgoing.split(lengths)):
        columns = part.view(tokens, batch, -1).split(rows[rank], -1)
        for (one, ranges), column in zip(tensors, columns, strict=True):
            start, stop = ranges[rank]
            column.unflatten(-1, (stop - start, -1)).copy_(one[:, start:stop].permute(2, 0, 1, 3))
    mine = lengths[group.index]
    received = outgoing.new_empty(group.size * mine)
    all_to_all(received, outgoing, group, input_splits=lengths, output_splits=[mine] * group.size)
    received = received.view(group.size * tokens, batch, sum(rows[group.index]))
    return received, heads_of(received, rows[group.index], widths)


def heads_of(received: Tensor, row: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """[B, heads, U·T, X] views of the message that `to_heads` received."""
    return [
        column.unflatten(-1, (-1, width)).permute(1, 2, 0, 3)
        for column, width in zip(received.split(list(row), -1), widths, strict=True)
    ]


def to_tokens(tensors: Sequence[Shared], group: Group) -> list[Tensor]:
    """From all tokens of this rank's heads, [B, heads, U·T, X] each, to its tokens of all heads, [B, all heads, T, X].

    A head that several ranks have is summed over them.
    """
    batch, _, all_tokens, _ = tensors[0][0].shape
    tokens = all_tokens // group.size
    # Entries per tensor and rank.
    sizes = [[(stop - start) * batch * tokens * one.shape[-1] for start, stop in ranges] for one, ranges in tensors]
    mine = [of_ranks[group.index] for of_ranks in sizes]
    outgoing = tensors[0][0].new_empty(group.size * sum(mine))
    for rank, part in enumerate(outgoing.split(sum(mine))):
        for (one, _), place in zip(tensors, part.split(mine), strict=True):
            own = one[:, :, rank * tokens : (rank + 1) * tokens].transpose(0, 1)
            place.view(own.shape).copy_(own)
    lengths = [sum(of_tensors) for of_tensors in zip(*sizes, strict=True)]
    received = outgoing.new_empty(sum(lengths))
    all_to_all(received, outgoing, group, input_splits=[sum(mine)] * group.size, output_splits=lengths)
    if len(tensors) == 1 and sum(sizes[0]) == received.numel() and _is_partition(tensors[0][1]):
        return [received.view(-1, batch, tokens, tensors[0][0].shape[-1]).transpose(0, 1)]
    parts = [
        part.split(list(of_tensors))
        for part, of_tensors in zip(received.split(lengths), zip(*sizes, strict=True), strict=True)
    ]
    return [
        _assemble([part[number] for part in parts], ranges, (batch, tokens, one.shape[-1]))
        for number, (one, ranges) in enumerate(tensors)
    ]


def _assemble(parts: Sequence[Tensor], ranges: Sequence[Range], sizes: tuple[int, int, int]) -> Tensor:
    """All heads from the flat parts of all ranks."""
    batch, tokens, width = sizes
    views = [part.view(-1, batch, tokens, width).transpose(0, 1) for part in parts]
    if _is_partition(ranges):
        return torch.cat(views, 1)
    whole = parts[0].new_zeros(batch, ranges[-1][1], tokens, width)
    for view, (start, stop) in zip(views, ranges, strict=True):
        whole[:, start:stop] += view
    return whole


def _is_partition(ranges: Sequence[Range]) -> bool:
    return all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
