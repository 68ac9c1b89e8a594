"""What a run tells whoever watches it: a call per event, and a summary at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.plan.exchange.compression import Compression
from weft.training.run.job import Job
from weft.training.run.metrics import StepRecord
from weft.training.stragglers import Straggler
from weft.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run, the same on every rank."""

    directory: Path
    steps_done: int
    total_steps: int
    seconds: float
    """Duration of this process's steps."""
    last_loss: float | None
    held_out_loss: float | None
    sample: str | None
    checkpoint: Path
    """The newest checkpoint."""
    straggler: Straggler | None = None
    """The rank for which the others waited longest; None if none was slow."""
    compression: Compression | None = None
    """Of what replicas exchange, over the whole run; None without a codec."""

    @property
    def stopped_early(self) -> bool:
        return self.steps_done < self.total_steps


class Observer:
    """The callbacks of a run, called on rank 0 only; these do nothing."""

    def started(self, trainer: Trainer, job: Job, directory: Path) -> None:
        """Everything is built and loaded; `trainer.steps_done` is where the run starts or resumes."""

    def stepped(self, record: StepRecord) -> None:
        """A step was done."""

    def evaluated(self, step: int, held_out_loss: float) -> None:
        """The held-out loss was computed."""

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete."""
