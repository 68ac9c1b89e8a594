"""The exchanges of tensor parallelism inside the graph: thin autograd functions over `comm/`, eager only.

    f    whole -> shares    nothing to do forward; backward the ranks' gradients of the whole are added up
    g    shares -> whole    forward the ranks' partial results are added up; nothing to do backward

    tokens split: f gathers forward and reduce-scatters backward, g the other way round

Linear layers come fused with theirs. Backward, the gradient of the input leaves as soon as it is known and travels
while those of the weights are computed; and since it was made here, it may be exchanged in place. Layers that are given
the same input are one function: their input's gradients are added up before they travel, once.

Under split tokens the gathered input is not kept but gathered again, beside the product that needs it least.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from weft.comm.collectives import Pending, all_gather, all_reduce, reduce_scatter
from weft.comm.group import Group
from weft.errors import ModelError
from weft.hosts import num_cores
from weft.plan.model_refusals import AUTOCAST_OF_SHARES

TOKEN_DIM = 1
"""Of activations (samples, tokens, features). What is between two regions treats every token by itself, so another
order of the first two dims does no harm."""

BESIDE_BYTES = 2**17
"""A change of thread takes as long as an exchange of less through a host's memory."""

Gradients = tuple[torch.Tensor | None, ...]


class Spread(torch.autograd.Function):
    """f: a whole tensor is about to be used on shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(whole, ctx.group)
        return whole, None


class Add(torch.autograd.Function):
    """g: partial results become the whole one, in place: only for tensors that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        whole = x.contiguous()
        all_reduce(whole, group)
        if whole is x:
            ctx.mark_dirty(x)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return gradient, None


class Columns(torch.autograd.Function):
    """Linear layers that are given one whole input, each with a share of its outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        is_split: bool,
        gathered: torch.Tensor | None,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """`parameters`: weight and bias, or None, of each layer; `is_split`: x is this rank's tokens.

        `gathered`: all tokens, where somebody has gathered them already.
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
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        x, *weights = ctx.saved_tensors
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        gathering = (
            _Gathering(x, ctx.group, wait=not pays_beside(x, ctx.group))
            if ctx.is_split and any(ctx.needs_input_grad[4::2])
            else None
        )
        pending: Pending | None = None
        into_x: torch.Tensor | None = None
        rows = {number: g.reshape(-1, g.shape[-1]) for number, g in enumerate(gradients) if g is not None}
        if ctx.needs_input_grad[0] and used:
            first, *others = used
            whole = rows[first] @ weights[first]
            for number in others:
                whole.addmm_(rows[number], weights[number])
            samples, tokens = x.shape[:TOKEN_DIM], x.shape[TOKEN_DIM:-1]
            if ctx.is_split:
                tokens = (tokens[0] * ctx.group.size, *tokens[1:])
            into_x = whole.view(*samples, *tokens, x.shape[-1])
            if ctx.is_split:
                into_x, pending = scatter_tokens(into_x, ctx.group, wait=not pays_beside(into_x, ctx.group))
            else:
                pending = all_reduce(into_x, ctx.group, wait=not pays_beside(into_x, ctx.group))
        found: list[torch.Tensor | None] = []
        inputs = x if gathering is None else gathering.result()
        inputs = inputs.reshape(-1, inputs.shape[-1])
        for number in range(len(weights)):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * number : 6 + 2 * number]
            found.append(rows[number].T @ inputs if needs_weight and number in rows else None)
            found.append(rows[number].sum(0) if needs_bias and number in rows else None)
        if pending is not None:
            pending.wait()
        return into_x, None, None, None, *found


