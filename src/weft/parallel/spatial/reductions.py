"""Functions along a dim of images split by rows: along others than height they stay with each rank, along height some
are sums, which ranks add up instead of making the map whole.

    mean, sum, global average pooling      one all-reduce of what is left over
    softmax, amax, var, ... along height   the map is made whole

Norms over rows are sums, too, and have a file of their own (`norms.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.parallel.spatial.halo import add_ranks
from weft.parallel.spatial.join import elementwise, join_first, marked
from weft.parallel.spatial.row_tensor import (
    HEIGHT_DIM,
    Function,
    Rows,
    RowTensor,
    Rule,
    rows_of,
    rows_of_images,
    wide_dtype,
)


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
    return add_ranks(x.sum(list(dims), keepdim, dtype=wide_dtype(x.dtype)), rows.group)


def global_pool(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adaptive average pooling to one pixel is a mean; to more of them it needs the whole map."""

    def run(input: torch.Tensor, output_size: Any) -> Any:
        sizes = (output_size, output_size) if output_size is None or isinstance(output_size, int) else output_size
        if tuple(sizes) != (1, 1) or rows_of_images(input) is None:
            return join_first(func, args, kwargs)
        return total(True)(torch.mean, (input, (HEIGHT_DIM, HEIGHT_DIM + 1), True), {})

    return run(*args, **kwargs)


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
    (["layer_norm", "rms_norm"], on_last_dims(_num_normalised)),
    (["linear"], _linear),
    (["matmul", "__matmul__"], matmul),
)
