"""What is done to gradients between the exchange and the update: one factor for all of them, in one pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.sync.base import Totals


def clipping(
    norm: torch.Tensor, *, factor: float | torch.Tensor | None, clip_norm: float
) -> float | torch.Tensor | None:
    """The factor that scales gradients and clips them by the norm they have once scaled; None: leave them.

    It follows `torch.nn.utils.clip_grad_norm_`, the 1e-6 included.
    """
    if clip_norm == 0:
        return factor
    coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    return coefficient if factor is None else coefficient * factor


def join_norm(totals: Totals, group: Group) -> Totals:
    """The norm of all that the ranks of the tensor axis have, where it was taken; each counted its own."""
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
        # torch multiplies one by one, a kernel each, unless the factor has the gradients' dtype
        widest = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        factor = factor.to(gradients[0].device, widest)
    torch._foreach_mul_(gradients, factor)
