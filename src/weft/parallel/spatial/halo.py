"""Exchanges of images split by rows, as autograd functions: fetch a halo, gather a map, sum over ranks.

    fetch_halo   own rows -> the rows that windows cover    backward: gradients of fetched rows return and are added
    join         own rows -> the whole map on every rank    backward: ranks' gradients are added, each gets its own rows
    add_ranks    a sum over own rows -> the sum over all    backward: ranks' gradients are added

Every rank computes whatever follows a join or a sum, and counts losses and samples of all rows; the trainer divides
the sums of both. Hence the ranks' gradients are added and not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from weft.comm.collectives import all_gather, all_reduce, reduce_scatter
from weft.comm.group import Group
from weft.comm.p2p import exchange
from weft.parallel.spatial.row_tensor import HEIGHT_DIM, Rows
from weft.plan.partition.rows import Exchange, overlap, widest_part
from weft.plan.partition.tensor import Range

Gradients = tuple[Tensor | None, ...]


class FetchHalo(torch.autograd.Function):
    """From this rank's rows to all rows that its windows cover; those outside the image are `fill`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, group: Group, fill: float) -> Tensor:
        ctx.exchange, ctx.group, ctx.num_own = exchange, group, x.shape[HEIGHT_DIM]
        have, (start, stop) = exchange.have[group.index], exchange.spans[group.index]
        covered = _empty_like(x, stop - start)
        moves = [(move.source, move.target, move.rows) for move in exchange.moves]
        for outside in ((start, min(stop, 0)), (max(start, exchange.height), stop)):
            if outside[0] < outside[1]:
                _slab(covered, outside, start).fill_(fill)
        for part, slab in _exchange(x, have, covered, (start, stop), moves, group):
            part.copy_(slab)
        return covered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        have, span = ctx.exchange.have[ctx.group.index], ctx.exchange.spans[ctx.group.index]
        moves = [(move.target, move.source, move.rows) for move in ctx.exchange.moves]
        into_x = _empty_like(gradient, ctx.num_own).zero_()
        for part, slab in _exchange(gradient, span, into_x, have, moves, ctx.group):
            part.add_(slab)
        return into_x, None, None, None


class Join(torch.autograd.Function):
    """From every rank's rows to the whole map on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        dim, size = rows.dim, rows.group.size
        is_flag = x.dtype == torch.bool  # not every backend sends these
        sent = _widened(x.to(torch.uint8) if is_flag else x, rows)
        gathered = sent.new_empty((size, *sent.shape))
        all_gather(gathered.view(-1), sent.view(-1), rows.group)
        parts = [part.narrow(dim, 0, stop - start) for part, (start, stop) in zip(gathered, rows.parts, strict=True)]
        whole = torch.cat(parts, dim)
        return whole.bool() if is_flag else whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        rows: Rows = ctx.rows
        dim = rows.dim
        parts = torch.stack([_widened(gradient.narrow(dim, a, b - a), rows) for a, b in rows.parts])
        summed = torch.empty_like(parts[0])
        reduce_scatter(summed, parts, rows.group)
        return summed.narrow(dim, 0, rows.num_own), None


class AddRanks(torch.autograd.Function):
    """From every rank's sum over its rows to the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return added(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return added(gradient, ctx.group), None


fetch_halo: Callable[..., Tensor] = FetchHalo.apply
join: Callable[..., Tensor] = Join.apply
add_ranks: Callable[..., Tensor] = AddRanks.apply


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The own map and the halo, kept for the backward pass instead of the fetched rows.

    Usually the operation that made the own rows keeps them already, so that only the halo takes memory.
    """

    x: Tensor
    version: int
    own: Range
    """Rows of x that the windows cover."""
    above: Tensor
    below: Tensor

    def put_together(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.x._version != self.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"rows that a window has looked at, version {self.x._version} where {self.version} was expected"
                )
            rows = _slab(self.x.detach(), self.own, 0)
            return torch.cat([self.above, rows, self.below], HEIGHT_DIM)


@contextmanager
def kept_in_parts(covered: Tensor, x: Tensor, exchange: Exchange, group: Group) -> Iterator[None]:
    """Context in which an operation that saves fetched rows saves this rank's own map and the halo instead."""
    others = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if others is not None or not torch.is_grad_enabled():
        yield  # other hooks decide what is saved, as for recomputation, or nothing is
        return
    first, (start, _) = exchange.have[group.index][0], exchange.spans[group.index]
    low, high = overlap(exchange.have[group.index], exchange.spans[group.index])
    parts = _Parts(
        x=x,
        version=x._version,
        own=(low - first, high - first),
        above=covered.detach()[:, :, : low - start].clone(),
        below=covered.detach()[:, :, high - start :].clone(),
    )
    own_id = id(covered)  # the hooks live on in the graph: a reference to the tensor would keep it
    with saved_tensors_hooks(
        lambda kept: parts if id(kept) == own_id else kept,
        lambda kept: kept.put_together() if isinstance(kept, _Parts) else kept,
    ):
        yield


def _slab(x: Tensor, rows: Range, first: int) -> Tensor:
    """Rows of a map that begins at row `first` of the whole."""
    num_rows = rows[1] - rows[0]
    return x.narrow(HEIGHT_DIM, rows[0] - first if num_rows else 0, num_rows)


def _empty_like(x: Tensor, num_rows: int) -> Tensor:
    """A map in the memory format of x, which decides how fast a GPU convolves it."""
    is_last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if is_last else torch.contiguous_format
    samples, channels, _, width = x.shape
    return torch.empty((samples, channels, num_rows, width), dtype=x.dtype, device=x.device, memory_format=form)


def _exchange(
    x: Tensor, given: Range, made: Tensor, wanted: Range, moves: list[tuple[int, int, Range]], group: Group
) -> list[tuple[Tensor, Tensor]]:
    """Copy rows that are both in x and wanted, and exchange the others: `moves` are (source, target, rows).

    `given`: rows of x; `wanted`: rows of `made`. Returns parts of `made` and the rows that arrived for each.
    """
    samples, channels, _, width = x.shape
    arrived, outgoing, incoming = [], [], []
    for source, target, rows in moves:
        if source == group.index:
            outgoing.append((_slab(x, rows, given[0]).contiguous(), target))
        if target == group.index:
            slab = x.new_empty((samples, channels, rows[1] - rows[0], width))
            arrived.append((_slab(made, rows, wanted[0]), slab))
            incoming.append((slab, source))
    pending = exchange(outgoing, incoming, group)
    own = overlap(given, wanted)
    _slab(made, own, wanted[0]).copy_(_slab(x, own, given[0]))
    pending.wait()
    return arrived


def _widened(part: Tensor, rows: Rows) -> Tensor:
    """A part padded with zeros to the widest, for collectives that need equal parts."""
    widest = widest_part(rows.height, rows.group.size)
    if part.shape[rows.dim] == widest:
        return part.contiguous()
    wide = part.new_zeros(rows.at(rows.dim, widest).whole_shape(part.shape))
    wide.narrow(rows.dim, 0, part.shape[rows.dim]).copy_(part)
    return wide


def added(x: Tensor, group: Group) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    all_reduce(summed, group)
    return summed
