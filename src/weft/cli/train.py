"""`weft train`: run a job on local ranks, or join the ranks that torchrun started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.terminal import JobFile, Traceback, is_first_rank, refuse_ranks
from weft.errors import JobError
from weft.launch import STOP_FILE, default_num_ranks, is_launched, launch
from weft.plan.check import check
from weft.plan.plan import Axes, Plan

if TYPE_CHECKING:
    from weft.training.run.job import Job


def command(
    job_file: JobFile = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here; default: what the plan needs.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the run; default: the next free runs/NNNN.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in this directory.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train this many steps in all instead of the job's.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Times to start ranks again after one died.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a timeline of all stages (for Chrome or Perfetto).")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="End the run when ranks wait this long in a step; the plan's."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Train a model as a job file says; with none, a small GPT on Python's own source text.

    Example:  weft train run.toml --output runs/first

    Inside torchrun the same command joins its ranks instead of starting any:

    torchrun --nproc-per-node 2 -m weft train run.toml
    """
    del traceback  # read by main()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched() else 0
    job, directory = _job_and_directory(job_file, output, resume, steps, restarted=attempt > 0)
    if is_launched():
        refuse_ranks(ranks, JobError)
        if timeout is not None:
            plan = job.plan or Plan(axes=Axes(data=int(os.environ["WORLD_SIZE"])))
            job = replace(job, plan=_with_timeout(plan, timeout))
        _run_rank(folder=None, attempt=attempt, job=job, directory=directory, resume=resume is not None, trace=trace)
        return
    from weft.training.run.components import prepare

    plan = _with_timeout(job.plan or Plan(axes=Axes(data=ranks or default_num_ranks())), timeout)
    num_ranks = ranks or plan.axes.num_ranks
    # Every mistake in the plan and the job is found here, before any rank is started.
    prepare(job, besides=check(plan, num_ranks=num_ranks, global_batch=job.steps.global_batch))
    arguments = {"job": replace(job, plan=plan), "directory": directory, "resume": resume is not None, "trace": trace}
    results = launch(_run_rank, arguments, num_ranks=num_ranks, max_restarts=restarts)
    if any(result.stopped_early for result in results):
        raise typer.Exit(130)


def _job_and_directory(
    job_file: Path | None, output: Path | None, resume: Path | None, steps: int | None, *, restarted: bool
) -> tuple[Job, Path]:
    """The job and the run's directory; a launcher that starts its ranks again continues the run it began there."""
    from weft.training.run.job import default_job, read_job
    from weft.training.run.loop import JOB_FILE, read_run

    if resume is not None and (job_file is not None or output is not None):
        raise JobError("--resume takes the job and the output from the run's directory; leave the others out")
    if resume is not None:
        job, directory = read_run(resume), resume
    else:
        job = default_job() if job_file is None else read_job(job_file)
        if restarted and output is None:
            raise JobError(
                "ranks were started again, and nothing says in which directory; give --output from the start"
            )
        directory = output or _next_free(Path("runs"))
        if (directory / JOB_FILE).exists() and not restarted:
            raise JobError(
                f"{directory} holds a run already; go on with --resume {directory}, or give another --output"
            )
    return (job if steps is None else _of_length(job, steps)), directory


def _of_length(job: Job, num_steps: int) -> Job:
    """The job with another number of steps; a warm-up longer than that is cut to a tenth."""
    schedule = job.schedule
    if schedule.settings.get("warmup_steps", 0) >= num_steps:
        schedule = replace(schedule, settings={**schedule.settings, "warmup_steps": num_steps // 10})
    return replace(job, schedule=schedule, steps=replace(job.steps, total=num_steps))


def _with_timeout(plan: Plan, timeout_s: float | None) -> Plan:
    return plan if timeout_s is None else replace(plan, comm=replace(plan.comm, timeout_s=timeout_s))


def _next_free(parent: Path) -> Path:
    """runs/0001, runs/0002, ..."""
    taken = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
    return parent / f"{max(taken, default=0) + 1:04d}"


def _run_rank(*, folder: Path | None, attempt: int, job: Job, directory: Path, resume: bool, trace: Path | None) -> Any:
    """The work of every rank. A rank that was started again continues from the last checkpoint."""
    from weft.cli.progress import TerminalObserver
    from weft.mesh import leave_world
    from weft.training.run.loop import train

    observer = TerminalObserver(attempt=attempt) if is_first_rank() else None
    stop_file = None if folder is None else folder / STOP_FILE
    resume = resume or attempt > 0
    try:
        summary = train(
            job, directory=directory, resume=resume, observer=observer, stop_file=stop_file, trace_file=trace
        )
    finally:
        if observer is not None:
            observer.close()
    if observer is not None:
        observer.finished(summary)
    leave_world()
    return summary
