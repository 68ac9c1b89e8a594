"""The same exchanges as operators that a compiler, or a policy of recomputation, can see and keep whole.

An autograd function that calls `comm/` is opaque to `torch.compile`; an operator is one node of its graph. In eager
mode an operator costs more, so it is used only where something looks at operators. They take tensors and plain numbers
only: a group is known to them by the number it got from `number_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import all_reduce as exchange
from weft.comm.group import Group
from weft.parallel.tensor.functions import TOKEN_DIM, Gradients, gather_tokens, product_gradients, scatter_tokens

# Operators outlive any model and are given no objects, so this is known to the process; groups live as long as it.
_groups: list[Group] = []


def number_of(group: Group) -> int:
    """A number by which operators know a group."""
    for number, known in enumerate(_groups):
        if known is group:
            return number
    _groups.append(group)
    return len(_groups) - 1


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: int) -> Tensor:
    """The sum over the ranks of a group."""
    whole = x.clone(memory_format=torch.contiguous_format)
    exchange(whole, _groups[group])
    return whole


@all_reduce.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("weft::row_product", mutates_args=())
def row_product(x: Tensor, weight: Tensor, group: int) -> Tensor:
    """x · weightᵀ where both are shares of the dim that is summed over."""
    whole = F.linear(x, weight)
    exchange(whole, _groups[group])
    return whole


@row_product.register_fake
def _(x: Tensor, weight: Tensor, group: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("weft::gather_tokens", mutates_args=())
def gather(x: Tensor, group: int) -> Tensor:
    """All ranks' tokens in order."""
    return gather_tokens(x, _groups[group])


@gather.register_fake
def _(x: Tensor, group: int) -> Tensor:
    shape = list(x.shape)
    shape[TOKEN_DIM] *= _groups[group].size
    return x.new_empty(shape)


@torch.library.custom_op("weft::scatter_tokens", mutates_args=())
def scatter(x: Tensor, group: int) -> Tensor:
    """This rank's tokens of the sum over all ranks."""
    return scatter_tokens(x.contiguous(), _groups[group], wait=True)[0]


@scatter.register_fake
def _(x: Tensor, group: int) -> Tensor:
    shape = list(x.shape)
    shape[TOKEN_DIM] //= _groups[group].size
    return x.new_empty(shape)


class TracedSpread(torch.autograd.Function):
    """f for a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return all_reduce(gradient, ctx.group), None


class TracedAdd(torch.autograd.Function):
    """g for a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        made: Tensor = all_reduce(x, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return gradient, None


class TracedGather(torch.autograd.Function):
    """f under split tokens for a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        made: Tensor = gather(x, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return scatter(gradient, ctx.group), None


class TracedScatter(torch.autograd.Function):
    """g under split tokens for a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.group = group
        made: Tensor = scatter(x, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return gather(gradient, ctx.group), None


class KeptRow(torch.autograd.Function):
    """A row layer whose result a policy of recomputation keeps, so that it travels once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        made: Tensor = row_product(x, weight, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        return *product_gradients(gradient, x, weight, *ctx.needs_input_grad[:2]), None


traced_spread: Callable[..., Tensor] = TracedSpread.apply
traced_add: Callable[..., Tensor] = TracedAdd.apply
traced_gather: Callable[..., Tensor] = TracedGather.apply
traced_scatter: Callable[..., Tensor] = TracedScatter.apply
kept_row: Callable[..., Tensor] = KeptRow.apply

KEPT_OPERATORS = frozenset(
    {torch.ops.weft.row_product.default, torch.ops.weft.all_reduce.default, torch.ops.weft.scatter_tokens.default}
)
"""Results of exchanges that recomputation should not repeat."""
