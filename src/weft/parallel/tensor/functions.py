"""The communication of tensor parallelism inside the graph: thin autograd functions over `comm/`, eager only.

    f    whole -> shards    identity forward; backward an all-reduce of the gradient
    g    shards -> whole    forward an all-reduce of partial results; identity backward

    tokens split: f gathers forward and reduce-scatters backward, g the other way round

Linear layers are fused with theirs. In the backward pass the gradient of the input is sent as soon as it is known and
travels, in place, while those of the weights are computed. Layers that are given the same input are one function: their
gradients of the input are summed before they travel, once.

Under split tokens the gathered input is not kept but gathered again, while the gradient of the input is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import Pending, all_gather, all_reduce, reduce_scatter
from weft.comm.group import Group
from weft.errors import ModelError
from weft.hosts import num_cores
from weft.plan.model_refusals import AUTOCAST_OF_SHARES

TOKEN_DIM = 1
"""Dim of the tokens in activations (samples, tokens, features). Code between two regions treats every token by itself,
so swapping the first two dims does no harm."""

OVERLAP_BYTES = 2**17
"""Below this, an exchange through shared memory takes no longer than the switch to another thread."""

Gradients = tuple[Tensor | None, ...]


class Spread(torch.autograd.Function):
    """Megatron's f: identity forward, an all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(whole, ctx.group)
        return whole, None


class Add(torch.autograd.Function):
    """Megatron's g, in place: only for tensors that no other code holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        whole = x.contiguous()
        all_reduce(whole, group)
        if whole is x:
            ctx.mark_dirty(x)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return gradient, None


class Columns(torch.autograd.Function):
    """Linear layers that are given one whole input, each with a shard of its outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, is_split: bool, gathered: Tensor | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`parameters`: weight and bias, or None, of each layer; `is_split`: x is this rank's tokens.

        `gathered`: all tokens, where they have been gathered before.
        """
        _refuse_autocast(x)
        ctx.group, ctx.is_split = group, is_split
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters[::2])
        whole = x
        if is_split:
            whole = gather_tokens(x, group) if gathered is None else gathered
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return tuple(F.linear(whole, weight, bias) for weight, bias in pairs if weight is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        x, *weights = ctx.saved_tensors
        gathering = None
        if ctx.is_split and any(ctx.needs_input_grad[4::2]):
            gathering = _start_gathering(x, ctx.group, wait=not overlap_pays(x, ctx.group))
        pending: Pending | None = None
        into_x: Tensor | None = None
        rows = {number: g.reshape(-1, g.shape[-1]) for number, g in enumerate(gradients) if g is not None}
        if ctx.needs_input_grad[0] and rows:
            first, *others = rows
            whole = rows[first] @ weights[first]
            for number in others:
                whole.addmm_(rows[number], weights[number])
            samples, tokens = x.shape[:TOKEN_DIM], x.shape[TOKEN_DIM:-1]
            if ctx.is_split:
                tokens = (tokens[0] * ctx.group.size, *tokens[1:])
            into_x = whole.view(*samples, *tokens, x.shape[-1])
            if ctx.is_split:
                into_x, pending = scatter_tokens(into_x, ctx.group, wait=not overlap_pays(into_x, ctx.group))
            else:
                pending = all_reduce(into_x, ctx.group, wait=not overlap_pays(into_x, ctx.group))
        found: list[Tensor | None] = []
        inputs = x if gathering is None else gathering()
        inputs = inputs.reshape(-1, inputs.shape[-1])
        for number in range(len(weights)):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * number : 6 + 2 * number]
            found.append(rows[number].T @ inputs if needs_weight and number in rows else None)
            found.append(rows[number].sum(0) if needs_bias and number in rows else None)
        if pending is not None:
            pending.wait()
        return into_x, None, None, None, *found


class Row(torch.autograd.Function):
    """A linear layer that is given a shard of its inputs; partial results are summed, then the bias is added, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, splits: bool, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`splits`: the result is this rank's tokens."""
        _refuse_autocast(x)
        ctx.group, ctx.splits = group, splits
        ctx.save_for_backward(x, weight)
        made = F.linear(x, weight)
        if splits:
            made, _ = scatter_tokens(made, group, wait=True)
        else:
            all_reduce(made, group)
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        into_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
        if ctx.splits:
            gradient = gather_tokens(gradient, ctx.group)
        into_x, into_weight = product_gradients(gradient, x, weight, ctx.needs_input_grad[0], ctx.needs_input_grad[3])
        return into_x, None, None, into_weight, into_bias


class SplitTokens(torch.autograd.Function):
    """From replicated activations to this rank's tokens of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return gather_tokens(gradient, ctx.group), None


class JoinTokens(torch.autograd.Function):
    """From this rank's tokens to replicated activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, adds: bool) -> Tensor:
        """`adds`: each rank uses them for its shard, so gradients are summed; else all ranks use them alike."""
        ctx.group, ctx.adds = group, adds
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        if ctx.adds:
            return scatter_tokens(gradient.contiguous(), ctx.group, wait=True)[0], None, None
        return own_tokens(gradient, ctx.group), None, None


def _refuse_autocast(x: Tensor) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ModelError(AUTOCAST_OF_SHARES.message())


def product_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the weight of a linear layer, as far as they are needed."""
    into_x = gradient @ weight if needs_x else None
    if not needs_weight:
        return into_x, None
    return into_x, gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])


spread: Callable[..., Tensor] = Spread.apply
add: Callable[..., Tensor] = Add.apply
columns: Callable[..., tuple[Tensor, ...]] = Columns.apply
row: Callable[..., Tensor] = Row.apply
split_tokens: Callable[..., Tensor] = SplitTokens.apply
join_tokens: Callable[..., Tensor] = JoinTokens.apply


def overlap_pays(x: Tensor, group: Group) -> bool:
    """True if overlapping communication with computation pays. In shared memory it needs a thread and a core."""
    if group.wire(x) is None:
        return True
    return x.nbytes >= OVERLAP_BYTES and 2 * group.size <= _num_cores()


_num_cores = functools.cache(num_cores)


def own_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens, with memory of their own."""
    length = x.shape[TOKEN_DIM] // group.size
    return x.narrow(TOKEN_DIM, group.index * length, length).contiguous()


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens in order."""
    return _start_gathering(x, group, wait=True)()


def _start_gathering(x: Tensor, group: Group, *, wait: bool) -> Callable[[], Tensor]:
    """Start an all-gather of tokens; the function returned waits for them."""
    received = x.new_empty((group.size, *x.shape))
    pending = all_gather(received.view(-1), x.contiguous().view(-1), group, wait=wait)

    def result() -> Tensor:
        pending.wait()
        ranks, samples, tokens, *rest = received.shape
        return received.transpose(0, 1).reshape(samples, ranks * tokens, *rest)

    return result


def scatter_tokens(x: Tensor, group: Group, *, wait: bool) -> tuple[Tensor, Pending]:
    """This rank's tokens of the sum over all ranks, valid after waiting."""
    samples, tokens, *rest = x.shape
    length = tokens // group.size
    parts = x.view(samples, group.size, length, *rest).transpose(0, 1).contiguous()
    result = x.new_empty((samples, length, *rest))
    return result, reduce_scatter(result, parts, group, wait=wait)
