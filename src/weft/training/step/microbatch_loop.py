"""A step without a pipeline: the microbatches one after the other, then the exchange and the update.

The last microbatch's backward pass overlaps the exchange of gradients. With a pipeline the schedule takes the place of
this loop (`pipeline_step.py`, `pipeline_stream.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.training.data.trees import num_samples
from weft.training.loss.loss import Count, loss_terms, no_loss
from weft.training.step.async_scalars import scalar_on_device
from weft.training.step.microbatches import CountedBatch
from weft.training.step.step_parts import StepParts
from weft.training.step.update import join_norm


class MicrobatchLoop:
    """Trains and evaluates a model that is in one piece."""

    def __init__(self, parts: StepParts) -> None:
        self._loss, self._call, self._counts = parts.loss, parts.call, parts.counts
        self._update, self._recording, self._clock = parts.update, parts.recording, parts.clock
        self._model, self._mesh, self._sync = parts.model, parts.model.mesh, parts.model.sync

    def step(self, microbatches: list[CountedBatch], *, step: int) -> torch.Tensor:
        """One step; returns the mean loss over the batch, NaN where this replica has no targets."""
        shared = self._counts.share([count for _, _, count in microbatches])
        device = self._mesh.world.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        count_sum: Count = 0
        self._recording.begin_step()
        self._sync.begin()
        self._clock.begin()
        for number, (inputs, targets, count) in enumerate(microbatches):
            if number == len(microbatches) - 1:
                self._sync.arm()
            if num_samples(inputs) == 0:
                self._run_empty(inputs)
                self._sync.end_microbatch()
                continue
            self._model.enter(inputs)
            with self._recording.during("forward", number), self._model.random_states(step, number):
                terms = loss_terms(self._loss, self._call(inputs), targets, count)
            self._counts.is_own = self._counts.is_own or terms.own_count
            factor = terms.multiplier * self._update.loss_scale.factor / shared
            scaled = terms.value if isinstance(factor, float) and factor == 1.0 else terms.value * factor
            with self._recording.during("backward", number):
                scaled.backward()
            self._sync.end_microbatch()
            loss_sum += terms.value.detach() * terms.multiplier
            count_sum = count_sum + terms.count
        counted = scalar_on_device(count_sum, device)
        self._clock.end(sum(num_samples(inputs) for inputs, _, _ in microbatches))
        with self._recording.during("reduce"):
            needs_norm, own_s = self._update.needs_norm, self._clock.own_s
            totals = self._sync.finish(loss_sum, counted, with_norm=needs_norm, compute_s=own_s)
            self._clock.everyones_s = totals.compute_s
            totals = join_norm(totals, self._mesh.group("tensor", "activations"))
        if not self._counts.found_some(totals.count, step=step, own=count_sum):
            self._update.leave_out(step=step)
            return totals.loss_sum / totals.count
        with self._recording.during("update"):
            correction = self._counts.correction(shared, totals.count)
            self._update.run(totals, correction, step=step, own_loss=loss_sum)
        return totals.loss_sum / totals.count

    def _run_empty(self, inputs: Any) -> None:
        """A microbatch without samples adds nothing, but other ranks may wait for its exchanges."""
        if not self._model.runs_empty:
            self._sync.skip_microbatch()
            return
        self._model.enter(inputs)
        with self._sync.ignoring():
            no_loss(self._call(inputs)).backward()

    def evaluate(self, microbatches: list[CountedBatch], add: Callable[[Any, Any, Count], None]) -> None:
        """Run microbatches forward; `add` is given each output, its targets and their number."""
        for inputs, targets, count in microbatches:
            if num_samples(inputs) == 0:
                self._sync.skip_microbatch()
                continue
            self._model.enter(inputs)
            add(self._call(inputs), targets, count)

    def skip_evaluation(self, num_microbatches: int) -> None:
        """Take part in the parameter gathers of the other data ranks' forward passes."""
        for _ in range(num_microbatches):
            self._sync.skip_microbatch()
