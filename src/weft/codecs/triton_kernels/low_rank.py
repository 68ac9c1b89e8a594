"""powersgd's products on a GPU, of all matrices of a bucket in one launch per pass; needs Triton.

    left     x = values + keep · kept, written where the new state is, and the left factor x Q in the same pass
    right    the right factor xᵀ P, of parts of the rows, whose sums are then added in order
    expand   P Qᵀ into the values, and x - P Qᵀ / number of replicas where x was, in one pass

Factors lie as in `codecs/low_rank.py`: [rank, row] and [rank, column]. They are so thin that the products take
no time beside reading the matrices, so no matrix units are used, and float32 is added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.codecs.triton_kernels.common import NUM_WARPS, flag_not_finite, part_of
from weft.codecs.triton_kernels.tables import Bucket, Kept, Numbers, Table, Turns, are_aligned
from weft.plan.exchange.gpu_scratch import LOW_RANK_COLUMNS, rows_of_part

_LEFT_ROWS, _LEFT_COLUMNS = 8, 256
_ROWS_AT_ONCE = 4
_SUM_COLUMNS, _SUM_PARTS = 64, 32
_EXPANDED_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix in the flat buffer of values, and its factors in the messages."""

    offset: int
    num_rows: int
    num_columns: int
    rank: int
    left_offset: int
    right_offset: int


