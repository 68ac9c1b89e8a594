"""From exchanged gradients to updated weights: scale, check, clip, update, publish.

Where the plan clips or computes in 16 bits, a norm that is not finite skips the update on every rank at once: the sum
over ranks is not finite as soon as one rank's part is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.plan.plan import Plan
from weft.sync.base import Sync, Totals
from weft.training.step.precision import LossScale

log = logging.getLogger("weft")


class Update:
    """The optimizer's side of a step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        plan: Plan,
        *,
        schedule: Callable[[int], float] | None,
        is_first_rank: bool,
    ) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._clip_norm = plan.step.clip_norm
        self._schedule = schedule
        self._is_first_rank = is_first_rank
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.needs_norm = plan.step.clip_norm > 0 or plan.precision.compute != "model"
        self.loss_scale = LossScale.of(plan)
        self.grad_norm: torch.Tensor | None = None
        """The last step's gradient norm before clipping, if `needs_norm`."""
        self.num_skipped = 0
        """Number of steps skipped because a gradient was not finite."""

    @torch.no_grad()
    def run(self, norm: torch.Tensor | None, correction: float | torch.Tensor | None, *, step: int) -> None:
        """Update with gradients still to be multiplied by a correction; `step` counts from 0."""
        scale = self.loss_scale.value
        factor = correction if scale == 1.0 else (1.0 if correction is None else correction) / scale
        if norm is not None:
            self.grad_norm = norm if factor is None else norm * factor
            is_finite = bool(torch.isfinite(norm))
            self.loss_scale.update(is_finite=is_finite)
            if not is_finite:
                self._skip(step, scale)
                return
            factor = _clipping(self.grad_norm, factor=factor, clip_norm=self._clip_norm)
        if factor is not None:
            _multiply([p.tensor.grad for p in self._sync.pieces if p.tensor.grad is not None], factor)
        if self._schedule is not None:
            rate = self._schedule(step)
            for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * rate
        self._optimizer.step()
        self._sync.publish()

    def state(self) -> dict[str, Any]:
        """The state that a bit-exact resume needs."""
        return {"loss_scale": self.loss_scale.state(), "num_skipped": self.num_skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loss_scale.load_state(state["loss_scale"])
        self.num_skipped = int(state["num_skipped"])

    def _skip(self, step: int, scale: float) -> None:
        self.num_skipped += 1
        if self._is_first_rank:
            lowered = self.loss_scale.value
            change = f"; the loss scale goes from {scale:g} to {lowered:g}" if lowered != scale else ""
            log.warning(
                "step %d is skipped: a gradient is not finite%s (%d skipped so far)", step + 1, change, self.num_skipped
            )


def _clipping(
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


def _multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all gradients by one number, in place."""
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        # Unless the factor has the gradients' dtype, torch launches one kernel per gradient.
        widest = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        factor = factor.to(gradients[0].device, widest)
    torch._foreach_mul_(gradients, factor)
