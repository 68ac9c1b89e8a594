"""onebit on a GPU: one read and one write of what is kept; needs Triton.

The means of a column are known only when all of it was seen, and to subtract them would be another pass. So what is
kept is x itself, with the means that were sent of it: residual = x - mean of its sign, taken when x is next read.
`settle` makes it the plain residual, with means of 0.

Programs have tiles of *wide rows*: some rows of the matrix together, so that they fill whole bytes of bits and most
of a tile. Sums of the columns are of one tile each, and are added up in the order of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import NUM_WARPS, flag_not_finite, packed, part_of, unpacked
from weft.codecs.triton_kernels.tables import Bucket, Kept, Numbers, Table, Turns, are_aligned
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.gpu_scratch import ONEBIT_COLUMNS, rows_of_tile, rows_together
from weft.plan.exchange.quantised import onebit_rows

_ROWS_AT_ONCE, _DECODED_AT_ONCE = 2, 1
_REGISTERS, _DECODED_REGISTERS = 80, 64
"""Per thread: with more of them, too few programs at a time would wait for memory."""
_MEAN_COLUMNS, _MEAN_ROWS = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitPlaces:
    """Where a tensor's parts are in a message."""

    means_at: int
    """In elements of 4 bytes, as `rest_at`: first the means of x >= 0 of all columns, then those of x < 0."""
    bits_at: int
    """In bytes."""
    rest_at: int


