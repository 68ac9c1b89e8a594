"""The message of topk and dgc: few values of each tensor and where they belong, in sections of known length.

    counts    int32, entries in each chunk of 65,536 elements of each tensor, in their order
    scales    of the values' dtype, two per tensor; only where values travel in fewer bits
    offsets   uint16 per entry: its place within its chunk, ascending
    values    of the values' dtype per entry; or int8; or 2 bits, four to a byte, the low bits first

Offsets within chunks take two bytes where indices would take four or eight. Every tensor has room for as many entries
as the density allows it, at a place that does not depend on how many it sends; unused room is zero. Sections begin, and
the message ends, at multiples of 16 bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.warm_up import density
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.plan import Codec

CHUNK_NUMEL = 65_536
"""Elements of a tensor whose places 16 bits tell apart."""

_LEAST_SAMPLED = 4096
_SAMPLED_SHARE = 128
"""One element of so many is sampled."""

_ALIGNMENT_BYTES = 16
_COUNT_BYTES = 4
_OFFSET_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Where everything is in a message. The entries of all tensors are one row, and so are their chunks."""

    bits: int
    """Of a value: 32 (as it is, in its own dtype), 8 or 2."""
    entries: tuple[tuple[int, int], ...]
    """Of each tensor: its first entry, and the one after its last."""
    chunks: tuple[tuple[int, int], ...]
    """Of each tensor: its first chunk, and the one after its last."""
    scales_at: int
    """Place of the section in the message, in bytes, as of the others; the counts are at 0."""
    offsets_at: int
    values_at: int
    num_bytes: int

    @property
    def num_entries(self) -> int:
        return self.entries[-1][1] if self.entries else 0

    @property
    def num_chunks(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0


def num_sent(share: float, numel: int) -> int:
    """The most entries that a tensor of this many elements sends."""
    return max(1, min(numel, int(share * numel + 0.5)))


def sample_size(numel: int) -> int:
    """Elements of a tensor from which the threshold that entries must reach is estimated."""
    return min(numel, max(_LEAST_SAMPLED, numel // _SAMPLED_SHARE))


def threshold_rank(num_sent: int, numel: int) -> int:
    """Which of the sampled sizes, counted from 1 at the largest, is the threshold: 1.25 × num_sent should reach it."""
    num_sampled = sample_size(numel)
    return min(num_sampled, -(-5 * num_sampled * num_sent // (4 * numel)))


def safe_rank(num_sent: int, numel: int) -> int:
    """The like for topk: num_sent elements reach it nearly always, so that the largest of all are among them."""
    num_sampled = sample_size(numel)
    mean = num_sampled * num_sent / numel
    return min(num_sampled, math.ceil(mean + 4 * math.sqrt(mean) + 4))


def is_spread(codec: Codec, dtype: str, *, num_replicas: int, step: int) -> bool:
    """True if entries travel spread over zeros, as a dense sum, in a step, counted from 0: where those of all replicas
    would take as many bytes as the values. Decided for all tensors alike, so that results do not depend on buckets."""
    value_bytes = item_bytes(dtype)
    entry_bytes = _OFFSET_BYTES + (value_bytes if codec.bits == 32 else codec.bits / 8)
    return num_replicas * density(codec, step) * entry_bytes >= 2 * value_bytes


def sparse_layout(codec: Codec, tensors: Sequence[CodedTensor], dtype: str, step: int) -> SparseLayout:
    """The layout of the message of these tensors in a step, counted from 0."""
    share = density(codec, step)
    entries = _ranges(num_sent(share, tensor.numel) for tensor in tensors)
    chunks = _ranges(-(-tensor.numel // CHUNK_NUMEL) for tensor in tensors)
    num_entries, num_chunks = (entries[-1][1], chunks[-1][1]) if entries else (0, 0)
    value_bytes = item_bytes(dtype)
    scales_at = _aligned(num_chunks * _COUNT_BYTES)
    offsets_at = _aligned(scales_at + (2 * len(tensors) * value_bytes if codec.bits < 32 else 0))
    values_at = _aligned(offsets_at + num_entries * _OFFSET_BYTES)
    num_value_bytes = num_entries * value_bytes if codec.bits == 32 else -(-num_entries * codec.bits // 8)
    return SparseLayout(
        bits=codec.bits,
        entries=entries,
        chunks=chunks,
        scales_at=scales_at,
        offsets_at=offsets_at,
        values_at=values_at,
        num_bytes=_aligned(values_at + num_value_bytes),
    )


def _ranges(lengths: Iterable[int]) -> tuple[tuple[int, int], ...]:
    ends = list(itertools.accumulate(lengths))
    return tuple(zip([0, *ends], ends, strict=False))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
