"""The weights that a rank exchanges with other replicas, in flat buckets: many tensors travel as a few.

Which buckets there are, and how many bytes they and their buffers take, says `plan/exchange/weight_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weft.codecs.base import Codec
from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.comm.group import Group
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.weight_exchange import MAX_EXCHANGES_IN_FLIGHT, Weight, exchange_buckets


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
    weights = [Weight(numel=tensor.numel(), dtype=str(tensor.dtype).removeprefix("torch.")) for _, tensor in named]
    return [
        WeightBucket(
            names=tuple(named[place][0] for place in bucket.members),
            tensors=tuple(named[place][1].detach() for place in bucket.members),
            dtype=torch_dtype(bucket.dtype),
        )
        for bucket in exchange_buckets(weights, bucket_bytes)
    ]


class ExchangeBuffers:
    """The memory from which buckets are sent, kept from exchange to exchange: that of two buckets at a time."""

    def __init__(
        self, buckets: Sequence[WeightBucket], codecs: Sequence[Codec | None], group: Group, device: torch.device
    ) -> None:
        """Collective. With codecs messages travel, and one bucket's values are needed at a time."""
        self._values_of = [(bucket.numel, bucket.dtype) for bucket in buckets]
        self._sent_of = [
            values if codec is None else (codec.messages[0].numel, torch_dtype(codec.messages[0].dtype))
            for values, codec in zip(self._values_of, codecs, strict=True)
        ]
        turns = [_largest(self._sent_of[turn::MAX_EXCHANGES_IN_FLIGHT]) for turn in range(MAX_EXCHANGES_IN_FLIGHT)]
        num_bytes = sum(bytes_for([*largest.values()], [*largest]) for largest in turns)
        allocator = BufferAllocator(group, device, num_bytes=num_bytes)
        self._sent = [{dtype: allocator.empty(numel, dtype) for dtype, numel in one.items()} for one in turns]
        self._values: dict[torch.dtype, torch.Tensor] | None = None
        if any(codecs):
            plain = _largest(self._values_of)
            self._values = {dtype: torch.empty(numel, dtype=dtype, device=device) for dtype, numel in plain.items()}

    def values(self, number: int) -> torch.Tensor:
        """The buffer for the values of a bucket; without a codec it is the one that is sent."""
        numel, dtype = self._values_of[number]
        return self.sent(number) if self._values is None else self._values[dtype][:numel]

    def sent(self, number: int) -> torch.Tensor:
        """The buffer that is sent for a bucket."""
        numel, dtype = self._sent_of[number]
        return self._sent[number % MAX_EXCHANGES_IN_FLIGHT][dtype][:numel]


def _largest(sizes: Iterable[tuple[int, torch.dtype]]) -> dict[torch.dtype, int]:
    """The largest number of elements by dtype."""
    largest: dict[torch.dtype, int] = {}
    for numel, dtype in sizes:
        largest[dtype] = max(largest.get(dtype, 0), numel)
    return largest
