"""The weights that a rank exchanges with other replicas, in flat buckets: many tensors travel as a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.dtypes import accumulator_dtype
from weft.plan.partition.wire import Member, assign_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Tensors of one dtype that are exchanged together."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    """Format in which they are summed."""

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor's part of a flat buffer, in its shape."""
        parts = flat.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]

    @torch.no_grad()
    def read_into(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the tensors to a flat buffer, and return it."""
        torch._foreach_copy_(self.views(flat), list(self.tensors))
        return flat

    @torch.no_grad()
    def write_from(self, flat: torch.Tensor) -> None:
        torch._foreach_copy_(list(self.tensors), self.views(flat))


def weight_buckets(named: Sequence[tuple[str, torch.Tensor]], bucket_bytes: int) -> list[WeightBucket]:
    """Buckets of these tensors, in their order; empty tensors are in none."""
    there = [(name, tensor.detach()) for name, tensor in named if tensor.numel()]
    members = []
    for _, tensor in there:
        dtype = accumulator_dtype(tensor.dtype)
        members.append(Member(numel=tensor.numel(), item_bytes=dtype.itemsize, kind=str(tensor.dtype)))
    return [
        WeightBucket(
            names=tuple(there[index][0] for index in inside),
            tensors=tuple(there[index][1] for index in inside),
            dtype=accumulator_dtype(there[inside[0]][1].dtype),
        )
        for inside in assign_buckets(members, bucket_bytes, first_bytes=bucket_bytes)
    ]
