"""The record that a step is made from, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.parallel.pipeline.recording import Recording
from weft.sync.compute_clock import ComputeClock
from weft.training.loss.loss import Loss
from weft.training.loss.target_count import TargetCount
from weft.training.step.parallel_model import ParallelModel
from weft.training.step.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A parallel model, and what a step uses besides it."""

    model: ParallelModel
    update: Update
    loss: Loss
    call: Callable[[Any], Any]
    """Calls the model with a microbatch's inputs."""
    counts: TargetCount
    recording: Recording
    clock: ComputeClock
