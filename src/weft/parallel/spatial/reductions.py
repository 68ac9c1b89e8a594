"""Functions along a dim of images split by rows.

    along other dims than height           each rank computes on its rows
    mean, sum, global average pooling      along height: one all-reduce of the reduced tensors
    softmax, amax, var, ... along height   the map is gathered

Norms over rows are in `norms.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.dtypes import accumulator_dtype
from weft.parallel.spatial.halo import add_ranks
from weft.parallel.spatial.join import JOIN, elementwise, marked
from weft.parallel.spatial.row_tensor import HEIGHT_DIM, Function, RowTensor, Rule, rows_of, rows_of_images


def along(place: int, default: int | None = None) -> Rule:
    """The rule of a function whose dims are its argument at this place, or named `dim`."""

    def run(func: Function, *args: Any, **kwargs: Any) -> Any:
        x, rows = args[0] if args else None, rows_of(args[0] if args else None)
        dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
        if isinstance(dims, torch.Tensor):  # torch.max(x, y) and the like
            return elementwise(func, *args, **kwargs)
        if rows is None or x is None or dims is None or isinstance(dims, bool | str) or "out" in kwargs:
            return JOIN
        reduced = _dims(dims, x.dim())
        if rows.dim in reduced:
            return JOIN
        made = func(*args, **kwargs)
        for one in made if isinstance(made, tuple) else (made,):
            kept = one.dim() == x.dim()
            marked(one, rows if kept else rows.at(rows.dim - sum(dim < rows.dim for dim in reduced)))
        return made

    return run


def total(
    func: Function,
    input: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    axis: Any = None,
    out: Any = None,
) -> Any:
    """A sum or a mean."""
    rows = rows_of(input)
    if rows is None or out is not None or not input.is_floating_point():
        return JOIN
    reduced = _dims(dim if axis is None else axis, input.dim())
    if rows.dim not in reduced:
        return along(1)(func, input, reduced, keepdim, dtype=dtype)
    count = math.prod(rows.whole_shape(input.shape)[one] for one in reduced)
    summed = add_ranks(input.sum(reduced, keepdim, dtype=accumulator_dtype(input.dtype)), rows.group)
    made = summed * (1 / count if func.__name__ == "mean" else 1.0)
    return made.to(input.dtype if dtype is None else dtype)


def global_pool(func: Function, input: torch.Tensor, output_size: Any) -> Any:
    """Adaptive average pooling to one pixel is a mean; to more pixels it needs the whole map."""
    sizes = (output_size, output_size) if output_size is None or isinstance(output_size, int) else output_size
    if tuple(sizes) != (1, 1) or rows_of_images(input) is None:
        return JOIN
    return total(torch.mean, input, (HEIGHT_DIM, HEIGHT_DIM + 1), True)


def last_norm(func: Function, x: Any, normalized_shape: Any, *others: Any, **kwargs: Any) -> Any:
    num_dims = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return on_last_dims(num_dims, func, x, normalized_shape, *others, **kwargs)


def matmul(func: Function, *args: Any, **kwargs: Any) -> Any:
    """A product with a matrix on the right is a linear layer; others need whole maps."""
    is_linear = len(args) == 2 and isinstance(args[0], RowTensor) and args[1].dim() == 2
    return on_last_dims(1, func, *args, **kwargs) if is_linear else JOIN


def on_last_dims(num_dims: int, func: Function, *args: Any, **kwargs: Any) -> Any:
    rows = rows_of(args[0]) if args else None
    if rows is None or any(rows_of(one) is not None for one in (*args[1:], *kwargs.values())):
        return JOIN
    return JOIN if rows.dim >= args[0].dim() - num_dims else marked(func(*args, **kwargs), rows)


def _dims(dims: Any, num_dims: int) -> list[int]:
    """Dims as numbers from 0; None or an empty list names all."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(num_dims))
    return [dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)]
