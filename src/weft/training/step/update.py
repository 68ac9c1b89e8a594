"""From exchanged gradients to updated weights: scale, check, clip, update, publish.

A loss that is not finite skips the update on every rank at once, and so does a norm that is not, where the plan clips
or computes in 16 bits: the sum over ranks is not finite as soon as one rank's part is not. With a codec the ranks are
told of such gradients. What follows from skipped updates is decided in `not_finite.py`.

Where the optimizer accepts a flag on the GPU, as torch's fused ones do, the GPU decides by itself: these optimizers
leave weights and state as they are where `found_inf` is 1. Then the host does not wait, and publishing unchanged
weights does no harm. The first update is waited for, because torch's fused SGD would never initialise its momentum if
that one were skipped. Other optimizers on a GPU are waited for where the plan has a norm; where it has none nobody
waits, and their update takes place whatever the loss is. A replica without targets in a step, where replicas differ,
is skipped in the same way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.optim.momentum_correction import take_over_momentum
from weft.plan.exchange.warm_up import is_dense
from weft.plan.partition.wire import needs_norm
from weft.plan.plan import Plan
from weft.sync.base import Sync, Totals
from weft.training.step.async_scalars import AsyncScalars
from weft.training.step.average import WeightAverage
from weft.training.step.precision import LossScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is known of one update, as numbers that a device may still compute."""

    step: int
    """Number of its step, from 0."""
    overflow: bool | AsyncScalars
    """True, or 1.0, if the loss or the norm is not finite."""
    is_left_out: bool
    """Such an update was skipped; False where that would have made the host wait in every step."""
    own_loss: torch.Tensor | None
    """This rank's part of the loss; None where it computes none."""
    loss: torch.Tensor
    norm: torch.Tensor | None
    scale_before: float | torch.Tensor
    scale_after: float | torch.Tensor
    num_skipped: int | torch.Tensor

    @property
    def is_known(self) -> bool:
        """True if the host waited for this update when it was made."""
        return isinstance(self.overflow, bool)

    def is_bad(self) -> bool:
        """True if the loss or the norm is not finite; waits for this update alone."""
        return bool(self.overflow.read()[0]) if isinstance(self.overflow, AsyncScalars) else self.overflow


