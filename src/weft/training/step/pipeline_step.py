"""A step of a pipeline that is empty between steps: naive, GPipe, 1F1B, interleaved and zero-bubble.

    every rank   take the same microbatches ─ execute the schedule ─ complete gradients ─ agree ─ update

Loss and count are known on the last stage only. After its exchange with the other data ranks they follow the last
gradients from stage to stage, each of which by then needs nothing else to update; so no stage waits for an earlier one.
Where the plan clips, or computes in 16 bits, all stages wait for each other's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.collectives import all_reduce, broadcast
from weft.errors import DataError
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.pipeline.executor import Pipeline
from weft.parallel.pipeline.stage_messages import StageMessages
from weft.parallel.tensor.cross_entropy import gather_logits
from weft.plan.pipeline.actions import Action
from weft.plan.pipeline.communication import FLUSH_FREE, evaluation_of, schedule_of
from weft.sync.base import Totals
from weft.training.loss.loss import Count, loss_terms, no_loss
from weft.training.step.async_scalars import scalar_on_device
from weft.training.step.microbatches import CountedBatch
from weft.training.step.pipeline_passes import Evaluation, MicrobatchPasses
from weft.training.step.step_parts import StepParts
from weft.training.step.update import join_norm

_GRADIENTS = ("backward", "weight-grad")
"""The kinds of action after which gradients of parameters may be complete."""


@dataclass(slots=True, kw_only=True)
class UpdateBatch:
    """The microbatches of one update, and their loss so far."""

    step: int
    divisor: float | torch.Tensor
    """The number that losses are divided by."""
    loss_sum: torch.Tensor
    count: Count = 0
    version: int | None = None
    """The weight version of its gradients; None if there is one version, or no microbatch has samples here."""
    is_taken: bool = False
    """Its gradients have been moved from that version to the parameters."""
    is_handed_over: bool = False
    """Its gradients have been handed over to the sync."""


class PipelineStep(MicrobatchPasses):
    """Trains a model that is cut into stages."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        cut, mesh = self._cut, self._mesh
        self._update = parts.update
        self._counts, self._clock = parts.counts, parts.clock
        self._control = mesh.group("pipeline", "control")
        self._is_last = self._control.index == self._control.size - 1
        trained = {name: parameter for name, parameter in cut.model.named_parameters() if parameter.requires_grad}
        self.pipeline = Pipeline(
            model=cut,
            messages=StageMessages(mesh, cut.my_stages, cut.num_stages),
            recording=parts.recording,
            parameters=list(trained.values()),
            device=mesh.world.device,
        )
        is_tied = mesh.plan.pipeline.schedule in FLUSH_FREE and bool(cut.holders)
        self._totals = mesh.group("pipeline", "totals") if self._update.needs_norm or is_tied else None
        """The group of all stages, where they update together."""
        self._names = _names_of_stages(cut, trained)
        self._schedules: dict[int, tuple[Action, ...]] = {}
        """By number of microbatches: data ranks may have different ones."""
        self._evaluations: dict[int, tuple[Action, ...]] = {}
        self._last: set[tuple[str, int, int]] = set()
        self._refusal: DataError | None = None

    def step(self, microbatches: list[CountedBatch], *, step: int) -> torch.Tensor:
        """One step; returns the mean loss over the batch, NaN where this replica has no targets."""
        schedule = self._schedule_for(len(microbatches))
        last = {a.stage: (a.kind, a.stage, a.microbatch) for a in schedule if a.kind in _GRADIENTS}
        self._last = set(last.values())
        self.microbatches.clear()  # the last step may have had more
        self.take(microbatches, step=step)
        self._batch = self._make_batch(microbatches, step)
        self.pipeline.recording.begin_step()
        self._sync.begin()
        self._clock.begin()
        self.pipeline.run(schedule, self)
        self.pipeline.settle()  # free: no step starts before the first stage, which ends last, is done
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        return self._mean

    def _schedule_for(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._schedules:
            schedule = schedule_of(self._mesh.plan, num_microbatches=num_microbatches)
            self._schedules[num_microbatches] = schedule[self._control.index]
        return self._schedules[num_microbatches]

    def _make_batch(self, microbatches: list[CountedBatch], step: int) -> UpdateBatch:
        # Only the last stage has losses, and counts its targets.
        divisor = self._counts.share([count for _, _, count in microbatches]) if self._is_last else 1.0
        return UpdateBatch(step=step, divisor=divisor, loss_sum=self._loss_of(0.0))

    def _loss_of(self, value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._mesh.world.device)

    def _batch_of(self, microbatch: int) -> UpdateBatch:
        return self._batch

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        part = self.microbatches[microbatch]
        if part.num_samples == 0:
            nothing = no_loss(output)
            return nothing, torch.ones_like(nothing)
        terms = loss_terms(self._parts.loss, output, part.targets, part.count)
        self._counts.is_own = self._counts.is_own or terms.own_count
        value, multiplier, batch = terms.value, terms.multiplier, self._batch_of(microbatch)
        batch.loss_sum += value.detach() * multiplier
        batch.count = batch.count + terms.count
        # A loss is scaled by its own gradient, not by another operator.
        factor = multiplier * self._update.loss_scale.factor / batch.divisor
        return value, scalar_on_device(factor, value.device, value.dtype)

    def backward(self, action: Action) -> AbstractContextManager[object]:
        self._model.enter(self.microbatches[action.microbatch].inputs)
        if self._gathering is not None:
            self._gathering.wait_for_stage(action.stage)
        if (action.kind, action.stage, action.microbatch) in self._last:
            self._sync.arm_parameters(self._names[action.stage])
        return nullcontext() if self.microbatches[action.microbatch].num_samples else self._sync.ignoring()

    def exchange(self, action: Action) -> None:
        if action.kind == "reduce":
            self._sync.complete(self._names[action.stage])
        elif action.kind == "update":
            self._clock.end(sum(part.num_samples for part in self.microbatches.values()))
            self._hand_over()
            totals, correction = self._agree(self._sum_over_data(self._batch), self._batch.divisor)
            try:
                has_targets = self._counts.found_some(totals.count, step=self._batch.step)
            except DataError as error:
                self._refusal = error  # raised on all stages, once nothing is under way
                return
            self._mean = totals.loss_sum / totals.count
            if not has_targets:
                self._update.leave_out(step=self._batch.step)
                return
            self._update.run(totals, correction, step=self._batch.step, own_loss=self._own_loss(self._batch))
        else:
            super().exchange(action)

    def _sum_over_data(self, batch: UpdateBatch) -> Totals:
        counted = scalar_on_device(batch.count, self._mesh.world.device)
        needs_norm, own_s = self._update.needs_norm, self._clock.own_s
        totals = self._sync.finish(batch.loss_sum, counted, with_norm=needs_norm, compute_s=own_s)
        self._clock.everyones_s = totals.compute_s
        return join_norm(totals, self._mesh.group("tensor", "activations"))

    def _own_loss(self, batch: UpdateBatch) -> torch.Tensor | None:
        return batch.loss_sum if self._is_last else None

    def _hand_over(self) -> None:
        """Let all gradients go to the other data ranks."""
        self._sync.take_deferred()
        self._sync.arm()
        self._sync.end_microbatch()

    @torch.no_grad()
    def _agree(self, totals: Totals, divisor: float | torch.Tensor) -> tuple[Totals, float | torch.Tensor | None]:
        """The last stage's totals and correction of gradients, on every stage."""
        words = torch.zeros(4, dtype=torch.float64, device=self._mesh.world.device)
        correction = self._counts.correction(divisor, totals.count) if self._is_last else None
        if self._is_last:
            words[0], words[1] = totals.loss_sum, totals.count
            words[2] = scalar_on_device(1.0 if correction is None else correction, words.device)
        if self._update.needs_norm:
            assert totals.norm is not None
            words[3] = totals.norm**2
        if self._totals is not None:
            all_reduce(words, self._totals)
        else:
            self.pipeline.messages.send_to_previous_ranks(words)
        norm = words[3].sqrt() if self._update.needs_norm else None
        if not self._is_last:
            correction = words[2] if words.is_cuda else (None if float(words[2]) == 1.0 else float(words[2]))
        return Totals(loss_sum=words[0], count=words[1], norm=norm), correction

    def flush(self) -> None:
        """Nothing is in flight between steps, unless one failed."""
        self.pipeline.refuse_failed()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The state between steps, besides weights and optimizer: tensors and plain values."""
        return {}, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Restore what `state` returned; nothing, where weights came from elsewhere."""

    def _evaluation(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._evaluations:
            schedule = evaluation_of(self._mesh.plan, num_microbatches)
            self._evaluations[num_microbatches] = schedule[self._control.index]
        return self._evaluations[num_microbatches]

    def evaluate(self, microbatches: list[CountedBatch], take_output: Callable[[Any, Any, Count], None]) -> None:
        """Run microbatches forward; on the last stage, `take_output` gets outputs, targets and their numbers."""
        evaluation = Evaluation(self._parts, take_output)
        evaluation.take(microbatches)
        self.pipeline.recording.begin_step()
        self.pipeline.run(self._evaluation(len(microbatches)), evaluation)

    def skip_evaluation(self, num_microbatches: int) -> None:
        """Take part in the parameter gathers of the other data ranks' forward passes."""
        self.pipeline.run([a for a in self._evaluation(num_microbatches) if a.kind in ("gather", "release")], self)

    def token(self, window: torch.Tensor, pick: Callable[[Any], int]) -> int:
        """The next token, picked on the last stage, on every rank."""
        picked = torch.zeros(1, dtype=torch.int64)
        tensor = self._model.tensor

        def take_output(output: Any, *_: Any) -> None:
            if tensor is not None and tensor.output is not None:
                output = gather_logits(output, tensor.output, tensor.group)
            picked[0] = pick(output)

        self.evaluate([(window, None, 0)], take_output)
        broadcast(picked, self._control, root=self._control.size - 1)
        return int(picked)


def _names_of_stages(cut: CutModel, trained: Iterable[str]) -> dict[int, list[str]]:
    """The parameters that only one stage of this rank uses, by stage: their gradients are complete when its are."""
    names: dict[int, list[str]] = {stage: [] for stage in cut.my_stages}
    for name in trained:
        here = cut.stages_of[name] & names.keys()
        if len(here) == 1:
            names[min(here)].append(name)
    return names
