"""`weft.gather_batch`: the samples of all data ranks inside a loss, with gradients.

A contrastive loss compares every sample with all others of the batch, of which a data rank has only a part. Inside a
loss this function joins all parts along dim 0, in the order of the batch. Losses of ranks are added, so its backward
pass sums the gradients of all ranks and gives each its own rows. Therefore both ways to use it are exact: every rank
returns the loss of the whole batch, or that of its own samples against all.

Where replicas differ between exchanges ([data] sync), each has a batch to itself: nothing is gathered beyond a replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from weft.comm.collectives import all_gather, reduce_scatter
from weft.comm.group import Group
from weft.errors import DataError, ModelError, PlanError
from weft.mesh import Mesh
from weft.plan.in_process_refusals import GATHERED_IN_PROCESS
from weft.plan.model_refusals import GATHERED_MICROBATCHES, GATHERED_TOKENS
from weft.plan.partition.replicas import one_replica
from weft.units import name_ranks


class GatheringError(BaseException):
    """Raised instead of gathering, where a loss is only tried. No `except Exception` of the loss may hide it."""


@dataclass(slots=True, kw_only=True)
class BatchGathering:
    """Gathers over the data ranks of a mesh."""

    mesh: Mesh
    sizes: tuple[int, ...] = ()
    """Samples of each part of the batch in this step; empty: no rank but this one."""
    where: Literal["model", "trial", "loss"] = "model"
    """What is running."""

    @contextmanager
    def during(self, where: Literal["model", "trial", "loss"]) -> Iterator[None]:
        """Context of a step, of a trial of the loss in it, or of a call of the loss."""
        global _current
        before = _current, self.where
        _current, self.where = self, where
        try:
            yield
        finally:
            _current, self.where = before

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.where == "trial":
            raise GatheringError
        plan = self.mesh.plan
        num_parts = one_replica(plan).data_ranks
        if num_parts * plan.step.microbatches * plan.axes.sequence == 1:
            return tensor
        if num_parts > self.mesh.num_batch_parts:
            raise PlanError(GATHERED_IN_PROCESS.message(num_parts=num_parts))
        if plan.axes.sequence > 1:  # first: a loss that is not tried there is not told from the model
            raise PlanError(GATHERED_TOKENS.message(plan))
        if self.where == "model":
            raise ModelError(
                "weft.gather_batch was called by the model; call it in the loss, which is given the model's outputs"
            )
        if plan.step.microbatches > 1:
            raise PlanError(GATHERED_MICROBATCHES.message(plan))
        refuse_empty(self.sizes)
        mine = self.sizes[self.mesh.batch_part]
        if not tensor.dim() or tensor.shape[0] != mine:
            raise ModelError(
                f"weft.gather_batch was given a tensor of shape {tuple(tensor.shape)}, and this rank has {mine} "
                "samples; give one with the samples along dim 0"
            )
        num_data = self.mesh.size("data")
        first = self.mesh.batch_part // num_data * num_data
        joined = _gathered(tensor, self.mesh.group("data", "gradients"), self.sizes[first : first + num_data])
        if len(self.sizes) == num_data:
            return joined
        sums = [sum(self.sizes[first : first + num_data]) for first in range(0, len(self.sizes), num_data)]
        return _gathered(joined, self.mesh.group("replicate", "gradients"), sums)


_current: BatchGathering | None = None
"""That of the loss which is running."""


def gather_batch(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all data ranks, joined along dim 0 in the order of the batch; to be called in a loss, by all ranks.

    Gradients reach the ranks that the rows came from. Where a batch is not cut, and outside of a trainer's step, it
    returns the tensor itself, so the same loss runs in one process. Losses of ranks are added, weighted by their
    numbers of targets: return the mean loss of the whole batch, or the mean over this rank's own samples.
    """
    return tensor if _current is None else _current.gather(tensor)


def refuse_empty(sizes: Sequence[int]) -> None:
    """Refuse a batch in which some data rank has no samples, since it cannot call the loss."""
    if not all(sizes):
        empty = [rank for rank, size in enumerate(sizes) if not size]
        raise DataError(
            f"data {name_ranks(empty)} {'has' if len(empty) == 1 else 'have'} no samples in this batch of "
            f"{sum(sizes)}, and the loss gathers those of all ranks (weft.gather_batch); give every rank at least one, "
            "in every step and evaluation"
        )


def _gathered(tensor: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    if group.size == 1:
        return tensor
    joined: torch.Tensor = _Gather.apply(tensor, group, tuple(sizes))  # type: ignore[no-untyped-call]
    return joined


class _Gather(torch.autograd.Function):
    """Joins the rows of a group; its gradient is the sum of all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.sizes = group, sizes
        most, rest = max(sizes), tensor.shape[1:]
        padded = tensor.new_zeros(most, *rest)
        padded[: len(tensor)] = tensor
        rows = tensor.new_empty(group.size * most, *rest)
        all_gather(rows, padded, group)
        if min(sizes) == most:
            return rows
        return torch.cat([rows[place * most : place * most + size] for place, size in enumerate(sizes)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        group, sizes = ctx.group, ctx.sizes
        most, rest = max(sizes), gradient.shape[1:]
        rows = gradient.contiguous()
        if min(sizes) < most:
            rows = gradient.new_zeros(group.size * most, *rest)
            for place, part in enumerate(gradient.split(list(sizes))):
                rows[place * most : place * most + len(part)] = part
        mine = gradient.new_empty(most, *rest)
        reduce_scatter(mine, rows, group)
        return mine[: sizes[group.index]], None, None