class Row(torch.autograd.Function):
    """A linear layer that is given a share of its inputs; its partial results are added up, then the bias, once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, splits: bool, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
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
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        into_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
        if ctx.splits:
            gradient = gather_tokens(gradient, ctx.group)
        into_x, into_weight = product_gradients(gradient, x, weight, ctx.needs_input_grad[0], ctx.needs_input_grad[3])
        return into_x, None, None, into_weight, into_bias


class Lookup(torch.autograd.Function):
    """A share of an embedding's rows: tokens of other ranks' rows give zeros here, and the results are added up."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        group: Group,
        rows: tuple[int, int, int],
        padding: int | None,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """`rows`: the first and the end of those here, and how many there are; `padding`: whose row learns nothing."""
        local, elsewhere = find_rows(tokens, *rows)
        made = F.embedding(local, weight)
        made.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        ctx.num_rows = weight.shape[0]
        # What a row does not learn from is what another rank has, and what pads.
        ctx.save_for_backward(local, elsewhere if padding is None else elsewhere | (tokens == padding))
        all_reduce(made, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        local, ignored = ctx.saved_tensors
        kept = gradient.masked_fill(ignored.unsqueeze(-1), 0.0)
        found = torch.ops.aten.embedding_dense_backward(kept, local, ctx.num_rows, -1, False)
        return None, None, None, None, found


class SplitTokens(torch.autograd.Function):
    """From activations that every rank has to this rank's tokens of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return gather_tokens(gradient, ctx.group), None


class JoinTokens(torch.autograd.Function):
    """From every rank's tokens to activations that all have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, adds: bool) -> torch.Tensor:
        """`adds`: each rank uses them for its share, so what comes back is added up; else all use them alike."""
        ctx.group, ctx.adds = group, adds
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        if ctx.adds:
            return scatter_tokens(gradient.contiguous(), ctx.group, wait=True)[0], None, None
        return own_tokens(gradient, ctx.group), None, None


def _refuse_autocast(x: torch.Tensor) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ModelError(AUTOCAST_OF_SHARES.message())


def product_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs_x: bool, needs_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of x and of the weight of a linear layer, as far as they are needed."""
    into_x = gradient @ weight if needs_x else None
    if not needs_weight:
        return into_x, None
    return into_x, gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def find_rows(tokens: torch.Tensor, start: int, stop: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token its row among those from `start` to `stop`, else 0, and whether it is elsewhere.

    One outside the vocabulary is refused on a CPU; elsewhere it gets a row that is not there, at which the device stops
    as it does for a whole embedding.
    """
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= total:
            raise IndexError(f"token {low if low < 0 else high} is outside the vocabulary of {total} entries")
    elsewhere = (tokens < start) | (tokens >= stop)
    is_outside = (tokens < 0) | (tokens >= total)
    return torch.where(elsewhere, torch.where(is_outside, stop - start, 0), tokens - start), elsewhere


spread: Callable[..., torch.Tensor] = Spread.apply
add: Callable[..., torch.Tensor] = Add.apply
columns: Callable[..., tuple[torch.Tensor, ...]] = Columns.apply
row: Callable[..., torch.Tensor] = Row.apply
lookup: Callable[..., torch.Tensor] = Lookup.apply
split_tokens: Callable[..., torch.Tensor] = SplitTokens.apply
join_tokens: Callable[..., torch.Tensor] = JoinTokens.apply


def pays_beside(x: torch.Tensor, group: Group) -> bool:
    """Whether to exchange beside computation. Through a host's memory that takes a thread, and a core for it."""
    if group.wire(x) is None:
        return True
    return x.nbytes >= BESIDE_BYTES and 2 * group.size <= _num_cores()


_num_cores = functools.cache(num_cores)


def own_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's tokens, with memory of their own."""
    length = x.shape[TOKEN_DIM] // group.size
    return x.narrow(TOKEN_DIM, group.index * length, length).contiguous()


def gather_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks' tokens in order."""
    return _Gathering(x, group, wait=True).result()


class _Gathering:
    """All ranks' tokens, on their way."""

    def __init__(self, x: torch.Tensor, group: Group, *, wait: bool) -> None:
        self._received = x.new_empty((group.size, *x.shape))
        self._pending = all_gather(self._received.view(-1), x.contiguous().view(-1), group, wait=wait)

    def result(self) -> torch.Tensor:
        self._pending.wait()
        ranks, samples, tokens, *rest = self._received.shape
        if samples == 1:
            return self._received.view(1, ranks * tokens, *rest)
        return self._received.transpose(0, 1).reshape(samples, ranks * tokens, *rest)


def scatter_tokens(x: torch.Tensor, group: Group, *, wait: bool) -> tuple[torch.Tensor, Pending]:
    """This rank's tokens of the sum over all ranks, once it has come."""
    samples, tokens, *rest = x.shape
    length = tokens // group.size
    parts = x.view(samples, group.size, length, *rest).transpose(0, 1).contiguous()
    result = x.new_empty((samples, length, *rest))
    return result, reduce_scatter(result, parts, group, wait=wait)
