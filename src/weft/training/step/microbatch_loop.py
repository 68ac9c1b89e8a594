"""A step without a pipeline: the microbatches one after the other, then the exchange and the update.

The last microbatch's backward pass overlaps the exchange of gradients. With a pipeline the schedule takes the place of
this loop (`pipeline_step.py`, `pipeline_stream.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from weft.mesh import Mesh
from weft.parallel.pipeline.recording import Recording
from weft.sync.base import Sync
from weft.training.data.trees import num_samples
from weft.training.step.clipping import join_norm
from weft.training.step.loss import Count, Loss, loss_terms, no_loss
from weft.training.step.target_count import TargetCount, refuse_no_targets
from weft.training.step.update import Update

CountedBatch = tuple[Any, Any, Count]
"""Inputs, targets, and the number of targets that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoop:
    """Trains and evaluates a model that is in one piece."""

    mesh: Mesh
    sync: Sync
    update: Update
    loss: Loss
    call: Callable[[Any], Any]
    counts: TargetCount
    recording: Recording
    random: Callable[[int, int], AbstractContextManager[None]]
    """Context of the random states of a forward pass, by step and microbatch."""
    enter: Callable[[Any], None]
    """Begins a pass of a microbatch with these inputs."""
    runs_empty: bool
    """Layers exchange in their forward pass, so that a microbatch without samples must run too."""

    def step(self, microbatches: list[CountedBatch], *, step: int) -> torch.Tensor:
        """One step; returns the mean loss over the global batch."""
        shared = self.counts.share([count for _, _, count in microbatches])
        device = self.mesh.world.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        count_sum: Count = 0
        self.recording.begin_step()
        self.sync.begin()
        for number, (inputs, targets, count) in enumerate(microbatches):
            if number == len(microbatches) - 1:
                self.sync.arm()
            if num_samples(inputs) == 0:
                self._run_empty(inputs)
                self.sync.end_microbatch()
                continue
            self.enter(inputs)
            with self.recording.during("forward", number), self.random(step, number):
                terms = loss_terms(self.loss, self.call(inputs), targets, count)
            self.counts.is_own = self.counts.is_own or terms.own_count
            factor = terms.multiplier * self.update.loss_scale.value / shared
            scaled = terms.value if isinstance(factor, float) and factor == 1.0 else terms.value * factor
            with self.recording.during("backward", number):
                scaled.backward()
            self.sync.end_microbatch()
            loss_sum += terms.value.detach() * terms.multiplier
            count_sum = count_sum + terms.count
        counted = torch.as_tensor(count_sum, device=device)
        with self.recording.during("reduce"):
            totals = self.sync.finish(loss_sum, counted, with_norm=self.update.needs_norm)
            totals = join_norm(totals, self.mesh.group("tensor", "control"))
        refuse_no_targets(totals.count)
        with self.recording.during("update"):
            self.update.run(totals.norm, self.counts.correction(shared, totals.count), step=step)
        return totals.loss_sum / totals.count

    def _run_empty(self, inputs: Any) -> None:
        """A microbatch without samples adds nothing, but other ranks may wait for its exchanges."""
        if not self.runs_empty:
            self.sync.skip_microbatch()
            return
        self.enter(inputs)
        with self.sync.ignoring():
            no_loss(self.call(inputs)).backward()

    def evaluate(self, microbatches: list[CountedBatch], add: Callable[[Any, Any, Count], None]) -> None:
        """Run microbatches forward; `add` is given each output, its targets and their number."""
        for inputs, targets, count in microbatches:
            if num_samples(inputs) == 0:
                self.sync.skip_microbatch()
                continue
            self.enter(inputs)
            add(self.call(inputs), targets, count)
