"""From exchanged gradients to updated weights: scale, check, clip, update, publish.

Where the plan clips or computes in 16 bits, a norm that is not finite skips the update on every rank at once: the sum
over ranks is not finite as soon as one rank's part is not.

Where the optimizer accepts a flag on the GPU, as torch's fused ones do, the GPU decides by itself: these optimizers
leave weights and state as they are where `found_inf` is 1. Then the host does not wait, publishing unchanged weights
does no harm, and the warning of the skip comes when it is known. The first update is waited for, because torch's fused
SGD would never initialise its momentum if that one were skipped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.plan.partition.wire import needs_norm
from weft.plan.plan import Plan
from weft.sync.base import Sync, Totals
from weft.training.step.async_scalars import AsyncScalars
from weft.training.step.average import WeightAverage
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
        average: WeightAverage | None = None,
    ) -> None:
        self._average = average
        self._optimizer = optimizer
        self._sync = sync
        self._clip_norm = plan.step.clip_norm
        self._schedule = schedule
        self._is_first_rank = is_first_rank
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.needs_norm = needs_norm(plan)
        self.loss_scale = LossScale.of(plan)
        self.grad_norm: torch.Tensor | None = None
        """The last step's gradient norm before clipping, if `needs_norm`."""
        self.skipped: int | torch.Tensor = 0
        """`num_skipped`, or a tensor that will be that number: a new one at every step, which no rank has to wait for.
        """
        self._skips_on_device = self.needs_norm and can_skip_on_device(optimizer)
        self._has_updated = False
        self._unreported: deque[tuple[int, AsyncScalars]] = deque()
        """Steps of which it is not yet known whether they were skipped: number, and the scalars of the warning."""

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because a gradient was not finite; waits for the last step."""
        self._report_skips(wait=True)
        return int(self.skipped)

    @torch.no_grad()
    def run(self, norm: torch.Tensor | None, correction: float | torch.Tensor | None, *, step: int) -> None:
        """Update with gradients still to be multiplied by a correction; `step` counts from 0."""
        self._report_skips(wait=False)
        scale = self.loss_scale.factor
        is_scaled = isinstance(scale, torch.Tensor) or scale != 1.0
        factor = (1.0 if correction is None else correction) / scale if is_scaled else correction
        overflow = None
        if norm is not None:
            self.grad_norm = norm if factor is None else norm * factor
            if self._skips_on_device and self._has_updated:
                overflow = self._find_overflow(norm, step)
            elif not self._is_finite(norm, step):
                return
            factor = _clipping(self.grad_norm, factor=factor, clip_norm=self._clip_norm)
        if factor is not None:
            _multiply([p.tensor.grad for p in self._sync.pieces if p.tensor.grad is not None], factor)
        if self._schedule is not None:
            rate = self._schedule(step)
            for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * rate
        if self._average is not None:
            self._average.begin(step=step)
        with _skipping(self._optimizer, overflow):
            self._optimizer.step()
        if self._average is not None:
            self._average.add(overflow)
        self._has_updated = True
        self._sync.publish()

    def state(self) -> dict[str, Any]:
        """The state that a bit-exact resume needs."""
        return {"loss_scale": self.loss_scale.state(), "num_skipped": self.num_skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loss_scale.load_state(state["loss_scale"])
        self.skipped = int(state["num_skipped"])
        self._unreported.clear()
        self._has_updated = False  # the optimizer's state may be from before its first update

    def _is_finite(self, norm: torch.Tensor, step: int) -> bool:
        """Wait for whether the gradients are finite, and note it."""
        is_finite, before = bool(torch.isfinite(norm)), self.loss_scale.value
        self.loss_scale.update(is_finite=is_finite)
        if not is_finite:
            self.skipped = self.num_skipped + 1
            self._warn(step, before, self.loss_scale.value, self.skipped)
        return is_finite

    def _find_overflow(self, norm: torch.Tensor, step: int) -> torch.Tensor:
        """1.0 on the device if the gradients are not finite, else 0.0."""
        overflow, before = 1.0 - torch.isfinite(norm).float(), self.loss_scale.factor
        self.loss_scale.update_on_device(overflow)
        self.skipped = self.skipped + overflow
        if self._is_first_rank:
            self._unreported.append((step, AsyncScalars(overflow, before, self.loss_scale.factor, self.skipped)))
        return overflow

    def _report_skips(self, *, wait: bool) -> None:
        """Warn of steps that are now known to have been skipped; `wait`: of all."""
        while self._unreported and (wait or self._unreported[0][1].is_ready):
            step, numbers = self._unreported.popleft()
            overflow, before, after, num_skipped = numbers.read()
            if overflow:
                self._warn(step, before, after, int(num_skipped))

    def _warn(self, step: int, before: float, after: float, num_skipped: int) -> None:
        if self._is_first_rank:
            change = f"; the loss scale goes from {before:g} to {after:g}" if after != before else ""
            log.warning(
                "step %d is skipped: a gradient is not finite%s (%d skipped so far)", step + 1, change, num_skipped
            )


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer's step leaves everything as it is where a tensor on the GPU says so (`torch.amp`'s way)."""
    groups = optimizer.param_groups
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in groups)
        and all(parameter.is_cuda for group in groups for parameter in group["params"])
    )


@contextmanager
def _skipping(optimizer: Any, overflow: torch.Tensor | None) -> Iterator[None]:
    """Context of an optimizer's step that changes nothing where `overflow` is 1; None: it always updates."""
    if overflow is None:
        yield
        return
    optimizer.grad_scale, optimizer.found_inf = None, overflow
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


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
