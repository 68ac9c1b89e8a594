"""The exchanges of `functions.py` as operators, which a compiler or a policy of recomputation treats as units.

An autograd function that calls `comm/` is opaque to `torch.compile`; an operator is one node of its graph. In eager
mode an operator costs more, so operators are used only where something looks at them. They know a group by its handle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import all_reduce as exchange
from weft.parallel.tensor.functions import Gradients, gather_tokens, product_gradients, scatter_tokens
from weft.parallel.tracing.handles import object_of


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def traced_add(x: Tensor, group: int) -> Tensor:
    """g: the sum over the ranks of a group."""
    whole = x.clone(memory_format=torch.contiguous_format)
    exchange(whole, object_of(group))
    return whole


@traced_add.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("weft::row_product", mutates_args=())
def kept_row(x: Tensor, weight: Tensor, group: int) -> Tensor:
    """x · weightᵀ where both are shards of the dim that is summed over; recomputation keeps the sum over ranks."""
    whole = F.linear(x, weight)
    exchange(whole, object_of(group))
    return whole


@kept_row.register_fake
def _(x: Tensor, weight: Tensor, group: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("weft::gather_tokens", mutates_args=())
def traced_gather(x: Tensor, group: int) -> Tensor:
    """f under split tokens: all ranks' tokens in order."""
    return gather_tokens(x, object_of(group))


@traced_gather.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * object_of(group).size, *x.shape[2:]))


@torch.library.custom_op("weft::scatter_tokens", mutates_args=())
def traced_scatter(x: Tensor, group: int) -> Tensor:
    """g under split tokens: this rank's tokens of the sum over all ranks."""
    return scatter_tokens(x.contiguous(), object_of(group), wait=True)[0]


@traced_scatter.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // object_of(group).size, *x.shape[2:]))


def _keep_group(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.group = inputs[1]


def _row_backward(ctx: Any, gradient: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    return *product_gradients(gradient, x, weight, *ctx.needs_input_grad[:2]), None


traced_add.register_autograd(lambda _, gradient: (gradient, None))
traced_gather.register_autograd(lambda ctx, g: (traced_scatter(g, ctx.group), None), setup_context=_keep_group)
traced_scatter.register_autograd(lambda ctx, g: (traced_gather(g, ctx.group), None), setup_context=_keep_group)
kept_row.register_autograd(_row_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return traced_add(gradient, ctx.group), None


traced_spread: Callable[..., Tensor] = _Spread.apply
"""f: nothing to do forward, the sum over the ranks of a group backward."""

KEPT_OPERATORS = frozenset(
    {torch.ops.weft.row_product.default, torch.ops.weft.all_reduce.default, torch.ops.weft.scatter_tokens.default}
)
"""Results of exchanges that recomputation should not repeat."""
