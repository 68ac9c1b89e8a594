"""The passes of microbatches through the stages of a pipeline, in a step or in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from weft.parallel.pipeline.executor import StepHooks
from weft.parallel.pipeline.stages import Stages
from weft.parallel.state.rng import Seeds
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.plan.pipeline.actions import Action
from weft.sync.base import PipelineSync
from weft.training.data.trees import num_samples
from weft.training.loss.loss import Count
from weft.training.step.microbatches import CountedBatch
from weft.training.step.step_parts import StepParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch on this rank."""

    inputs: Any
    targets: Any
    count: Count
    num_samples: int
    stages: Stages | None
    """The stages it passes through; None if it is not computed."""
    step: int
    number: int
    """Its number among the microbatches of its step."""


class MicrobatchPasses(StepHooks):
    """The hooks that training and evaluation have in common."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._model, self._mesh = parts.model, parts.model.mesh
        assert parts.model.cut is not None
        self._cut = parts.model.cut
        self._sync = cast(PipelineSync, parts.model.sync)
        gathering = self._sync.gathering
        assert gathering is None or isinstance(gathering, StageGathering)
        self._gathering = gathering
        self.microbatches: dict[int, Microbatch] = {}

    def take(self, microbatches: list[CountedBatch], *, first: int = 0, step: int = 0) -> None:
        """Take the microbatches of the next actions, the same on every rank of the pipeline."""
        for number, (inputs, targets, count) in enumerate(microbatches):
            samples = num_samples(inputs)
            self._model.enter(inputs)  # tracing the model is a pass, too
            self.microbatches[first + number] = Microbatch(
                inputs=inputs,
                targets=targets,
                count=count,
                num_samples=samples,
                stages=self._cut.stages_for(inputs) if samples or self._model.runs_empty else None,
                step=step,
                number=number,
            )

    def stages(self, microbatch: int) -> Stages:
        stages = self.microbatches[microbatch].stages
        assert stages is not None
        return stages

    def skips(self, microbatch: int) -> bool:
        return self.microbatches[microbatch].stages is None

    def forward(self, action: Action) -> AbstractContextManager[object]:
        if self._gathering is not None:
            self._gathering.wait(None)
        microbatch = self.microbatches[action.microbatch]
        self._model.enter(microbatch.inputs)
        if not self.stages(action.microbatch).flow.is_random:
            return nullcontext()
        data_rank, number = self._model.even_place(microbatch.number)
        sample_rank = self._model.sample_rank_of(data_rank)
        return self._model.seeds.during(step=microbatch.step, microbatch=number, data_rank=sample_rank)

    def call(self, microbatch: int) -> Any:
        return self._parts.call(self.microbatches[microbatch].inputs)

    @property
    def seeds(self) -> Seeds:
        return self._model.seeds

    def before_unit(self, unit: str) -> None:
        if self._gathering is not None:
            self._gathering.wait(unit)

    def exchange(self, action: Action) -> None:
        assert self._gathering is not None
        if action.kind == "gather":
            self._gathering.gather(action.stage)
        else:
            assert action.kind == "release"
            self._gathering.release(action.stage)


class Evaluation(MicrobatchPasses):
    """Forward passes only; `take_output` gets every output of the last stage, its targets and their number."""

    def __init__(self, parts: StepParts, take_output: Callable[[Any, Any, Count], None]) -> None:
        super().__init__(parts)
        self._take_output = take_output

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        part = self.microbatches[microbatch]
        self._take_output(output, part.targets, part.count)
        return None

    def backward(self, action: Action) -> AbstractContextManager[object]:
        raise AssertionError(f"an evaluation has no backward passes, and {action} is one")
