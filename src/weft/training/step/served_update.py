"""The end of a step whose update servers make: say what was pushed, and begin to take the weights that come of it.

The user's optimizer says how servers update, and is not stepped here. A loss that is not finite is said to the servers,
who then leave the update out; which is known with the next weights, of the whole batch where workers share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from weft.errors import CheckpointError
from weft.plan.plan import Plan
from weft.sync.base import Sync, Totals
from weft.sync.served import ServedSync
from weft.training.loss.target_count import refuse_no_targets
from weft.training.step.average import WeightAverage
from weft.training.step.update import Outcome, Update


class ServedUpdate(Update):
    """In the place of an optimizer's update."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync: ServedSync,
        plan: Plan,
        *,
        schedule: Callable[[int], float] | None,
    ) -> None:
        super().__init__(optimizer, sync, plan, schedule=schedule)
        self._served = sync
        self._clip_norm = 0.0 if plan.server.updates_together else plan.step.clip_norm
        # Else servers clip, who have the whole gradient; and it shows what overflows in 16 bits.
        self.needs_norm = self._clip_norm > 0 or plan.precision.compute == "fp16"

    def run(
        self,
        totals: Totals,
        correction: float | torch.Tensor | None,
        *,
        step: int,
        own_loss: torch.Tensor | None,
        closes: bool = True,
    ) -> None:
        del closes
        count, unit = float(totals.count), 1.0 if correction is None else float(correction)
        factor = unit / float(self.loss_scale.factor)
        is_finite = True
        if totals.norm is not None:
            self.grad_norm = totals.norm * factor
            is_finite = math.isfinite(norm := float(self.grad_norm))
            if is_finite and self._clip_norm:
                factor *= min(1.0, self._clip_norm / (norm + 1e-6))
        self._end(step, count, float(totals.loss_sum), count * factor, own_loss, is_finite=is_finite, unit=unit)

    def leave_out(self, *, step: int) -> None:
        self._end(step, 0.0, 0.0, 1.0, None)

    @contextmanager
    def holding_state(self) -> Iterator[bool]:
        """As in any run; of all workers, the first writes."""
        writes = self._served.take_part().index == 0
        if writes:
            self._served.fetch_state(self._optimizer)
        try:
            yield writes
        finally:
            self._optimizer.state.clear()
            if writes:
                self._served.round_weights()

    def require_loadable(self) -> None:
        if self._served.has_joined:
            raise CheckpointError(
                "servers have weights already, and all workers go on from these; load a checkpoint before the first "
                "step, batch or evaluation"
            )

    def _end(
        self,
        step: int,
        count: float,
        loss_sum: float,
        divisor: float,
        own_loss: torch.Tensor | None,
        *,
        is_finite: bool = True,
        unit: float = 1.0,
    ) -> None:
        """`divisor`: what gradients were divided by; `unit`: that over what the next ones will be divided by."""
        factor = 1.0 if self._schedule is None else self._schedule(step)
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor  # the servers' rate, for whoever looks at it here
        is_sent = self._served.commit(
            count=count,
            loss_sum=loss_sum,
            divisor=divisor,
            lr_factor=factor,
            compute_s=0.0,
            is_finite=is_finite and math.isfinite(loss_sum),
        )
        self._served.take_weights()
        self._served.end_codecs(count=count if is_sent else 0.0, unit=unit)
        told = self._served.take_part()
        if self._served.shares_batch:
            refuse_no_targets(torch.tensor(told.count))
        is_bad = told.is_skipped or not math.isfinite(told.loss_sum)
        before = self.loss_scale.factor
        self.loss_scale.update(is_finite=not is_bad)
        self.skipped = self.num_skipped + is_bad
        outcome = Outcome(
            step=step,
            overflow=is_bad,
            is_left_out=True,
            own_loss=own_loss,
            loss=torch.tensor(told.loss_sum, dtype=torch.float64),
            norm=None,
            scale_before=before,
            scale_after=self.loss_scale.factor,
            num_skipped=self.skipped,
        )
        self.closed.append(outcome)


def make_update(
    optimizer: torch.optim.Optimizer,
    sync: Sync,
    plan: Plan,
    *,
    schedule: Callable[[int], float] | None,
    average: WeightAverage | None,
) -> Update:
    """The end of a step with this sync."""
    if isinstance(sync, ServedSync):
        return ServedUpdate(optimizer, sync, plan, schedule=schedule)
    return Update(optimizer, sync, plan, schedule=schedule, average=average)
