"""A run in a terminal: a bar with loss, speed and time left; plain lines where there is no terminal."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.cli.terminal import SECONDS_BETWEEN_LINES, say
from weft.plan.exchange.compression import Compression
from weft.server.protocol.message import NO_AGES
from weft.training.run.job import Job
from weft.training.run.metrics import StepRecord
from weft.training.run.observer import Observer, Summary
from weft.training.run.rank_log import RankLog
from weft.training.trainer import Trainer
from weft.units import format_bytes, format_count, format_seconds

_SMOOTHING = 0.9


class TerminalObserver(Observer):
    """Draws a run on rank 0's terminal."""

    def __init__(self, log: RankLog, *, attempt: int) -> None:
        self._attempt = attempt
        self._log = log
        self._console = Console(file=log.terminal)  # a bar that is redrawn has no place in a log
        self._bar: Progress | None = None
        self._last_line_s = 0.0
        self._speed = 0.0
        self._last: StepRecord | None = None
        self._total = 0
        self._flags = ""
        """What a command that goes on with this run needs besides its directory."""

    def started(self, trainer: Trainer, job: Job, directory: Path) -> None:
        done, self._total = trainer.steps_done, job.steps.total
        self._flags = " --replicas-in-process" if trainer.others else ""
        if trainer.mesh.joins_running:
            again = f" again (restart {self._attempt})" if self._attempt else ""
            self._say(f"this worker was started{again}, and joins the run")
        elif self._attempt:
            where = f"step {done}" if done else "the start, for there is no checkpoint yet"
            self._say(f"all ranks were started again (restart {self._attempt}), going on from {where}")
        else:
            sizes = trainer.plan.axes.sizes.items()
            axes = " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"
            axes += " in this process" if trainer.others else ""
            size, device = format_count(trainer.num_parameters), trainer.mesh.world.device.type
            self._say(f"{job.model.name}, {size} parameters, {axes}, on {device}")
            self._say(f"run directory: {directory}")
            if done:
                self._say(f"going on after step {done}")
            if trainer.mesh.by_itself is not None:
                num_workers = trainer.plan.axes.data
                self._say(f"this is worker {trainer.mesh.by_itself}; the run begins when {num_workers} are there")
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task("train", total=self._total, completed=done, loss="–", speed="")

    def stepped(self, record: StepRecord) -> None:
        self._last, fresh = record, self._speed == 0.0
        self._speed = record.units_per_s if fresh else _SMOOTHING * self._speed + (1 - _SMOOTHING) * record.units_per_s
        speed = f"{format_count(self._speed)} {record.unit}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, loss=f"{record.loss:.3f}", speed=speed)
            return
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES or record.step == self._total:
            self._last_line_s = now
            left = format_seconds((self._total - record.step) * record.step_s)
            self._say(f"step {record.step}/{self._total}  loss {record.loss:.3f}  {speed}  {left} left")

    def evaluated(self, step: int, held_out_loss: float) -> None:
        self._say(f"held-out loss after step {step}: {held_out_loss:.3f}")

    def saved(self, checkpoint: Path) -> None:
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        self._say(f"saved {checkpoint} ({format_bytes(size)})")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finished(self, summary: Summary) -> None:
        """Print the sample and the outcome."""
        self.close()
        if summary.sample is not None:
            self._say("a sample of its text:\n")
            self._say(f"{summary.sample}\n")
        if summary.stopped_early:
            self._say(f"stopped after step {summary.steps_done} of {summary.total_steps}; go on with:")
            self._say(f"  weft train --resume {summary.directory}{self._flags}")
        else:
            self._say(f"done: {summary.steps_done} steps, {format_seconds(summary.seconds)} of training")
        if summary.compression is not None:
            self._say(_in_words(summary.compression))
        if self._last is not None and (words := _of_servers(self._last)):
            self._say(words)
        if summary.straggler is not None:
            self._say(summary.straggler.in_words(summary.seconds))

    def _say(self, text: str) -> None:
        say(self._console, text)
        self._log.write(f"{text}\n")


def _in_words(compression: Compression) -> str:
    dense, sent = (format_bytes(number) for number in (compression.dense_bytes, compression.sent_bytes))
    if compression.is_served:
        return f"compression {compression.ratio:.1f}×: rank 0 sent {sent} to servers, where float32 sends {dense}"
    return (
        f"compression {compression.ratio:.1f}×: rank 0 sent {sent} to other replicas, where all-reduce in float32 at "
        f"every step sends {dense}"
    )


def _of_servers(record: StepRecord) -> str:
    """How old gradients were, or how many came too late, up to this step; empty if there is nothing to say."""
    if record.num_dropped:
        return f"{record.num_dropped} gradients came too late for their version, and were dropped"
    ages = record.staleness or []
    if not sum(ages):
        return ""
    mean = sum(age * number for age, number in enumerate(ages)) / sum(ages)
    more = " or more" if len(ages) == len(NO_AGES) else ""  # the last number is of all older ones, too
    return (
        f"staleness: {mean:.1f}{more} updates on average between a gradient and its weights, "
        f"{len(ages) - 1}{more or ' at most'}"
    )
