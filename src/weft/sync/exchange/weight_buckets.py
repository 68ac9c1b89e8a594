"""The weights that a rank exchanges with other replicas, in flat buckets: many tensors travel as a few.

Which buckets there are, and how many bytes they and their buffers take, says `plan/exchange/weight_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.comm.group import Group
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.weight_exchange import (
    MAX_BUCKETS_IN_FLIGHT,
    NO_CODEC,
    ExchangeBucket,
    Weight,
    exchange_buckets,
)
from weft.plan.plan import Codec as CodecSection


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Tensors of one dtype that are exchanged together."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    """Format in which they are summed."""
    coded: tuple[CodedTensor, ...] = ()
    """Its tensors, if a codec compresses them."""
    fragment: int = 0
    """The fragment of the model that it belongs to."""

    @property
    def planned(self) -> ExchangeBucket:
        """The bucket as the predictions of bytes and memory describe it, without members."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ExchangeBucket(members=(), numel=self.numel, dtype=dtype, coded=self.coded, fragment=self.fragment)

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

    @torch.no_grad()
    def add(self, flat: torch.Tensor) -> None:
        """Add a flat buffer to the tensors, in the buffer's format."""
        if all(tensor.dtype == flat.dtype and tensor.device == flat.device for tensor in self.tensors):
            torch._foreach_add_(list(self.tensors), self.views(flat))
        else:
            self.write_from(self.read_into(torch.empty_like(flat)).add_(flat))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor that is exchanged, and the whole that it is a range of."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...] = ()
    start: int = 0


def weight_buckets(
    named: Sequence[Part],
    bucket_bytes: int,
    codec: CodecSection = NO_CODEC,
    *,
    fragment_of: Mapping[str, int] | None = None,
) -> list[WeightBucket]:
    """Buckets of these tensors, in their order; empty tensors are in none. `fragment_of`: by name; all are in one if it
    is left out."""
    weights = [
        Weight(
            numel=one.tensor.numel(),
            dtype=str(one.tensor.dtype).removeprefix("torch."),
            name=one.name,
            shape=one.shape,
            start=one.start,
        )
        for one in named
    ]
    return [
        WeightBucket(
            names=tuple(named[place].name for place in bucket.members),
            tensors=tuple(named[place].tensor.detach() for place in bucket.members),
            dtype=torch_dtype(bucket.dtype),
            coded=bucket.coded,
            fragment=bucket.fragment,
        )
        for bucket in exchange_buckets(weights, bucket_bytes, codec, fragment_of)
    ]


class ExchangeBuffers:
    """The memory from which buckets are sent as they are, kept from exchange to exchange: that of two at a time."""

    def __init__(self, buckets: Sequence[WeightBucket], group: Group, device: torch.device) -> None:
        """Collective."""
        self._sizes = [(bucket.numel, bucket.dtype) for bucket in buckets]
        turns = [_largest(self._sizes[turn::MAX_BUCKETS_IN_FLIGHT]) for turn in range(MAX_BUCKETS_IN_FLIGHT)]
        num_bytes = sum(bytes_for([*largest.values()], [*largest]) for largest in turns)
        allocator = BufferAllocator(group, device, num_bytes=num_bytes)
        self._sent = [{dtype: allocator.empty(numel, dtype) for dtype, numel in one.items()} for one in turns]

    def __getitem__(self, number: int) -> torch.Tensor:
        """The buffer that is sent for a bucket."""
        numel, dtype = self._sizes[number]
        return self._sent[number % MAX_BUCKETS_IN_FLIGHT][dtype][:numel]


def _largest(sizes: Iterable[tuple[int, torch.dtype]]) -> dict[torch.dtype, int]:
    """The largest number of elements by dtype."""
    largest: dict[torch.dtype, int] = {}
    for numel, dtype in sizes:
        largest[dtype] = max(largest.get(dtype, 0), numel)
    return largest
