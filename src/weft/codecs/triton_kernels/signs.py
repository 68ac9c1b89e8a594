"""sign on a GPU: one bit per element, and the vote over replicas; needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import (
    BLOCK,
    NUM_WARPS,
    block_of,
    flag_not_finite,
    num_blocks,
    packed,
    part_of,
    unpacked,
)
from weft.codecs.triton_kernels.tables import Bucket, Table, are_aligned


class SignKernels:
    """The passes over one bucket."""

    def __init__(self, bucket: Bucket, bits_at: Sequence[int]) -> None:
        """`bits_at`: where each tensor's bits begin in a message, in bytes."""
        tensors = bucket.tensors
        self._num_replicas = bucket.num_replicas
        fields = [[one.offset, one.numel, at] for one, at in zip(tensors, bits_at, strict=True)]
        self._table = Table([num_blocks(one.numel) for one in tensors], fields, bucket.device)
        self._is_aligned = are_aligned([number for one in tensors for number in (one.offset, one.numel)], 8)

    def encode(self, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        table = self._table
        with torch.cuda.device_of(values):
            _pack_signs[(table.num_programs,)](
                table.tensor_of, table.fields, values, message, not_finite,
                IS_ALIGNED=self._is_aligned, BLOCK=BLOCK, WIDTH=table.width, num_warps=NUM_WARPS,
            )  # fmt: skip

    def decode(self, received: torch.Tensor, values: torch.Tensor) -> None:
        table = self._table
        with torch.cuda.device_of(values):
            _vote[(table.num_programs,)](
                table.tensor_of, table.fields, received, received.stride(0), values,
                IS_ALIGNED=self._is_aligned, NUM_REPLICAS=self._num_replicas, BLOCK=BLOCK, WIDTH=table.width,
                num_warps=NUM_WARPS,
            )  # fmt: skip


def try_kernels() -> None:
    """Compile and run a kernel on a few numbers; raises where that does not work."""
    table = Table([1], [[0, 8, 0]], torch.device("cuda"))
    message = torch.zeros(16, dtype=torch.uint8, device="cuda")
    _pack_signs[(1,)](
        table.tensor_of, table.fields, torch.zeros(8, device="cuda"), message, torch.zeros(1, device="cuda"),
        IS_ALIGNED=True, BLOCK=BLOCK, WIDTH=table.width, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _pack_signs(
    tensor_of, fields, values, message, not_finite,
    IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at, start, count = block_of(row, block, BLOCK, IS_ALIGNED)
    place = tl.arange(0, BLOCK)
    x = tl.load(values + at + place, mask=place < count, other=0.0)
    flag_not_finite(x, not_finite)
    bytes_ = packed((x < 0.0).to(tl.int32), BLOCK, 1)
    byte = tl.arange(0, BLOCK // 8)
    tl.store(message + (tl.load(row + 2) + start // 8) + byte, bytes_.to(tl.uint8), mask=byte * 8 < count)


@triton.jit(do_not_specialize=["stride"])
def _vote(
    tensor_of, fields, received, stride, values,
    IS_ALIGNED: tl.constexpr, NUM_REPLICAS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at, start, count = block_of(row, block, BLOCK, IS_ALIGNED)
    place = tl.arange(0, BLOCK)
    here = place < count
    bits = received + (tl.load(row + 2) + start // 8)
    num_negative = tl.zeros((BLOCK,), dtype=tl.int32)
    for replica in range(NUM_REPLICAS):
        num_negative += unpacked(bits + replica * stride.to(tl.int64), place, here, 1)
    tl.store(values + at + place, tl.where(2 * num_negative <= NUM_REPLICAS, 1.0, -1.0), mask=here)
