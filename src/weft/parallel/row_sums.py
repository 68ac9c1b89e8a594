"""Functions along a dim of images split by rows: along others than height they stay with each rank, along height some
are sums, which ranks add up instead of making the map whole.

    mean, sum, global average pooling      one all-reduce of what is left over
    GroupNorm, InstanceNorm                two: of sums, and of squared deviations, as one process would take them
    softmax, amax, var, ... along height   the map is made whole
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.parallel.row_functions import HEIGHT_DIM, add_ranks
from weft.parallel.row_join import elementwise, join_first, marked
from weft.parallel.row_tensor import Function, Rows, RowTensor, Rule, mark, rows_of

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose sums are taken in float32, as torch does inside."""


def along(place: int, default: int | None = None) -> Rule:
    """A function whose dims are its argument at this place, or called `dim`."""

    def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rows = args[0] if args else None, rows_of(args[0] if args else None)
        dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
        if isinstance(dims, torch.Tensor):  # torch.max(x, y) and the like
            return elementwise(func, args, kwargs)
        if rows is None or x is None or dims is None or isinstance(dims, bool | str) or "out" in kwargs:
            return join_first(func, args, kwargs)
        reduced = _dims(dims, x.dim())
        if rows.dim in reduced:
            return join_first(func, args, kwargs)
        made = func(*args, **kwargs)
        for one in made if isinstance(made, tuple) else (made,):
            kept = one.dim() == x.dim()
            marked(one, rows if kept else rows.at(rows.dim - sum(dim < rows.dim for dim in reduced)))
        return made

    return run


def total(is_mean: bool) -> Rule:
    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(
            input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
        ) -> Any:
            rows, dims = rows_of(input), dim if axis is None else axis
            if rows is None or not input.is_floating_point():
                return join_first(func, args, kwargs)
            reduced = _dims(dims, input.dim())
            if rows.dim not in reduced:
                return along(1)(func, (input, reduced, keepdim), {"dtype": dtype})
            scale = 1 / math.prod(rows.whole_shape(input.shape)[one] for one in reduced) if is_mean else 1.0
            made = _sum_over(input, reduced, keepdim, rows) * scale
            return made.to(input.dtype if dtype is None else dtype)

        return join_first(func, args, kwargs) if "out" in kwargs else run(*args, **kwargs)

    return rule


def _sum_over(x: torch.Tensor, dims: Sequence[int], keepdim: bool, rows: Rows) -> torch.Tensor:
    wide = torch.float32 if x.dtype in NARROW else x.dtype
    return add_ranks(x.sum(list(dims), keepdim, dtype=wide), rows.group)


def global_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adaptive average pooling to one pixel is a mean; to more of them it needs the whole map."""

    def run(input: torch.Tensor, output_size: Any) -> Any:
        sizes = (output_size, output_size) if output_size is None or isinstance(output_size, int) else output_size
        if tuple(sizes) != (1, 1) or _rows_of_images(input) is None:
            return join_first(func, args, kwargs)
        return total(True)(torch.mean, (input, (HEIGHT_DIM, HEIGHT_DIM + 1), True), {})

    return run(*args, **kwargs)


def group_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        if _rows_of_images(input) is None or input.shape[1] % num_groups:
            return join_first(func, args, kwargs)
        return normalised(input, num_groups, weight, bias, eps)  # type: ignore[arg-type]

    return run(*args, **kwargs)


def instance_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(
        input: torch.Tensor,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if _rows_of_images(input) is None or running_mean is not None or not use_input_stats:
            return join_first(func, args, kwargs)
        return normalised(input, input.shape[1], weight, bias, eps)  # type: ignore[arg-type]

    return run(*args, **kwargs)


def normalised(
    x: RowTensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> RowTensor:
    """Each image and group of channels by its mean and variance over all rows."""
    rows = x.weft_rows
    samples, channels, num_own, width = x.shape
    wide = x.float() if x.dtype in NARROW else x
    grouped = wide.reshape(samples, num_groups, channels // num_groups, num_own, width)
    count = channels // num_groups * rows.height * width
    mean = _sum_over(grouped, (2, 3, 4), True, rows) / count
    centred = grouped - mean
    variance = _sum_over(centred.square(), (2, 3, 4), True, rows) / count
    made = (centred * torch.rsqrt(variance + eps)).reshape(x.shape)
    if weight is not None:
        made = made * weight.view(-1, 1, 1)
    if bias is not None:
        made = made + bias.view(-1, 1, 1)
    return mark(made.to(x.dtype), rows)


def on_last_dims(num_dims: Callable[[tuple[Any, ...], dict[str, Any]], int]) -> Rule:
    """A function of the last dims, so many of them."""

    def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = rows_of(args[0]) if args else None
        others = [*args[1:], *kwargs.values()]
        if rows is None or any(rows_of(one) is not None for one in others):
            return join_first(func, args, kwargs)
        if rows.dim >= args[0].dim() - num_dims(args, kwargs):
            return join_first(func, args, kwargs)
        return marked(func(*args, **kwargs), rows)

    return run


def matmul(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a matrix on the right it is a linear layer; other products are of whole maps."""
    is_linear = len(args) == 2 and isinstance(args[0], RowTensor) and args[1].dim() == 2
    return (_linear if is_linear else join_first)(func, args, kwargs)


def _num_normalised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return 1 if isinstance(shape, int) else len(shape)


def _dims(dims: Any, num_dims: int) -> list[int]:
    """Dims as a list of numbers from 0; none are all of them."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(num_dims))
    return [dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)]


def _rows_of_images(x: torch.Tensor) -> Rows | None:
    rows = rows_of(x)
    return rows if rows is not None and rows.dim == HEIGHT_DIM and x.dim() == 4 else None


_linear = on_last_dims(lambda args, kwargs: 1)

REDUCED = "amax amin argmax argmin max min logsumexp var std prod any all".split()
KEPT = "softmax log_softmax softmin cumsum cumprod flip".split()

RULES: tuple[tuple[list[str], Rule], ...] = (
    (REDUCED + KEPT, along(1)),
    (["normalize"], along(2, 1)),
    (["glu"], along(1, -1)),
    (["sum"], total(False)),
    (["mean"], total(True)),
    (["adaptive_avg_pool2d"], global_pool),
    (["group_norm"], group_norm),
    (["instance_norm"], instance_norm),
    (["layer_norm", "rms_norm"], on_last_dims(_num_normalised)),
    (["linear"], _linear),
    (["matmul", "__matmul__"], matmul),
)
