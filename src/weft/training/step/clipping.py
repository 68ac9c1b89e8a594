"""Scaling of gradients between the exchange and the update: one factor for all of them, in one pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.sync.base import Totals


def clipping(
    norm: torch.Tensor, *, factor: float | torch.Tensor | None, clip_norm: float
) -> float | torch.Tensor | None:
    """The factor that scales gradients by `factor` and clips them to `clip_norm`; None if they stay as they are.

    `norm` is that of the scaled gradients. The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`.
    """
    if clip_norm == 0:
        return factor
    coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    return coefficient if factor is None else coefficient * factor


def join_norm(totals: Totals, group: Group) -> Totals:
    """The totals with the norm over all ranks of the tensor axis, each of which counted its own shard."""
    if totals.norm is None or group.size == 1:
        return totals
    square = totals.norm.double() ** 2
    all_reduce(square, group)
    return replace(totals, norm=square.sqrt())


def multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all gradients by one number, in place."""
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        # Unless the factor has the gradients' dtype, torch launches one kernel per gradient.
        widest = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        factor = factor.to(gradients[0].device, widest)
    torch._foreach_mul_(gradients, factor)
