"""Two outputs of attention merged by their log-sum-exps in one pass through a GPU's memory; needs Triton.

`merge.py` does the same in torch's functions, and imports this where it can be used.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of the output per program."""


def merge(out_BHQE: Tensor, lse_BHQ: Tensor, new_BHQE: Tensor, new_lse_BHQ: Tensor, result_BHQE: Tensor) -> None:
    """Write the result, which may be `out` itself, and update `lse`. The last dim is contiguous."""
    batch, heads, queries, width = out_BHQE.shape
    num_rows = batch * heads * queries
    tensors, sizes = (out_BHQE, lse_BHQ, new_BHQE, new_lse_BHQ, result_BHQE), (heads, queries, width, num_rows)
    strides = (stride for one in tensors for stride in one.stride()[:3])
    grid = (triton.cdiv(num_rows, _ROWS),)
    _merge_rows[grid](*tensors, *sizes, *strides, ROWS=_ROWS, WIDTH=triton.next_power_of_2(width))


@triton.jit
def _merge_rows(
    out, lse, new, new_lse, result,
    heads, queries, width, num_rows,
    out_b, out_h, out_t,
    lse_b, lse_h, lse_t,
    new_b, new_h, new_t,
    new_lse_b, new_lse_h, new_lse_t,
    result_b, result_h, result_t,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    b, h, t = row // (heads * queries), row // queries % heads, row % queries
    at_lse = lse + b * lse_b + h * lse_h + t * lse_t
    old_lse = tl.load(at_lse, mask=is_row, other=0.0)
    add_lse = tl.load(new_lse + b * new_lse_b + h * new_lse_h + t * new_lse_t, mask=is_row, other=0.0)
    largest = tl.maximum(old_lse, add_lse)
    is_seen = largest > -float("inf")
    of_new = tl.where(is_seen, tl.exp(add_lse - largest), 0.0)
    both = tl.where(is_seen, tl.exp(old_lse - largest), 1.0) + of_new
    tl.store(at_lse, tl.where(is_seen, largest + tl.log(both), largest), mask=is_row)
    share = (of_new / both)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    is_entry = is_row[:, None] & (column < width)
    old = tl.load(out + (b * out_b + h * out_h + t * out_t)[:, None] + column, mask=is_entry, other=0.0).to(tl.float32)
    add = tl.load(new + (b * new_b + h * new_h + t * new_t)[:, None] + column, mask=is_entry, other=0.0).to(tl.float32)
    to = result + (b * result_b + h * result_h + t * result_t)[:, None] + column
    tl.store(to, old + share * (add - old), mask=is_entry)
