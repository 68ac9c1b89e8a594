"""Convolutions, pools and padding on images split by rows: fetch the missing rows of the windows, then call torch.

There is padding above the image's first row and below its last (zeros or, for a maximum, minus infinity), and none
between ranks. So torch is called without padding along height, on all rows that the windows cover. A rank that makes no
rows computes one from empty rows and drops it, so that weights and exchanges are part of its graph as on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from weft.parallel.spatial.halo import fetch_halo, kept_in_parts
from weft.parallel.spatial.join import JOIN
from weft.parallel.spatial.row_tensor import HEIGHT_DIM, Function, RowTensor, mark, rows_of, rows_of_images
from weft.plan.partition.rows import Window, exchange_for, window_counts

Sizes = int | Sequence[int]


def on_windows(
    x: RowTensor, window: Window, compute: Callable[[torch.Tensor], torch.Tensor], fill: float = 0.0
) -> RowTensor:
    """Apply a function without padding along height to all rows that this rank's windows cover."""
    rows = x.weft_rows
    group = rows.group
    exchange = exchange_for(window, rows.height, group.size)
    made = exchange.make[group.index]
    if exchange.spans == exchange.have:
        result = compute(x)
    else:
        covered = fetch_halo(x, exchange, group, fill)
        if made[0] == made[1]:
            result = compute(F.pad(covered, (0, 0, 0, window.reach))).narrow(HEIGHT_DIM, 0, 0)
        else:
            with kept_in_parts(covered, x, exchange, group):
                result = compute(covered)
    return mark(result, rows.at(HEIGHT_DIM, exchange.out_height))


def conv2d(
    func: Function,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    strides, dilations = _pair(stride), _pair(dilation)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        (above, left), (below, right) = [t // 2 for t in totals], [t - t // 2 for t in totals]
    else:
        above, left = (0, 0) if padding == "valid" else _pair(padding)  # type: ignore[arg-type]
        below, right = above, left
    kernel = weight.shape[HEIGHT_DIM]
    window = Window(kernel=kernel, stride=strides[0], before=above, after=below, dilation=dilations[0])
    if not (has_windows(input, window) and rows_of(weight) is rows_of(bias) is None):
        return JOIN

    def compute(covered: torch.Tensor) -> torch.Tensor:
        if right > left:  # torch, too, pads the odd column of "same" separately
            covered = F.pad(covered, (0, right - left))
        return F.conv2d(covered, weight, bias, strides, (0, left), dilations, groups)

    return on_windows(input, window, compute)


def max_pool2d(
    func: Function,
    input: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernels, dilations = _pair(kernel_size), _pair(dilation)
    strides, (above, left) = _pair(stride) if stride else kernels, _pair(padding)
    window = Window(
        kernel=kernels[0], stride=strides[0], before=above, after=above, dilation=dilations[0], ceil=ceil_mode
    )
    if return_indices or not (_is_poolable(input, window) and input.is_floating_point()):
        return JOIN
    return on_windows(
        input,
        window,
        lambda covered: torch.max_pool2d(covered, kernels, strides, (0, left), dilations, ceil_mode),
        fill=-math.inf,
    )


def avg_pool2d(
    func: Function,
    input: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernels, (above, left) = _pair(kernel_size), _pair(padding)
    strides = _pair(stride) if stride else kernels
    window = Window(kernel=kernels[0], stride=strides[0], before=above, after=above, ceil=ceil_mode)
    if not _is_poolable(input, window):
        return JOIN
    rows = input.weft_rows
    made = exchange_for(window, rows.height, rows.group.size).make[rows.group.index]
    counts = window_counts(window, rows.height, made, counts_padding=count_include_pad)

    def compute(covered: torch.Tensor) -> torch.Tensor:
        pooled = F.avg_pool2d(covered, kernels, strides, (0, left), ceil_mode, count_include_pad, divisor_override)
        if divisor_override is not None or all(count == kernels[0] for count in counts):
            return pooled
        # torch has divided by full windows, because it was not told where the image ends.
        return pooled * pooled.new_tensor([kernels[0] / count for count in counts]).view(-1, 1)

    return on_windows(input, window, compute)


def pad(
    func: Function, input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    rows = rows_of(input)
    if rows is None:
        return JOIN
    first = 2 * (input.dim() - 1 - rows.dim)
    above, below = pad[first : first + 2] if len(pad) > first else (0, 0)
    has_all = rows.height >= rows.group.size
    if above == below == 0 and (has_all or mode == "constant"):  # other modes need at least one row
        return mark(func(input, pad, mode, value), rows)
    window = Window(before=above, after=below)
    if mode != "constant" or not has_windows(input, window):
        return JOIN
    others = [*pad[:first], 0, 0, *pad[first + 2 :]]
    fill = value or 0.0
    made = on_windows(input, window, lambda covered: covered, fill)
    return mark(F.pad(made, others, value=fill), made.weft_rows) if any(others) else made


def has_windows(input: torch.Tensor, window: Window) -> TypeGuard[RowTensor]:
    """True if this is rows of images that the window fits; otherwise torch reports what is wrong."""
    rows = rows_of_images(input)
    return rows is not None and window.out_height(rows.height) > 0


def _is_poolable(input: torch.Tensor, window: Window) -> TypeGuard[RowTensor]:
    """torch refuses to pad by more than half a window."""
    return 2 * window.before <= window.kernel and has_windows(input, window)


def _pair(sizes: Sizes) -> tuple[int, int]:
    """Sizes along height and width, from torch's one or two numbers."""
    if isinstance(sizes, int):
        return sizes, sizes
    height, width = sizes if len(sizes) == 2 else (*sizes, *sizes)
    return height, width