class LowRankKernels:
    """The passes over one bucket."""

    def __init__(self, bucket: Bucket, matrices: Sequence[Matrix]) -> None:
        device = bucket.device
        self._rank = max((one.rank for one in matrices), default=1)
        self._rows = rows_of_part(sum(one.num_rows * one.num_columns for one in matrices))
        fields, sum_fields, high, wide, sums_at = [], [], [], [], 0
        for one in matrices:
            high.append(-(-one.num_rows // self._rows))
            wide.append(-(-one.num_columns // LOW_RANK_COLUMNS))
            numbers = [one.offset, one.num_rows, one.num_columns, one.rank, one.left_offset, one.right_offset]
            fields.append([*numbers, sums_at])
            sum_fields.append([one.num_columns, one.rank, high[-1], one.right_offset, sums_at])
            sums_at += high[-1] * one.rank * one.num_columns
        self._lefts = Table([-(-one.num_rows // _LEFT_ROWS) for one in matrices], fields, device)
        self._rights = Table([rows * columns for rows, columns in zip(high, wide, strict=True)], fields, device)
        self._expansions = Table(
            [-(-one.num_rows // _EXPANDED_ROWS) * columns for one, columns in zip(matrices, wide, strict=True)],
            fields,
            device,
        )
        parts = [-(-one.num_columns // _SUM_COLUMNS) * one.rank for one in matrices]
        self._totals = Table(parts, sum_fields, device)
        self._sums = torch.zeros(max(sums_at, 1), dtype=torch.float32, device=device)
        self._is_aligned = are_aligned([number for one in matrices for number in (one.offset, one.num_columns)], 4)
        self._numbers, self._turns = Numbers(device), Turns(device)

    def left(
        self,
        values: torch.Tensor,
        residual: Kept,
        keep: float | torch.Tensor,
        start: torch.Tensor,
        message: torch.Tensor,
        not_finite: torch.Tensor,
    ) -> None:
        table = self._lefts
        with torch.cuda.device_of(values):
            _left_factors[(table.num_programs,)](
                table.tensor_of, table.fields, values, *self._turns(residual), self._numbers.float64(keep), start,
                message, not_finite,
                RANK=self._rank, IS_ALIGNED=self._is_aligned, ROWS=_LEFT_ROWS, COLUMNS=_LEFT_COLUMNS,
                WIDTH=table.width, num_warps=NUM_WARPS,
            )  # fmt: skip

    def right(self, left: torch.Tensor, residual: Kept, message: torch.Tensor) -> None:
        table, totals = self._rights, self._totals
        with torch.cuda.device_of(left):
            _right_factors[(table.num_programs,)](
                table.tensor_of, table.fields, *self._turns(residual), left, self._sums,
                RANK=self._rank, IS_ALIGNED=self._is_aligned, ROWS=self._rows, AT_ONCE=_ROWS_AT_ONCE,
                COLUMNS=LOW_RANK_COLUMNS, WIDTH=table.width, num_warps=NUM_WARPS,
            )  # fmt: skip
            _add_parts[(totals.num_programs,)](
                totals.tensor_of, totals.fields, self._sums, message,
                PARTS=_SUM_PARTS, COLUMNS=_SUM_COLUMNS, WIDTH=totals.width, num_warps=4,
            )  # fmt: skip

    def expand(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        residual: Kept,
        values: torch.Tensor,
        *,
        scale: float,
        share: float,
    ) -> None:
        table = self._expansions
        with torch.cuda.device_of(values):
            _expand_tiles[(table.num_programs,)](
                table.tensor_of, table.fields, *self._turns(residual), left, right, values,
                self._numbers.float64(scale), self._numbers.float64(share),
                RANK=self._rank, IS_ALIGNED=self._is_aligned, ROWS=_EXPANDED_ROWS, AT_ONCE=_ROWS_AT_ONCE,
                COLUMNS=LOW_RANK_COLUMNS, WIDTH=table.width, num_warps=NUM_WARPS,
            )  # fmt: skip


@triton.jit
def _term(x, factor, number, rank, row, here, distance):
    """x times one row of a factor, 0 beyond the rank."""
    return x * tl.load(factor + number * distance + row, mask=here & (number < rank), other=0.0)


@triton.jit
def _left_factors(
    tensor_of, fields, values, first, second, turn, keep, start, message, not_finite,
    RANK: tl.constexpr, IS_ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, part = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    num_rows = tl.load(row + 1)
    num_columns = tl.load(row + 2).to(tl.int32)
    rank = tl.load(row + 3)
    left = message + tl.load(row + 4)
    right = start + tl.load(row + 5)
    old = first
    new = second
    if tl.load(turn) != 0:
        old = second
        new = first
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 4)
        num_columns = tl.multiple_of(num_columns, 4)
        old = tl.multiple_of(old, 16)
        new = tl.multiple_of(new, 16)
    factor = tl.load(keep).to(tl.float32)
    line = tl.arange(0, ROWS)
    first_line = part.to(tl.int64) * ROWS
    at = offset + first_line * num_columns
    is_line = (first_line + line < num_rows)[:, None]
    acc0 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    acc4 = acc0
    acc5 = acc0
    acc6 = acc0
    acc7 = acc0
    begin = num_columns * 0
    while begin < num_columns:
        column = begin + tl.arange(0, COLUMNS)[None, :]
        is_column = column < num_columns
        here = is_line & is_column
        entry = line[:, None] * num_columns + column
        g = tl.load(values + at + entry, mask=here, other=0.0)
        x = g + factor * tl.load(old + at + entry, mask=here, other=0.0)
        tl.store(new + at + entry, x, mask=here)
        acc0 += _term(x, right, 0, rank, column, is_column, num_columns)
        if RANK > 1:
            acc1 += _term(x, right, 1, rank, column, is_column, num_columns)
        if RANK > 2:
            acc2 += _term(x, right, 2, rank, column, is_column, num_columns)
        if RANK > 3:
            acc3 += _term(x, right, 3, rank, column, is_column, num_columns)
        if RANK > 4:
            acc4 += _term(x, right, 4, rank, column, is_column, num_columns)
        if RANK > 5:
            acc5 += _term(x, right, 5, rank, column, is_column, num_columns)
        if RANK > 6:
            acc6 += _term(x, right, 6, rank, column, is_column, num_columns)
        if RANK > 7:
            acc7 += _term(x, right, 7, rank, column, is_column, num_columns)
        begin += COLUMNS
    flag_not_finite(acc0, not_finite)  # what is not finite stays so, even times 0
    to = left + first_line + line
    is_there = first_line + line < num_rows
    tl.store(to, tl.sum(acc0, axis=1), mask=is_there)
    if RANK > 1:
        tl.store(to + num_rows, tl.sum(acc1, axis=1), mask=is_there & (rank > 1))
    if RANK > 2:
        tl.store(to + 2 * num_rows, tl.sum(acc2, axis=1), mask=is_there & (rank > 2))
    if RANK > 3:
        tl.store(to + 3 * num_rows, tl.sum(acc3, axis=1), mask=is_there & (rank > 3))
    if RANK > 4:
        tl.store(to + 4 * num_rows, tl.sum(acc4, axis=1), mask=is_there & (rank > 4))
    if RANK > 5:
        tl.store(to + 5 * num_rows, tl.sum(acc5, axis=1), mask=is_there & (rank > 5))
    if RANK > 6:
        tl.store(to + 6 * num_rows, tl.sum(acc6, axis=1), mask=is_there & (rank > 6))
    if RANK > 7:
        tl.store(to + 7 * num_rows, tl.sum(acc7, axis=1), mask=is_there & (rank > 7))


@triton.jit
def _right_factors(
    tensor_of, fields, first, second, turn, lefts, sums,
    RANK: tl.constexpr, IS_ALIGNED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, part = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    num_rows = tl.load(row + 1)
    num_columns = tl.load(row + 2).to(tl.int32)
    rank = tl.load(row + 3)
    left = lefts + tl.load(row + 4)
    new = second
    if tl.load(turn) != 0:
        new = first
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 4)
        num_columns = tl.multiple_of(num_columns, 4)
        new = tl.multiple_of(new, 16)
    num_wide = (num_columns + COLUMNS - 1) // COLUMNS
    high = (part // num_wide).to(tl.int64)
    column = (part % num_wide).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < num_columns)[None, :]
    line = tl.arange(0, AT_ONCE)[:, None]
    entry = line * num_columns + column[None, :]
    acc0 = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    acc4 = acc0
    acc5 = acc0
    acc6 = acc0
    acc7 = acc0
    for step in range(ROWS // AT_ONCE):
        begin = high * ROWS + step * AT_ONCE
        is_line = begin + line < num_rows
        x = tl.load(new + (offset + begin * num_columns) + entry, mask=is_line & is_column, other=0.0)
        at = begin + line
        acc0 += _term(x, left, 0, rank, at, is_line, num_rows)
        if RANK > 1:
            acc1 += _term(x, left, 1, rank, at, is_line, num_rows)
        if RANK > 2:
            acc2 += _term(x, left, 2, rank, at, is_line, num_rows)
        if RANK > 3:
            acc3 += _term(x, left, 3, rank, at, is_line, num_rows)
        if RANK > 4:
            acc4 += _term(x, left, 4, rank, at, is_line, num_rows)
        if RANK > 5:
            acc5 += _term(x, left, 5, rank, at, is_line, num_rows)
        if RANK > 6:
            acc6 += _term(x, left, 6, rank, at, is_line, num_rows)
        if RANK > 7:
            acc7 += _term(x, left, 7, rank, at, is_line, num_rows)
    to = sums + tl.load(row + 6) + high * rank * num_columns + column
    is_there = column < num_columns
    tl.store(to, tl.sum(acc0, axis=0), mask=is_there)
    if RANK > 1:
        tl.store(to + num_columns, tl.sum(acc1, axis=0), mask=is_there & (rank > 1))
    if RANK > 2:
        tl.store(to + 2 * num_columns, tl.sum(acc2, axis=0), mask=is_there & (rank > 2))
    if RANK > 3:
        tl.store(to + 3 * num_columns, tl.sum(acc3, axis=0), mask=is_there & (rank > 3))
    if RANK > 4:
        tl.store(to + 4 * num_columns, tl.sum(acc4, axis=0), mask=is_there & (rank > 4))
    if RANK > 5:
        tl.store(to + 5 * num_columns, tl.sum(acc5, axis=0), mask=is_there & (rank > 5))
    if RANK > 6:
        tl.store(to + 6 * num_columns, tl.sum(acc6, axis=0), mask=is_there & (rank > 6))
    if RANK > 7:
        tl.store(to + 7 * num_columns, tl.sum(acc7, axis=0), mask=is_there & (rank > 7))


@triton.jit
def _add_parts(
    tensor_of, fields, sums, message, PARTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Sums of parts of the rows, [part, rank, column], added up for some columns of one row of the factor."""
    tensor, row, piece = part_of(tensor_of, fields, WIDTH)
    num_columns = tl.load(row)
    rank = tl.load(row + 1)
    num_parts = tl.load(row + 2)
    number = piece % rank
    column = (piece // rank) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    at = sums + tl.load(row + 4) + number * num_columns + column
    total = tl.zeros((PARTS, COLUMNS), dtype=tl.float32)
    begin = num_parts * 0
    while begin < num_parts:
        part = begin + tl.arange(0, PARTS)
        here = (part < num_parts)[:, None] & is_column[None, :]
        total += tl.load(at[None, :] + part[:, None] * (rank * num_columns), mask=here, other=0.0)
        begin += PARTS
    to = message + tl.load(row + 3) + number * num_columns + column
    tl.store(to, tl.sum(total, axis=0), mask=is_column)


@triton.jit
def _expand_tiles(
    tensor_of, fields, first, second, turn, lefts, rights, values, scale, share,
    RANK: tl.constexpr, IS_ALIGNED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    tensor, row, part = part_of(tensor_of, fields, WIDTH)
    offset = tl.load(row)
    num_rows = tl.load(row + 1)
    num_columns = tl.load(row + 2).to(tl.int32)
    rank = tl.load(row + 3)
    left = lefts + tl.load(row + 4)
    right = rights + tl.load(row + 5)
    new = second
    if tl.load(turn) != 0:
        new = first
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, 4)
        num_columns = tl.multiple_of(num_columns, 4)
        new = tl.multiple_of(new, 16)
    of_sum = tl.load(scale).to(tl.float32)
    of_own = tl.load(share).to(tl.float32)
    num_wide = (num_columns + COLUMNS - 1) // COLUMNS
    high = (part // num_wide).to(tl.int64)
    column = ((part % num_wide).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_column = column < num_columns
    line = tl.arange(0, AT_ONCE)[:, None]
    entry = line * num_columns + column
    for step in range(ROWS // AT_ONCE):
        begin = high * ROWS + step * AT_ONCE
        is_line = begin + line < num_rows
        here = is_line & is_column
        total = tl.zeros((AT_ONCE, COLUMNS), dtype=tl.float32)
        for number in tl.static_range(RANK):
            p = tl.load(left + number * num_rows + begin + line, mask=is_line & (number < rank), other=0.0)
            total += _term(p, right, number, rank, column, is_column, num_columns)
        at = offset + begin * num_columns
        x = tl.load(new + at + entry, mask=here, other=0.0)
        tl.store(values + at + entry, of_sum * total, mask=here)
        tl.store(new + at + entry, x - of_own * total, mask=here)
