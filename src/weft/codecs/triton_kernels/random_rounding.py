"""qsgd and terngrad on a GPU: entries rounded at random and packed in one pass; needs Triton."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import (
    BLOCK,
    NUM_WARPS,
    block_of,
    flag_not_finite,
    key_of,
    num_blocks,
    packed,
    part_of,
    uniforms,
    unpacked,
)
from weft.codecs.triton_kernels.tables import Bucket, Numbers, Table, are_aligned
from weft.plan.exchange.quantised import QSGD_BLOCK, QuantisedTensor


class RandomRoundingKernels:
    """The passes over one bucket; its codec is qsgd or terngrad."""

    def __init__(self, bucket: Bucket, parts: Sequence[QuantisedTensor]) -> None:
        self._bucket = bucket
        tensors = bucket.tensors
        fields = [
            [one.tensor.offset, one.tensor.numel, one.start // 4, one.codes_start, zlib.crc32(one.tensor.name.encode())]
            for one in parts
        ]
        self._table = Table([num_blocks(one.numel) for one in tensors], fields, bucket.device)
        self._is_aligned = are_aligned([number for one in tensors for number in (one.offset, one.numel)], 8)
        self._numbers = Numbers(bucket.device)
        self._bits = parts[0].bits if parts else 8
        self._is_qsgd = bucket.codec.name == "qsgd"
        self._largest = torch.zeros(len(parts), dtype=torch.int32, device=bucket.device)
        """Bits of terngrad's sizes: those of positive numbers are in the order of the numbers."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor, step: int) -> None:
        table, grid = self._table, (self._table.num_programs,)
        with torch.cuda.device_of(values):
            if not self._is_qsgd:
                self._largest.zero_()
                _largest[grid](
                    table.tensor_of, table.fields, values, self._largest, not_finite,
                    IS_ALIGNED=self._is_aligned, BLOCK=BLOCK, WIDTH=table.width, num_warps=NUM_WARPS,
                )  # fmt: skip
            _round_at_random[grid](
                table.tensor_of, table.fields, values, message, message.view(torch.float32), self._largest,
                not_finite, step, self._bucket.replica,
                IS_QSGD=self._is_qsgd, STEPS=self._num_steps, BITS=self._bits, IS_ALIGNED=self._is_aligned,
                BLOCK=BLOCK, GROUP=QSGD_BLOCK, WIDTH=table.width, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    def decode(self, received: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        table = self._table
        with torch.cuda.device_of(values):
            _add_rows[(table.num_programs,)](
                table.tensor_of, table.fields, received, received.view(torch.float32), received.stride(0), values,
                self._numbers.float64(scale),
                IS_QSGD=self._is_qsgd, STEPS=self._num_steps, BITS=self._bits, IS_ALIGNED=self._is_aligned,
                NUM_REPLICAS=self._bucket.num_replicas, BLOCK=BLOCK, GROUP=QSGD_BLOCK, WIDTH=table.width,
                num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    @property
    def _num_steps(self) -> int:
        return self._bucket.codec.levels // 2 - 1 if self._is_qsgd else 1


@triton.jit
def are_common(x):
    """1 where no quotient, reciprocal or remainder of sizes up to x that matters is out of the range of float32."""
    return ((x > 1e-25) & (x < 1e25)).to(tl.int32)


@triton.jit
def quotients(x, divisor, reciprocal):
    """x / divisor, rounded to nearest (Markstein), where many numbers have one divisor: three instructions instead of
    a division of a dozen."""
    near = x * reciprocal
    return tl.fma(tl.fma(-near, divisor, x), reciprocal, near)


@triton.jit
def _largest(
    tensor_of, fields, values, largest, not_finite,
    IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at, start, count = block_of(row, block, BLOCK, IS_ALIGNED)
    place = tl.arange(0, BLOCK)
    x = tl.load(values + at + place, mask=place < count, other=0.0)
    flag_not_finite(x, not_finite)
    tl.atomic_max(largest + tensor, tl.max(tl.abs(x).to(tl.int32, bitcast=True)))


@triton.jit(do_not_specialize=["step", "replica"])
def _round_at_random(
    tensor_of, fields, values, message, floats, largest, not_finite, step, replica,
    IS_QSGD: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at, start, count = block_of(row, block, BLOCK, IS_ALIGNED)
    at_scales = floats + tl.load(row + 2)
    at_codes = message + tl.multiple_of(tl.load(row + 3), 4)
    key = key_of(tl.load(row + 4), step, replica)
    if IS_QSGD:
        place = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(values + at + place, mask=place < count, other=0.0)
        exact = x.to(tl.float64)
        norm = tl.sqrt(tl.sum(exact * exact, axis=1)).to(tl.float32)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(at_scales + start // GROUP + group, norm, mask=group * GROUP < count)
        flag_not_finite(norm, not_finite)
        norm = tl.where(norm == 0.0, 1.0, norm)[:, None]  # blocks of zeros have shares of 0
        size = tl.abs(x)
        if tl.min(are_common(norm)) > 0:
            share = quotients(size, norm, tl.div_rn(1.0, norm))
        else:
            share = tl.div_rn(size, norm)
        size = tl.minimum(
            tl.floor(share * STEPS + uniforms(key, start.to(tl.uint32) + place.to(tl.uint32))), 1.0 * STEPS
        )
        codes = tl.reshape(STEPS + tl.where(x < 0.0, -size, size).to(tl.int32), (BLOCK,))
    else:
        place = tl.arange(0, BLOCK)
        x = tl.load(values + at + place, mask=place < count, other=0.0)
        size = tl.load(largest + tensor).to(tl.float32, bitcast=True)
        if block == 0:
            tl.store(at_scales, size)
        size = tl.where(size == 0.0, 1.0, size)
        if are_common(size) > 0:
            share = quotients(tl.abs(x), size, tl.div_rn(1.0, size))
        else:
            share = tl.div_rn(tl.abs(x), size)
        is_sent = uniforms(key, start.to(tl.uint32) + place.to(tl.uint32)) < share
        codes = tl.where(is_sent, tl.where(x < 0.0, 0, 2), 1)
    codes = tl.where(tl.arange(0, BLOCK) < count, codes, 0)
    per_byte: tl.constexpr = 8 // BITS
    byte = tl.arange(0, BLOCK // per_byte)
    is_byte = byte * per_byte < count
    tl.store(at_codes + start // per_byte + byte, packed(codes, BLOCK, BITS).to(tl.uint8), mask=is_byte)


@triton.jit(do_not_specialize=["stride"])
def _add_rows(
    tensor_of, fields, received, floats, stride, values, scale,
    IS_QSGD: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    NUM_REPLICAS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, block = part_of(tensor_of, fields, WIDTH)
    at, start, count = block_of(row, block, BLOCK, IS_ALIGNED)
    per_byte: tl.constexpr = 8 // BITS
    at_scales = floats + (tl.load(row + 2) + start // GROUP if IS_QSGD else tl.load(row + 2))
    at_codes = received + (tl.multiple_of(tl.load(row + 3), 4) + start // per_byte)
    place = tl.arange(0, BLOCK)
    here = place < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for replica in range(NUM_REPLICAS):
        message = tl.multiple_of(replica * stride.to(tl.int64), 16)
        size = (unpacked(at_codes + message, place, here, BITS) - STEPS).to(tl.float32)
        if IS_QSGD:
            if STEPS != 1:
                size = tl.div_rn(size, 1.0 * STEPS)
            scales = tl.load(at_scales + message // 4 + place // GROUP, mask=here, other=0.0)
            total += size * scales
        else:
            total += size * tl.load(at_scales + message // 4)
    tl.store(values + at + place, total * tl.load(scale).to(tl.float32), mask=here)
