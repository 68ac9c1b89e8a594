"""The passes of microbatches through the stages of a pipeline, in a step or in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from weft.mesh import Mesh
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.pipeline.executor import StepHooks
from weft.parallel.pipeline.recording import Recording
from weft.parallel.pipeline.stages import Stages
from weft.parallel.state.rng import Seeds
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.plan.pipeline.actions import Action
from weft.sync.base import PipelineSync
from weft.training.data.trees import num_samples
from weft.training.step.loss import Count, Loss
from weft.training.step.microbatches import CountedBatch
from weft.training.step.target_count import TargetCount
from weft.training.step.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of a trainer that a pipelined step uses."""

    cut: CutModel
    mesh: Mesh
    sync: PipelineSync
    update: Update
    loss: Loss
    call: Callable[[Any], Any]
    """Calls the model with a microbatch's inputs."""
    counts: TargetCount
    seeds: Seeds
    recording: Recording
    runs_empty: bool
    """Layers communicate in their forward pass, so that microbatches without samples must run too."""
    whole_output: Callable[[Any], Any]
    """Gathers an output whose features are split over ranks; collective."""
    enter: Callable[[Any], None]
    """Called with a microbatch's inputs before each of its passes, forward or backward."""


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
        self._cut = parts.cut
        self._enter = parts.enter
        gathering = parts.sync.gathering
        assert gathering is None or isinstance(gathering, StageGathering)
        self._gathering = gathering
        self.microbatches: dict[int, Microbatch] = {}

    def take(self, microbatches: list[CountedBatch], *, first: int = 0, step: int = 0) -> None:
        """Take the microbatches of the next actions, the same on every rank of the pipeline."""
        for number, (inputs, targets, count) in enumerate(microbatches):
            samples = num_samples(inputs)
            self._enter(inputs)  # tracing the model is a pass, too
            self.microbatches[first + number] = Microbatch(
                inputs=inputs,
                targets=targets,
                count=count,
                num_samples=samples,
                stages=self._cut.stages_for(inputs) if samples or self._parts.runs_empty else None,
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
        self._enter(microbatch.inputs)
        if not self.stages(action.microbatch).flow.is_random:
            return nullcontext()
        data_rank = self._parts.mesh.sample_rank
        return self._parts.seeds.during(step=microbatch.step, microbatch=microbatch.number, data_rank=data_rank)

    def call(self, microbatch: int) -> Any:
        return self._parts.call(self.microbatches[microbatch].inputs)

    def seed(self, place: int) -> None:
        self._parts.seeds.enter(place)

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
    """Forward passes only; `take_output` is called with every output of the last stage."""

    def __init__(self, parts: StepParts, take_output: Callable[[Microbatch, Any], None]) -> None:
        super().__init__(parts)
        self._take_output = take_output

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._take_output(self.microbatches[microbatch], output)
        return None

    def backward(self, action: Action) -> AbstractContextManager[object]:
        raise AssertionError(f"an evaluation has no backward passes, and {action} is one")
