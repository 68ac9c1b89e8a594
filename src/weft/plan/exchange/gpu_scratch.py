"""The memory that codecs' kernels on a GPU need beside what codecs keep: notes of elements, sums of parts of tensors.

`codecs/triton_kernels/` cuts tensors into parts as these functions say, and a test compares the bytes. Tables of which
part is whose, and what is made anew in every exchange, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.low_rank import rank_of
from weft.plan.exchange.quantised import onebit_rows
from weft.plan.exchange.sparse import sample_size
from weft.plan.plan import Codec

NOTED_BLOCK, NOTES, COUNT_COPIES = 4096, 256, 16
"""topk and dgc: elements of a block, room for noted ones of them, and copies of the counts of a tensor's digits."""
ONEBIT_COLUMNS = 1024
"""Columns of a tile of onebit."""
LOW_RANK_COLUMNS, MAX_RANK = 512, 8
"""powersgd: columns of a part whose right factor is summed, and the largest rank that has kernels."""
_NUM_DIGITS = 256
_ENOUGH_PROGRAMS = 4096


def scratch_bytes(codec: Codec, tensors: Sequence[CodedTensor], dtype: str, *, num_copies: int) -> int:
    """Bytes of a bucket of these tensors; `num_copies`: of what is kept. Only float32 has kernels."""
    if dtype != "float32":
        return 0
    match codec.name:
        case "topk" | "dgc":
            notes = sum(-(-one.numel // NOTED_BLOCK) for one in tensors) * (2 * NOTES + 4)
            counts = 2 * len(tensors) * 4 * (COUNT_COPIES * _NUM_DIGITS + 5)
            return notes + counts + sum(4 * sample_size(one.numel) + 8 * -(-one.numel // 65_536) for one in tensors)
        case "onebit":
            kept_means = num_copies * 2 * sum(one.num_columns for one in tensors)
            return 4 * (3 * num_column_sums(tensors) + kept_means)
        case "powersgd" if codec.rank <= MAX_RANK:
            rows = rows_of_part(sum(one.num_rows * one.num_columns for one in tensors))
            return sum(4 * -(-one.num_rows // rows) * rank_of(codec, one) * one.num_columns for one in tensors)
        case _:
            return 0


def num_column_sums(tensors: Sequence[CodedTensor]) -> int:
    """Sums of onebit's columns: one per column of every tile."""
    rows, found = rows_of_tile(sum(one.numel for one in tensors)), 0
    for one in tensors:
        num_rows = onebit_rows(one)
        width = rows_together(one.num_columns, num_rows) * one.num_columns
        found += -(-num_rows * one.num_columns // (width * rows)) * width
    return found


def rows_together(columns: int, num_rows: int) -> int:
    """Rows of the matrix that make a wide row: a multiple of 8 elements, in few tiles with little room left."""
    least = 8 // math.gcd(8, columns)
    most = max(1, min(-(-8 * ONEBIT_COLUMNS // (least * columns)), num_rows // least))
    choices = [least * times for times in range(1, most + 1)]
    return min(choices, key=lambda count: (-(-count * columns // ONEBIT_COLUMNS) / (count * columns), count))


def rows_of_tile(numel: int) -> int:
    """Wide rows of a tile of onebit, in a bucket of so many elements."""
    return _rows(numel, ONEBIT_COLUMNS, least=16, most=256)


def rows_of_part(numel: int) -> int:
    """Rows of a part whose right factor powersgd sums, in a bucket of so many elements."""
    return _rows(numel, LOW_RANK_COLUMNS, least=32, most=512)


def _rows(numel: int, columns: int, *, least: int, most: int) -> int:
    """A power of two, such that there are enough programs for a GPU."""
    wanted = max(1, numel // (columns * _ENOUGH_PROGRAMS))
    return max(least, min(most, 1 << wanted.bit_length() - 1))