class OneBitKernels:
    """The passes over one bucket, and the means that belong to what is kept."""

    def __init__(self, bucket: Bucket, places: Sequence[OneBitPlaces]) -> None:
        self._bucket = bucket
        tensors, device = bucket.tensors, bucket.device
        tile_rows = rows_of_tile(sum(one.numel for one in tensors))
        fields, column_fields, tiles, column_parts = [], [], [], []
        sums_at = means_of = 0
        for one, place in zip(tensors, places, strict=True):
            columns, num_rows = one.num_columns, onebit_rows(one)
            numel, together = num_rows * columns, rows_together(columns, num_rows)
            width = together * columns
            high, wide = -(-numel // (width * tile_rows)), -(-width // ONEBIT_COLUMNS)
            at = (place.means_at, place.bits_at)
            fields.append([one.offset, numel, columns, width, wide, means_of, sums_at, *at])
            column_fields.append([columns, num_rows, high * together, means_of, sums_at, place.means_at])
            tiles.append(high * wide)
            column_parts.append(-(-columns // _MEAN_COLUMNS) if num_rows else 0)
            sums_at += high * width
            means_of += columns
        self._with_rest = [(one, place.rest_at) for one, place in zip(tensors, places, strict=True) if _num_rest(one)]
        self._rows = tile_rows
        self._tiles = Table(tiles, fields, device)
        self._columns = Table(column_parts, column_fields, device)
        self._sums = torch.zeros(3, max(sums_at, 1), dtype=torch.float32, device=device)
        self._is_aligned = are_aligned([number for row in fields for number in (row[0], row[1], row[3])], 8)
        self._numbers, self._turns = Numbers(device), Turns(device)
        self.num_means = 2 * means_of
        """Those of all tensors' columns for x >= 0, then for x < 0."""

    def encode(
        self,
        values: torch.Tensor,
        residual: Kept,
        means: Kept,
        keep: float | torch.Tensor,
        message: torch.Tensor,
        not_finite: torch.Tensor,
    ) -> None:
        """`keep`: the factor on the residual, with that of the plan."""
        first, second, turn = self._turns(residual)
        first_means, second_means, _ = self._turns(means)
        tiles, columns, num_means = self._tiles, self._columns, self.num_means // 2
        floats = message.view(torch.float32)
        for one, at in self._with_rest:
            self._send_rest(one, values, residual, keep, floats[at : at + _num_rest(one)])
            not_finite += (~torch.isfinite(floats[at : at + _num_rest(one)])).any()
        with torch.cuda.device_of(values):
            _encode_tiles[(tiles.num_programs,)](
                tiles.tensor_of, tiles.fields, values, first, second, first_means, second_means, turn, num_means,
                self._numbers.float64(keep), message, self._sums, self._sums.stride(0), not_finite,
                IS_ALIGNED=self._is_aligned, ROWS=self._rows, AT_ONCE=_ROWS_AT_ONCE, COLUMNS=ONEBIT_COLUMNS,
                WIDTH=tiles.width, num_warps=NUM_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip
            _means_of_columns[(columns.num_programs,)](
                columns.tensor_of, columns.fields, self._sums, self._sums.stride(0), first_means, second_means, turn,
                num_means, floats, AT_ONCE=_MEAN_ROWS, COLUMNS=_MEAN_COLUMNS, WIDTH=columns.width,
                num_warps=NUM_WARPS,
            )  # fmt: skip

    def decode(self, received: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        tiles = self._tiles
        for one, at in self._with_rest:
            first, *others = received.view(torch.float32)[:, at : at + _num_rest(one)]
            here = _rest(one, values).copy_(first)
            for other in others:
                here += other
            here *= scale
        with torch.cuda.device_of(values):
            _decode_tiles[(tiles.num_programs,)](
                tiles.tensor_of, tiles.fields, received, received.view(torch.float32), received.stride(0), values,
                self._numbers.float64(scale),
                IS_ALIGNED=self._is_aligned, NUM_REPLICAS=self._bucket.num_replicas, ROWS=self._rows,
                AT_ONCE=_DECODED_AT_ONCE, COLUMNS=ONEBIT_COLUMNS, WIDTH=tiles.width, num_warps=NUM_WARPS,
                maxnreg=_DECODED_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip

    def _send_rest(
        self, one: CodedTensor, values: torch.Tensor, residual: Kept, keep: float | torch.Tensor, sent: torch.Tensor
    ) -> None:
        """What fills no row of a matrix. Nothing is kept of it, but another plan may have: what it left is sent before
        a GPU decides by itself."""
        if isinstance(residual.turn, int):
            old, new = (_rest(one, residual.pair[turn]) for turn in (residual.turn, 1 - residual.turn))
            torch.add(_rest(one, values), old * keep, out=sent)
            new.zero_()
        else:
            sent.copy_(_rest(one, values))

    def settle(self, kept: torch.Tensor, means: torch.Tensor) -> None:
        """Make what is kept the residual itself, with means of 0."""
        start, half = 0, means.numel() // 2
        for one in self._bucket.tensors:
            matrix = _matrix(one, kept)
            of_plus, of_minus = (means[at + start : at + start + one.num_columns] for at in (0, half))
            matrix -= torch.where(matrix < 0, of_minus, of_plus)
            start += one.num_columns
        means.zero_()


def _matrix(one: CodedTensor, flat: torch.Tensor) -> torch.Tensor:
    num_rows = onebit_rows(one)
    return flat[one.offset : one.offset + num_rows * one.num_columns].view(num_rows, one.num_columns)


def _num_rest(one: CodedTensor) -> int:
    """Elements that travel as they are."""
    return one.numel - onebit_rows(one) * one.num_columns


def _rest(one: CodedTensor, flat: torch.Tensor) -> torch.Tensor:
    return flat[one.offset + one.numel - _num_rest(one) : one.offset + one.numel]


@triton.jit
def limit(count, IS_ALIGNED: tl.constexpr):
    """A count of elements in 32 bits; more are beyond all places of a few rows anyway. It is negative, and may be
    large, where a tile of few wide rows is higher than the matrix."""
    count = tl.maximum(tl.minimum(count, 2**31 - 8), 0).to(tl.int32)
    if IS_ALIGNED:
        count = tl.multiple_of(count, 8)
    return count


@triton.jit(do_not_specialize=["num_means", "sums_stride"])
def _encode_tiles(
    tensor_of, fields, values, first, second, first_means, second_means, turn, num_means, keep,
    message, sums, sums_stride, not_finite,
    IS_ALIGNED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, tile = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    numel = tl.load(row + 1)
    columns = tl.load(row + 2)
    width = tl.load(row + 3)
    num_wide = tl.load(row + 4)
    means_of = tl.load(row + 5)
    at_sums = sums + tl.load(row + 6)
    at_bits = message + tl.load(row + 8)
    old = first
    new = second
    old_means = first_means
    if tl.load(turn) != 0:
        old = second
        new = first
        old_means = second_means
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 8)
        numel = tl.multiple_of(numel, 8)
        width = tl.multiple_of(width, 8)
        old = tl.multiple_of(old, 16)
        new = tl.multiple_of(new, 16)
    factor = tl.load(keep).to(tl.float32)
    high = tile // num_wide
    column = ((tile % num_wide) * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    is_column = column < width
    sum_plus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
    sum_minus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
    num_minus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
    byte_column = ((tile % num_wide) * (COLUMNS // 8)).to(tl.int32) + tl.arange(0, COLUMNS // 8)
    # Places within these rows take 32 bits, and half the registers of 64.
    line = tl.arange(0, AT_ONCE)[:, None]
    entry = line * tl.multiple_of(width.to(tl.int32), 8) + column[None, :]
    byte = line * (width // 8).to(tl.int32) + byte_column[None, :]
    # As wide as a row and as high as the tile: rows of another shape would be handed from thread to thread.
    at_means = old_means + means_of + (line * 0 + (column % columns.to(tl.int32))[None, :])
    of_plus = tl.load(at_means, mask=(line >= 0) & is_column[None, :], other=0.0)
    of_minus = tl.load(at_means + num_means, mask=(line >= 0) & is_column[None, :], other=0.0)
    for step in range(ROWS // AT_ONCE):
        start = (high * ROWS + step * AT_ONCE) * width
        here = (entry < limit(numel - start, IS_ALIGNED)) & is_column[None, :]
        kept = tl.load(old + (offset + start) + entry, mask=here, other=0.0)
        g = tl.load(values + (offset + start) + entry, mask=here, other=0.0)
        x = g + factor * (kept - tl.where(kept < 0.0, of_minus, of_plus))
        x = tl.where(here, x, 0.0)
        tl.store(new + (offset + start) + entry, x, mask=here)
        is_minus = x < 0.0
        sum_plus += tl.where(is_minus, 0.0, x)  # and what is no number
        sum_minus += tl.where(is_minus, x, 0.0)
        num_minus += is_minus.to(tl.float32)
        bits = tl.reshape(is_minus.to(tl.int32), (AT_ONCE * COLUMNS,))
        bytes_ = tl.reshape(packed(bits, AT_ONCE * COLUMNS, 1), (AT_ONCE, COLUMNS // 8))
        is_byte = (byte < limit((numel - start + 7) // 8, False)) & (byte_column < width // 8)[None, :]
        tl.store(at_bits + start // 8 + byte, bytes_.to(tl.uint8), mask=is_byte)
    flag_not_finite(sum_plus + sum_minus, not_finite)
    at_sums += high * width + column
    tl.store(at_sums, tl.sum(sum_plus, axis=0), mask=is_column)
    tl.store(at_sums + sums_stride.to(tl.int64), tl.sum(sum_minus, axis=0), mask=is_column)
    tl.store(at_sums + 2 * sums_stride.to(tl.int64), tl.sum(num_minus, axis=0), mask=is_column)


@triton.jit(do_not_specialize=["num_means", "sums_stride"])
def _means_of_columns(
    tensor_of, fields, sums, sums_stride, first_means, second_means, turn, num_means, floats,
    AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, part = part_of(tensor_of, fields, WIDTH)
    columns = tl.load(row)
    num_rows = tl.load(row + 1)
    num_lines = tl.load(row + 2)
    means_of = tl.load(row + 3)
    at_sums = sums + tl.load(row + 4)
    at_message = floats + tl.load(row + 5)
    new_means = second_means
    if tl.load(turn) != 0:
        new_means = first_means
    column = part.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    sum_plus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float64)
    sum_minus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float64)
    num_minus = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float64)
    begin = num_lines * 0
    while begin < num_lines:
        line = begin + tl.arange(0, AT_ONCE)
        here = (line < num_lines)[:, None] & is_column[None, :]
        at = at_sums + line[:, None] * columns + column[None, :]
        sum_plus += tl.load(at, mask=here, other=0.0)
        sum_minus += tl.load(at + sums_stride.to(tl.int64), mask=here, other=0.0)
        num_minus += tl.load(at + 2 * sums_stride.to(tl.int64), mask=here, other=0.0)
        begin += AT_ONCE
    below = tl.sum(num_minus, axis=0)
    above = num_rows - below
    plus = (tl.sum(sum_plus, axis=0) / tl.maximum(above, 1.0)).to(tl.float32)
    minus = (tl.sum(sum_minus, axis=0) / tl.maximum(below, 1.0)).to(tl.float32)
    tl.store(new_means + means_of + column, plus, mask=is_column)
    tl.store(new_means + num_means + means_of + column, minus, mask=is_column)
    tl.store(at_message + column, plus, mask=is_column)
    tl.store(at_message + columns + column, minus, mask=is_column)


@triton.jit(do_not_specialize=["stride"])
def _decode_tiles(
    tensor_of, fields, received, floats, stride, values, scale,
    IS_ALIGNED: tl.constexpr, NUM_REPLICAS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, tile = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    numel = tl.load(row + 1)
    columns = tl.load(row + 2)
    width = tl.load(row + 3)
    num_wide = tl.load(row + 4)
    at_means = floats + tl.load(row + 7)
    at_bits = received + tl.load(row + 8)
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 8)
        numel = tl.multiple_of(numel, 8)
        width = tl.multiple_of(width, 8)
    factor = tl.load(scale).to(tl.float32)
    high = tile // num_wide
    column = ((tile % num_wide) * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    is_column = column < width
    line = tl.arange(0, AT_ONCE)[:, None]
    has_means = (line >= 0) & is_column[None, :]
    mean_column = line * 0 + (column % columns.to(tl.int32))[None, :]
    entry = line * tl.multiple_of(width.to(tl.int32), 8) + column[None, :]
    for step in range(ROWS // AT_ONCE):
        start = (high * ROWS + step * AT_ONCE) * width
        here = (entry < limit(numel - start, IS_ALIGNED)) & is_column[None, :]
        total = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
        for replica in range(NUM_REPLICAS):
            message = replica * stride.to(tl.int64)
            of_plus = tl.load(at_means + message // 4 + mean_column, mask=has_means, other=0.0)
            of_minus = tl.load(at_means + message // 4 + columns + mean_column, mask=has_means, other=0.0)
            bit = unpacked(at_bits + message + start // 8, entry, here, 1)
            total += tl.where(bit != 0, of_minus, of_plus)
        tl.store(values + (offset + start) + entry, total * factor, mask=here)
