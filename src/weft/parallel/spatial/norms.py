"""GroupNorm and InstanceNorm of images split by rows, with the statistics of the whole image.

Ranks sum their sums, then their squared deviations from the mean, as one process does; the backward pass sums two sums
of the gradient. As in torch's own function, the normalised rows and the statistics are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.dtypes import accumulator_dtype
from weft.parallel.spatial.halo import added
from weft.parallel.spatial.join import JOIN
from weft.parallel.spatial.row_tensor import Function, Rows, RowTensor, mark, rows_of_images


class NormaliseGroups(torch.autograd.Function):
    """y = (x − mean) / sqrt(variance + eps) · weight + bias; mean and variance per image and group of channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, rows: Rows
    ) -> Tensor:
        grouped = _grouped(x, num_groups)
        ctx.rows, ctx.num_groups = rows, num_groups
        ctx.count = x.shape[1] // num_groups * rows.height * x.shape[3]
        mean = added(grouped.sum(2, keepdim=True), rows.group) / ctx.count
        centred = grouped - mean
        variance = added(centred.square().sum(2, keepdim=True), rows.group) / ctx.count
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        made: Tensor = centred.mul_(inverse).view(x.shape)
        if weight is not None:
            made = made * weight.view(-1, 1, 1)
        if bias is not None:
            made = made + bias.view(-1, 1, 1)
        return made.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            x, weight, bias, mean, inverse = ctx.saved_tensors
            normalised = (_grouped(x, ctx.num_groups) - mean).mul_(inverse)
            wide = gradient.to(normalised.dtype)
            into_weight = into_bias = None
            if weight is not None:
                into_weight = (wide * normalised.view(x.shape)).sum((0, 2, 3)).to(weight.dtype)
            if bias is not None:
                into_bias = wide.sum((0, 2, 3)).to(bias.dtype)
            scaled = wide if weight is None else wide * weight.view(-1, 1, 1)
            grouped = _grouped(scaled, ctx.num_groups)
            sums = torch.cat([grouped.sum(2, keepdim=True), (grouped * normalised).sum(2, keepdim=True)], 2)
            first, second = (added(sums, ctx.rows.group) / ctx.count).split(1, 2)
            into_x = ((grouped - first - normalised * second) * inverse).view(x.shape)
            return into_x.to(x.dtype), into_weight, into_bias, None, None, None


normalise_groups: Callable[..., Tensor] = NormaliseGroups.apply


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """(samples, groups, this rank's entries of a group)"""
    samples, channels, num_own, width = x.shape
    return x.to(accumulator_dtype(x.dtype)).reshape(samples, num_groups, channels // num_groups * num_own * width)


def group_norm(
    func: Function, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    rows = rows_of_images(input)
    if rows is None or input.shape[1] % num_groups or isinstance(weight, RowTensor) or isinstance(bias, RowTensor):
        return JOIN
    return mark(normalise_groups(input, weight, bias, num_groups, eps, rows), rows)


def instance_norm(
    func: Function,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None or not use_input_stats:
        return JOIN
    return group_norm(func, input, input.shape[1], weight, bias, eps)
