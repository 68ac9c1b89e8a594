"""Messages of the codecs that send few bits of every entry, onebit, sign, qsgd and terngrad: what lies where in them.

A message is one flat tensor of bytes, tensor after tensor, each from a multiple of 16 bytes on:

    scales   in the bucket's dtype: onebit's means of the entries >= 0 of each column, then of those < 0; qsgd's norms
             of blocks of 512 entries; terngrad's largest size of an entry; sign has none
    rest     in the bucket's dtype: entries that onebit sends as they are, because they fill no row of the matrix,
             or no more than two rows
    codes    1, 2, 4 or 8 bits of every other entry, in order, low bits of a byte first; unused bits are 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import FEW_ROWS, CodedTensor
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.plan import Codec

QUANTISED = ("onebit", "sign", "qsgd", "terngrad")
QSGD_BLOCK = 512
"""Consecutive entries of a tensor that share a norm; the last block may be shorter."""
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """The place of a tensor in the message."""

    tensor: CodedTensor
    num_scales: int
    num_rest: int
    bits: int
    """Of a code."""
    scale_bytes: int
    """Of a scale, and of an entry of the rest."""
    start: int
    """Byte of the message at which the scales begin."""

    @property
    def num_coded(self) -> int:
        """Entries that travel as codes, the first ones of the tensor."""
        return self.tensor.numel - self.num_rest

    @property
    def rest_start(self) -> int:
        return self.start + self.num_scales * self.scale_bytes

    @property
    def codes_start(self) -> int:
        return self.rest_start + self.num_rest * self.scale_bytes

    @property
    def codes_stop(self) -> int:
        return self.codes_start - (-self.num_coded * self.bits // 8)

    @property
    def stop(self) -> int:
        """Where the next tensor begins."""
        return -(-self.codes_stop // _ALIGNED_BYTES) * _ALIGNED_BYTES


def quantised_tensors(codec: Codec, tensors: Sequence[CodedTensor], dtype: str) -> tuple[QuantisedTensor, ...]:
    """Where each tensor of a bucket of this dtype lies in the message."""
    found: list[QuantisedTensor] = []
    for tensor in tensors:
        num_scales, num_rest, bits = _contents(codec, tensor)
        found.append(
            QuantisedTensor(
                tensor=tensor,
                num_scales=num_scales,
                num_rest=num_rest,
                bits=bits,
                scale_bytes=item_bytes(dtype),
                start=found[-1].stop if found else 0,
            )
        )
    return tuple(found)


def quantised_bytes(codec: Codec, tensors: Sequence[CodedTensor], dtype: str) -> int:
    """Length of the message."""
    found = quantised_tensors(codec, tensors, dtype)
    return found[-1].stop if found else 0


def onebit_rows(tensor: CodedTensor) -> int:
    """Rows of which onebit sends means and signs: all full ones, or none if they are so few that means are no less."""
    return tensor.num_rows if tensor.num_rows > FEW_ROWS else 0


def _contents(codec: Codec, tensor: CodedTensor) -> tuple[int, int, int]:
    """Scales, entries that travel as they are, and bits of a code."""
    if codec.name == "onebit":
        num_rows = onebit_rows(tensor)
        return 2 * tensor.num_columns if num_rows else 0, tensor.numel - num_rows * tensor.num_columns, 1
    if codec.name == "qsgd":
        return -(-tensor.numel // QSGD_BLOCK), 0, codec.levels.bit_length() - 1
    if codec.name == "terngrad":
        return 1, 0, 2
    return 0, 0, 1
