"""A step of a pipeline that is not flushed between steps: PipeDream and PipeDream-2BW.

A step feeds its microbatches and returns; their backward passes run in later steps, on the weights of their forward
passes (`parallel/pipeline/weight_versions.py`). PipeDream updates after each microbatch, 2BW after each step's
microbatches. A loss is returned once its microbatches have passed all stages: `nan` until the first have. `flush`
finishes the microbatches in flight.

Stages reach the same update in different steps. So a batch without targets is refused not there, where earlier stages
would wait for one that has raised, but when its loss would be returned: in the same call on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from weft.parallel.pipeline.weight_versions import WeightVersions
from weft.plan.pipeline.actions import EVERY, Action
from weft.plan.pipeline.communication import schedule_of
from weft.plan.pipeline.schedules import version_slots
from weft.sync.base import Totals
from weft.training.data.trees import num_samples
from weft.training.loss.target_count import refuse_no_targets
from weft.training.step.microbatches import CountedBatch
from weft.training.step.pipeline_step import PipelineStep, UpdateBatch
from weft.training.step.step_parts import StepParts

_FIRST_ROUNDS = 3
"""Number of times that the pipeline is filled until every stage has certainly updated once."""


class PipelineStream(PipelineStep):
    """Trains without flushing the pipeline between steps."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        plan, stage = self._mesh.plan, self._control.index
        num_slots, lag = version_slots(
            plan.pipeline.schedule, self._control.size, stage, vertical_sync=plan.pipeline.vertical_sync
        )
        self.versions = WeightVersions(
            self._cut.model, dict(self._cut.model.named_parameters()), num_slots=num_slots, lag=lag
        )
        self._at_once = 1 if plan.pipeline.schedule == "pipedream" else plan.step.microbatches
        """Microbatches per update."""
        self._fed = 0
        """Number of microbatches so far."""
        self._start = 0
        """The first microbatch since the pipeline was last empty."""
        self._first_passes_end: int | None = None
        """Microbatches below this number run while some stages run passes and updates for the first time."""
        self._batches: dict[int, UpdateBatch] = {}
        self._ended: dict[int, Totals] = {}
        """Totals of batches that this stage has updated with, and other stages perhaps not yet."""
        self._counted: float | torch.Tensor = 0.0
        """Number of targets so far in the step whose batches are ending."""
        self._latest = self._loss_of(float("nan"))
        self._steady: tuple[int, tuple[Action, ...]] | None = None

    def step(self, microbatches: list[CountedBatch], *, step: int) -> torch.Tensor:
        """Feed microbatches; returns the latest loss whose microbatches have passed every stage."""
        self.take(microbatches, first=self._fed, step=step)
        for first in range(0, len(microbatches), self._at_once):
            inside = microbatches[first : first + self._at_once]
            self._batches[(self._fed + first) // self._at_once] = self._make_batch(inside, step)
        self.pipeline.recording.begin_step()
        if self._first_passes_end is None:
            self._first_passes_end = self._fed + _FIRST_ROUNDS * (self._control.size + self._at_once)
        self._clock.begin()
        self.pipeline.run(self._steps_schedule(len(microbatches)), self, first_passes_end=self._first_passes_end)
        self._clock.end(sum(num_samples(inputs) for inputs, _, _ in microbatches))
        self._fed += len(microbatches)
        return self._finished(self._fed - (self._control.size - 1))

    def flush(self) -> None:
        super().flush()
        if self._start == self._fed:
            return
        self.pipeline.run(self._schedule_of(0, drain=True), self, first_passes_end=self._first_passes_end)
        self.pipeline.settle()
        self._start = self._fed
        if self._mesh.plan.pipeline.schedule == "pipedream":
            self.versions.forget_older()
        self._finished(self._fed)

    def _steps_schedule(self, num_microbatches: int) -> tuple[Action, ...]:
        """The actions of a step; once the pipeline is full, those of an earlier step for later microbatches."""
        # By then no microbatch of the list uses a version that microbatches before the list used too.
        if self._fed - self._start < 2 * max(self._control.size - 1, self._at_once):
            return self._schedule_of(num_microbatches, drain=False)
        if self._steady is None:
            self._steady = self._fed, self._schedule_of(num_microbatches, drain=False)
        first, actions = self._steady
        moved = self._fed - first
        return shift_schedule(actions, num_microbatches=moved, num_updates=moved // self._at_once)

    def _schedule_of(self, num_microbatches: int, *, drain: bool) -> tuple[Action, ...]:
        schedule = schedule_of(
            self._mesh.plan,
            num_microbatches=num_microbatches,
            first=self._fed,
            start=self._start,
            drain=drain,
            together=self._totals is not None,
        )
        return schedule[self._control.index]

    def _finished(self, num_microbatches: int) -> torch.Tensor:
        """The loss of the latest batch among the first `num_microbatches`."""
        done = max(num_microbatches, 0) // self._at_once
        for number in [number for number in self._ended if number < done]:
            totals = self._ended.pop(number)
            self._update.close_oldest()
            self._latest = torch.where(totals.count > 0, totals.loss_sum / totals.count, self._latest)
            self._counted = totals.count + self._counted
            if (number + 1) * self._at_once % self._mesh.plan.step.microbatches == 0:
                counted, self._counted = self._counted, 0.0
                refuse_no_targets(counted)
        return self._latest

    def _batch_of(self, microbatch: int) -> UpdateBatch:
        return self._batches[microbatch // self._at_once]

    @contextmanager
    def forward(self, action: Action) -> Iterator[None]:
        self.versions.hold(action.version)
        with self.versions.using(action.version), super().forward(action):
            yield

    @contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        self._model.enter(self.microbatches[action.microbatch].inputs)
        before = self._batches.get(action.microbatch // self._at_once - 1)
        if before is not None:  # updates may lag, and the first two batches use the same weights
            self._take_gradients(before)
        has_samples = self.microbatches[action.microbatch].num_samples > 0
        # A recomputed block must find the weights of its version.
        with self.versions.using(action.version), nullcontext() if has_samples else self._ignoring(action.version):
            yield
        self.versions.release(action.version)
        if has_samples:
            self._batch_of(action.microbatch).version = action.version

    @contextmanager
    def _ignoring(self, version: int) -> Iterator[None]:
        """Context of a backward pass that only takes part in collectives and leaves no gradients, not even zeros."""
        leaves = list(self.versions.leaves(version).values())
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        yield
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient

    def exchange(self, action: Action) -> None:
        number = action.version - 1 if action.kind == "update" else action.microbatch
        if action.kind == "reduce" and self._at_once > 1:
            number = min(self._batches)  # batches end in order
        batch = self._batches[number]
        if not batch.is_handed_over:
            self._take_gradients(batch)
            self._hand_over()
            batch.is_handed_over = True
        if action.kind == "update":
            self._ended[number], correction = self._agree(self._sum_over_data(batch), batch.divisor)
            with self.versions.advance():
                own_loss = self._own_loss(batch)
                self._update.run(self._ended[number], correction, step=batch.step, own_loss=own_loss, closes=False)
            del self._batches[number]
            for microbatch in range(number * self._at_once, (number + 1) * self._at_once):
                del self.microbatches[microbatch]

    def _take_gradients(self, batch: UpdateBatch) -> None:
        if batch.is_taken:
            return
        self._sync.begin()
        if batch.version is not None:
            self.versions.take_gradients(batch.version)
        batch.is_taken = True

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        older = self.versions.older()
        tensors = {f"{version}/{name}": t for version, named in older.items() for name, t in named.items()}
        return tensors, {"newest": self.versions.newest, "fed": self._fed, "latest": float(self._latest)}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self._fed = self._start = int(values.get("fed", 0))
        self._latest = self._loss_of(values.get("latest", float("nan")))
        if not values:
            self.versions.restart(0)
            return
        older: dict[int, dict[str, torch.Tensor]] = {}
        for entry, tensor in tensors.items():
            version, _, name = entry.partition("/")
            older.setdefault(int(version), {})[name] = tensor
        self.versions.load(int(values["newest"]), older)


def shift_schedule(actions: Sequence[Action], *, num_microbatches: int, num_updates: int) -> tuple[Action, ...]:
    """The same actions for later microbatches, on weights that are newer by some updates."""
    return tuple(
        replace(
            action,
            microbatch=action.microbatch if action.microbatch == EVERY else action.microbatch + num_microbatches,
            version=action.version + num_updates if action.is_compute else action.version,
        )
        for action in actions
    )