class Update:
    """The optimizer's side of a step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        plan: Plan,
        *,
        schedule: Callable[[int], float] | None,
        average: WeightAverage | None = None,
    ) -> None:
        self._average = average
        self._optimizer = optimizer
        self._sync = sync
        self._clip_norm = plan.step.clip_norm
        self._schedule = schedule
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.needs_norm = needs_norm(plan)
        self.loss_scale = LossScale.of(plan)
        self.grad_norm: torch.Tensor | None = None
        """The last step's gradient norm before clipping, if `needs_norm`."""
        self.skipped: int | torch.Tensor = 0
        """`num_skipped`, or a tensor that will be that number: a new one at every step, which no rank has to wait for.
        """
        self._skips_on_device = can_skip_on_device(optimizer)
        self._past_momentum = take_over_momentum(optimizer, sync, plan)
        self._codec = plan.codec
        compressed = sync.compressed if plan.codec.name == "sign" else None
        self._votes = frozenset[str]() if compressed is None else frozenset(compressed.names)
        """Pieces whose gradients are signs, which have no unit to correct."""
        self._is_local = plan.replica_axis is not None
        """Replicas differ between exchanges, of which `sync.end_update` may make one."""
        self._waits_anyway = plan.data.offload
        """The host waits for the gradients in every step, because it updates with them."""
        self._may_lack_targets = plan.num_replicas > 1
        """This replica may have no targets in a step although others have, and then makes no update."""
        self._has_updated = False
        self._open: deque[Outcome] = deque()
        self.closed: deque[Outcome] = deque()
        """Updates that all ranks have made, in their order and the same on every rank, until someone takes them."""

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because the loss or a gradient was not finite; waits for the last step."""
        return int(self.skipped)

    @torch.no_grad()
    def run(
        self,
        totals: Totals,
        correction: float | torch.Tensor | None,
        *,
        step: int,
        own_loss: torch.Tensor | None,
        closes: bool = True,
    ) -> None:
        """Update with gradients still to be multiplied by a correction; `step` counts from 0.

        `closes`: all ranks make this update in the same step, so that its outcome is known to all of them after it.
        """
        norm, scale = totals.norm, self.loss_scale.factor
        is_scaled = isinstance(scale, torch.Tensor) or scale != 1.0
        factor = (1.0 if correction is None else correction) / scale if is_scaled else correction
        decided = self._decide(totals, step, own_loss)
        is_made = 1.0 - decided if isinstance(decided, torch.Tensor) else not decided
        self._sync.decide(is_made=is_made, factor=correction)
        if closes:
            self.close_oldest()
        if norm is not None:
            self.grad_norm = norm if factor is None else norm * factor
        if decided is True:
            self.leave_out(step=step)
            return
        overflow = decided if isinstance(decided, torch.Tensor) else None
        if norm is not None:
            assert self.grad_norm is not None
            factor = _clipping(self.grad_norm, factor=factor, clip_norm=self._clip_norm)
        if factor is not None:
            votes = frozenset[str]() if is_dense(self._codec, step) else self._votes
            pieces = [piece.tensor for piece in self._sync.pieces if piece.name not in votes]
            _multiply([one.grad for one in pieces if one.grad is not None], factor)
        if self._schedule is not None:
            rate = self._schedule(step)
            for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * rate
        self._begin_average(step)
        with _skipping(self._optimizer, overflow), self._past_momentum.during(overflow):
            self._optimizer.step()
        self._has_updated = True
        if self._is_local:
            self._sync.end_update()
            self._add_exchanged()
            return
        if self._average is not None:
            self._average.add(overflow)
        self._sync.end_update()

    def leave_out(self, *, step: int) -> None:
        """Make no update in a step: it would not be finite, or this replica has no targets in it."""
        self._begin_average(step)
        self._sync.skip()
        if self._is_local:
            self._add_exchanged()

    def _begin_average(self, step: int) -> None:
        # Of replicas that differ, from weights that all of them have, so that it is the same on all.
        if self._average is not None and self._sync.agrees:
            self._average.begin(step=step)

    def _add_exchanged(self) -> None:
        """Take the weights into the average if replicas have just exchanged them."""
        if self._average is not None and self._sync.agrees:
            self._average.add()

    @contextmanager
    def holding_state(self) -> Iterator[bool]:
        """Context in which the optimizer has its state here, for a checkpoint; True: ranks of this mesh write it."""
        yield True

    def require_loadable(self) -> None:
        """Refuse a checkpoint that would not be trained from."""

    def state(self) -> dict[str, Any]:
        """The state that a bit-exact resume needs."""
        return {"loss_scale": self.loss_scale.state(), "num_skipped": self.num_skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loss_scale.load_state(state["loss_scale"])
        self.skipped = int(state["num_skipped"])
        self._open.clear()
        self.closed.clear()
        self._has_updated = False  # the optimizer's state may be from before its first update

    def close_oldest(self) -> None:
        """The oldest open update has been made by all ranks; they call this in the same step, and in the same order."""
        self.closed.append(self._open.popleft())

    def _decide(self, totals: Totals, step: int, own_loss: torch.Tensor | None) -> bool | torch.Tensor:
        """Whether the update must be skipped, as a number on the device where nobody waits for it; notes the outcome.

        False also where it could only be skipped by waiting.
        """
        loss, norm, before = totals.loss_sum, totals.norm, self.loss_scale.factor
        on_device = self._skips_on_device and self._has_updated
        may_be_hidden = totals.not_finite is not None
        waits = not on_device and (
            self._waits_anyway or not loss.is_cuda or norm is not None or may_be_hidden or self._skips_on_device
        )
        overflow: bool | torch.Tensor
        # On the host a step without targets does not come here.
        is_empty = totals.count == 0 if self._may_lack_targets and totals.count.is_cuda else None
        if waits:
            overflow = not (math.isfinite(float(loss)) and (norm is None or math.isfinite(float(norm))))
            overflow = overflow or (totals.not_finite is not None and float(totals.not_finite) > 0)
            self.loss_scale.update(is_finite=not overflow)
            if overflow:
                self.skipped = self.num_skipped + 1
        else:
            is_finite = torch.isfinite(loss) if norm is None else torch.isfinite(loss) & torch.isfinite(norm)
            if totals.not_finite is not None:
                is_finite &= totals.not_finite == 0
            overflow = 1.0 - is_finite.float()
            if on_device:
                self.loss_scale.update_on_device(overflow)
                self.skipped = self.skipped + overflow
        self._open.append(
            Outcome(
                step=step,
                overflow=overflow if isinstance(overflow, bool) else AsyncScalars(overflow),
                is_left_out=waits or on_device,
                own_loss=own_loss,
                loss=loss,
                norm=norm,
                scale_before=before,
                scale_after=self.loss_scale.factor,
                num_skipped=self.skipped,
            )
        )
        if not (waits or on_device):
            return False
        if is_empty is None:
            return overflow
        if isinstance(overflow, bool):
            return overflow or bool(is_empty)
        return torch.maximum(overflow, is_empty.to(overflow))


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
