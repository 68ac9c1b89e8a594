"""The training loop: a job from its first step, or its last checkpoint, to its end.

    build model, data, trainer ─ load the newest checkpoint, if resuming
    for each batch:  step ─ record ─ every n steps: save, evaluate ─ stop?
    evaluate on held-out data ─ a sample of text ─ save

A run's directory holds `job.toml` and `plan.toml`, `metrics.jsonl` and `checkpoints/`, and `stacks/` once ranks have
waited for long. Every rank runs this file; only rank 0 writes metrics and calls the observer.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.files.agree import try_on_files
from weft.checkpoint.folders import all_checkpoints, prune
from weft.checkpoint.server_snapshots import save_servers
from weft.comm.failures.watch import write_stacks_to
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, JobError, ModelError, NotFiniteError
from weft.plan.all_ranks import with_ranks
from weft.plan.check import check, require
from weft.plan.late_merges import late_merge_problems
from weft.plan.partition.one_worker import is_served
from weft.plan.partition.replicas import in_process_problems
from weft.plan.plan import ALL, Axes, Plan
from weft.plan.text import read_plan, write_plan, write_text
from weft.report.trace import write as write_trace
from weft.server.worker_mesh import ranks_of_run
from weft.training.data.batches import Batches, batches
from weft.training.data.datasets import fetch
from weft.training.parallelize import parallelize
from weft.training.run.components import Prepared, context_of, prepare
from weft.training.run.compression_report import compression_of_run
from weft.training.run.folder_probe import require_usable, room_for
from weft.training.run.job import Job, default_job, format_job, read_job
from weft.training.run.metrics import MetricsFile, Recorder, StepRecord, replica_fields, served_fields, units_of
from weft.training.run.naming_step import naming_step
from weft.training.run.newest import load_newest_whole
from weft.training.run.observer import Observer, Summary
from weft.training.run.roll_back import RollBack
from weft.training.run.same_job import require_same_job
from weft.training.run.stop import StopRequest
from weft.training.trainer import Trainer
from weft.world import join_world

JOB_FILE, PLAN_FILE, METRICS_FILE, CHECKPOINTS = "job.toml", "plan.toml", "metrics.jsonl", "checkpoints"
STACKS = "stacks"
log = logging.getLogger("weft")
_PROMPT, _SAMPLE_TOKENS, _TEMPERATURE = b"def ", 256, 0.7


def train(
    job: Job | str | Path | None = None,
    *,
    directory: str | Path,
    resume: bool = False,
    observer: Observer | None = None,
    stop_file: Path | None = None,
    trace_file: Path | None = None,
    on_open: Callable[[Path, int | None], None] | None = None,
    replicas_in_process: bool = False,
) -> Summary:
    """Run a job to its end on the ranks that call this; collective.

    `job` is a Job, the path of a job file, or None for the embedded default. With `resume` the run in `directory` goes
    on from its newest checkpoint (or from the start, if it has none yet); otherwise `directory` must hold no run. With
    `trace_file`, a timeline of the ranks of rank 0's pipeline is written there at the end. `on_open` is called on every
    rank once the run's directory is there, with the number of a worker of servers that was started by itself. With
    `replicas_in_process` this process is all replicas of the plan (docs/replicas-in-process.md).
    """
    if job is None:
        job = default_job()
    wanted = job if isinstance(job, Job) else read_job(job)
    plan = wanted.plan or Plan(axes=Axes(data=ALL))
    num_ranks = ranks_of_run(plan) if is_served(plan) else join_world().size
    if replicas_in_process:
        require(list(in_process_problems(plan, num_processes=num_ranks)))
        num_ranks = plan.axes.num_ranks
    plan = with_ranks(plan, num_ranks)
    wanted = replace(wanted, plan=plan)
    problems = check(plan, num_ranks=num_ranks, global_batch=wanted.steps.global_batch)
    prepared = prepare(wanted, besides=[*problems, *late_merge_problems(plan, total_steps=wanted.steps.total)])
    torch.manual_seed(wanted.steps.seed)
    trainer = parallelize(
        prepared.make_empty(),
        plan,
        loss=prepared.loss,
        optimizer=prepared.optimizer,
        schedule=prepared.schedule,
        groups=prepared.groups,
        global_batch=wanted.steps.global_batch,
        example=_example(prepared, plan, wanted.steps.global_batch),
        weights=prepared.weights,
        new_layers=prepared.new_layers,
        skip_at_most=wanted.steps.skip_at_most,
        replicas_in_process=replicas_in_process,
    )
    require_same_job(wanted, trainer.mesh.described)
    rank = trainer.mesh.ranks_before + trainer.mesh.world.rank
    torch.manual_seed(wanted.steps.seed + 1 + rank)  # dropout must differ between ranks, weights must not
    never = plan.replica_axis is not None and not plan.data.switch_step and wanted.steps.total < plan.data.every
    if never and rank == 0:
        log.warning(
            "[data] every = %d, and the run has %d steps: replicas exchange nothing before its end",
            plan.data.every,
            wanted.steps.total,
        )
    directory = Path(trainer.mesh.said_by_first(str(directory)))
    write_stacks_to(directory / STACKS)
    is_told = rank == 0 or (trainer.mesh.by_itself is not None and trainer.mesh.world.rank == 0)
    run = _Run(wanted, prepared, trainer, directory, observer if observer and is_told else Observer())
    run.open(resume)
    if on_open is not None:
        on_open(directory, trainer.mesh.by_itself)
    if trace_file is not None:
        trainer.keep_trace()
    with naming_step(trainer):
        summary = run.go(stop_file)
    if trace_file is not None:
        trace = trainer.trace()
        if rank == 0:
            write_trace(trace_file, trace)
    if is_served(plan):
        trainer.close()  # which tells the servers, who would wait for this worker
    return summary


def _example(prepared: Prepared, plan: Plan, global_batch: int) -> Any:
    """The inputs of one microbatch, by which a model is split; None if the plan splits none."""
    if plan.axes.pipeline * plan.axes.tensor * plan.axes.sequence == 1:
        return None
    parts = plan.axes.data_ranks * plan.step.microbatches
    return fetch(prepared.train_data, np.arange(max(global_batch // parts, 1)))[0]


def read_run(directory: str | Path) -> Job:
    """The job of a run directory, with the plan it ran under."""
    directory = Path(directory)
    if not (directory / JOB_FILE).is_file():
        raise JobError(
            f"{directory} holds no run: there is no {JOB_FILE} in it; give the directory that weft train printed"
        )
    return replace(read_job(directory / JOB_FILE), plan=read_plan(directory / PLAN_FILE))


class _Run:
    """A job while it runs, on one rank."""

    def __init__(self, job: Job, prepared: Prepared, trainer: Trainer, directory: Path, observer: Observer) -> None:
        self.job, self.prepared, self.trainer = job, prepared, trainer
        self.directory, self.observer = directory, observer
        self.metrics: MetricsFile | None = None
        self.recorder = Recorder(trainer.mesh)
        size, seed = job.steps.global_batch, job.steps.seed
        self.samples = batches(prepared.train_data, trainer, global_batch=size, shuffle_seed=seed, epochs=None)
        self.held_out: Batches | None = None
        if prepared.held_out is not None:
            self.held_out = batches(prepared.held_out, trainer, global_batch=min(size, len(prepared.held_out)))
        self.last_loss: float | None = None
        self.roll_backs = RollBack(trainer, directory / CHECKPOINTS, at_most=job.steps.roll_back_at_most)
        self.being_saved: Path | None = None
        """The checkpoint not yet reported to the observer."""

    @property
    def is_first(self) -> bool:
        """This rank writes what is written once; of workers of servers, another one goes on with that if it leaves."""
        return self.trainer.mesh.world.rank == 0 and self.trainer.mesh.leads

    def open(self, resume: bool) -> None:
        """Make the run's directory, or go on from what is in it."""
        if resume and not is_served(self.trainer.plan):  # else whoever starts servers has done it
            take = functools.partial(save_servers, self.directory, self.directory / CHECKPOINTS)
            everyone = self.trainer.mesh.everyone("control")
            try_on_files(everyone, "read", self.directory, take if self.is_first else lambda: None)
        # Agreed on by all ranks before anything is written: hosts may not yet see the same files in a shared folder.
        mine = [path.name for path in all_checkpoints(self.directory / CHECKPOINTS)]
        looked = [(self.directory / JOB_FILE).exists(), mine]
        seen = gather_values(looked, self.trainer.mesh.everyone("control"))
        saved = sorted({name for _, names in seen for name in names}, key=lambda name: int(name[5:]))
        if not resume and self.trainer.mesh.leads and any(holds_run for holds_run, _ in seen):
            raise JobError(f"{self.directory} holds a run already; resume it, or give another directory")
        there = max(len(names) for _, names in seen)
        require_usable(self.directory, self.trainer, room_for(self.job.steps, self.prepared.optimizer, there=there))
        if resume and not self.trainer.mesh.joins_running:
            load_newest_whole(self.trainer, self.directory / CHECKPOINTS, saved)
        elif resume and self.trainer.mesh.leads:  # it gives first weights, if an earlier start of it has not done so
            with suppress(CheckpointError):  # others go on, and delete old ones
                load_newest_whole(self.trainer, self.directory / CHECKPOINTS, saved)
        if self.is_first and not (self.trainer.mesh.joins_running and (self.directory / JOB_FILE).exists()):
            self._begin_files(steps_done=self.trainer.steps_done)
        self.observer.started(self.trainer, self.job, self.directory)

    def _begin_files(self, *, steps_done: int) -> None:
        try:
            (self.directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            write_plan(self.trainer.plan, self.directory / PLAN_FILE)
            write_text(self.directory / JOB_FILE, format_job(self.job, plan=PLAN_FILE), kind=JobError)
            self.metrics = MetricsFile(self.directory / METRICS_FILE, steps_done=steps_done)
        except OSError as error:
            raise JobError(f"cannot write to {error.filename or self.directory}: {error.strerror or error}") from error

    def go(self, stop_file: Path | None) -> Summary:
        """Train to the end, or until a stop is asked for."""
        steps, started_s = self.job.steps, time.perf_counter()
        self.recorder.restart_clock()
        with StopRequest(self.trainer.mesh, file=stop_file) as stop, closing(self):
            stopped, checkpoint = False, None
            self.trainer.sync.take_part()
            for inputs, targets in self.samples if self.trainer.steps_done < steps.total else ():
                try:
                    self._step(inputs, targets)
                    self._note_saved()
                    stopped = stop.agreed(step=self.trainer.steps_done)
                    done = self.trainer.steps_done
                    if stopped:
                        break
                    if done >= steps.total:
                        checkpoint = self._save(wait=True)
                        break
                    if steps.evaluate_every and done % steps.evaluate_every == 0:
                        self._evaluate()
                    if steps.save_every and done % steps.save_every == 0:
                        self._save(wait=False)
                except NotFiniteError as error:  # on all ranks alike
                    self._go_back(error)
            seconds = time.perf_counter() - started_s
            checkpoint = checkpoint or self._save(wait=True)
            held_out, sample = (None, None) if stopped else (self._evaluate(), self._sample())
        return Summary(
            directory=self.directory,
            steps_done=self.trainer.steps_done,
            total_steps=steps.total,
            seconds=seconds,
            last_loss=self.last_loss,
            held_out_loss=held_out,
            sample=sample,
            checkpoint=checkpoint,
            straggler=self.trainer.rank_speeds.worst_straggler(),
            compression=compression_of_run(self.trainer, self.directory / METRICS_FILE),
        )

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _step(self, inputs: Any, targets: Any) -> None:
        shares = self.trainer.shares if self.trainer.balance.is_on else None
        loss = self.trainer.step(inputs, targets)
        unit, each = units_of(targets)
        record = self.recorder.add(
            step=self.trainer.steps_done,
            loss=loss,
            grad_norm=self.trainer.grad_norm,
            num_skipped=sum(one.update.skipped for one in (self.trainer, *self.trainer.others)),
            loss_scale=self.trainer.update.loss_scale.factor if self.trainer.plan.precision.compute == "fp16" else None,
            lr=self.trainer.optimizer.param_groups[0]["lr"],
            unit=unit,
            num_units=each * self.job.steps.global_batch,
            shares=shares,
            straggler=self.trainer.rank_speeds.straggler,
            **replica_fields(self.trainer),
            **served_fields(self.trainer),
        )
        self._tell(record)

    def _go_back(self, error: NotFiniteError) -> None:
        """Load the last good checkpoint, or end the run with this error."""
        if is_served(self.trainer.plan):  # whose servers go on from their weights
            raise error
        self._tell(self.recorder.flush())
        failed_at = self.trainer.steps_done
        checkpoint = self.roll_backs.run(error)
        self.being_saved = None
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = MetricsFile(self.directory / METRICS_FILE, steps_done=self.trainer.steps_done)
            self.metrics.write(
                {
                    "step": self.trainer.steps_done,
                    "rolled_back_from": failed_at,
                    "data_position": self.trainer.data_position,
                    "checkpoint": checkpoint.name,
                    "problem": str(error),
                }
            )
        self.recorder.restart_clock()

    def _tell(self, record: StepRecord | None) -> None:
        if record is None:
            return
        self.last_loss = record.loss
        if record.spike is not None and self.is_first:
            log.warning("the loss of step %d, %.4g, is a spike: %.4g is usual", record.step, record.loss, record.spike)
        if (metrics := self._metrics_of(record.step - 1)) is not None:
            metrics.write(asdict(record))
        self.observer.stepped(record)

    def _metrics_of(self, steps_done: int) -> MetricsFile | None:
        """The file of metrics, on the rank that writes it now."""
        if self.is_first and self.metrics is None:  # another worker did so before, maybe on another host
            self._begin_files(steps_done=steps_done)
        elif self.metrics is not None and not self.is_first:
            self.metrics.close()
            self.metrics = None
        return self.metrics

    def _save(self, *, wait: bool) -> Path:
        """Save once the previous save is complete; in the background unless `wait`."""
        self._tell(self.recorder.flush())
        try:
            self.trainer.wait_for_save()
        except CheckpointError:  # of the previous save, on all ranks, and logged; this one may succeed
            if self.is_first:
                log.warning("%s was not saved, so the next one is waited for", self.being_saved)
            self.being_saved, wait = None, True  # a second failure ends the run
        self._note_saved()
        path = self.directory / CHECKPOINTS / f"step-{self.trainer.steps_done}"
        self.trainer.save(path, wait=wait)
        self.being_saved = path
        if wait:
            self._note_saved()
        self.recorder.restart_clock()
        return path

    def _note_saved(self) -> None:
        """If the last checkpoint is complete, tell the observer and delete old ones."""
        if not self.is_first or self.being_saved is None or not self.trainer.saving.is_over:
            return
        prune(self.directory / CHECKPOINTS, keep=self.job.steps.keep)
        self.observer.saved(self.being_saved)
        self.being_saved = None

    def _evaluate(self) -> float | None:
        if self.held_out is None or not self.trainer.mesh.leads:
            return None
        self._tell(self.recorder.flush())
        some = itertools.islice(self.held_out.from_start(), self.job.steps.evaluate_batches)
        loss = self.trainer.evaluate(some, average=self.job.steps.evaluate_average)
        if (metrics := self._metrics_of(self.trainer.steps_done)) is not None:
            metrics.write({"step": self.trainer.steps_done, "held_out_loss": loss})
        self.observer.evaluated(self.trainer.steps_done, loss)
        self.recorder.restart_clock()
        return loss

    def _sample(self) -> str | None:
        if not self.prepared.writes_text or not self.trainer.mesh.leads:
            return None
        context = context_of(self.job)
        try:
            tokens = self.trainer.generate(
                list(_PROMPT), num_tokens=_SAMPLE_TOKENS, context=context, temperature=_TEMPERATURE
            )
        except ModelError as error:  # the run is over and saved, so this is no reason to fail
            if self.is_first:
                log.warning("no sample of text: %s", error)
            return None
        # The vocabulary may be larger than a byte, and an untrained model samples from all of it.
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")
