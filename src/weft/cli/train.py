"""`weft train`: run a job on local ranks, or join the ranks that torchrun started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.terminal import JobFile, PlanFile, Traceback, fit_to_ranks, is_first_rank, refuse_ranks
from weft.errors import JobError
from weft.launch import STOP_FILE, is_launched, launch
from weft.plan.plan import ALL, Axes, Plan

if TYPE_CHECKING:
    from weft.training.run.job import Job


def command(
    job_file: JobFile = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here; default: what the plan needs.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the run; default: the next free runs/NNNN.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|auto",
            help="Continue the run in this directory; auto: continue the run in --output, by default the newest in "
            "runs/, or begin it if there is none.",
        ),
    ] = None,
    plan_file: PlanFile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train this many steps in all instead of the job's.")] = None,
    replicas_in_process: Annotated[
        bool,
        typer.Option(
            "--replicas-in-process",
            help='Run all replicas of a plan with [data] sync = "local" or a codec in one process on one device, with '
            "the results of real ranks.",
        ),
    ] = False,
    restarts: Annotated[int, typer.Option(min=0, help="Times to start ranks again after one died.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a timeline of all stages (for Chrome or Perfetto).")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="End the run when ranks wait this long for each other in a step; default: the plan's [comm] "
            "timeout_s, or half an hour.",
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Train a model as a job file says; with none, a small GPT on Python's own source text.

    Example:  weft train run.toml --output runs/first

    Inside torchrun the same command joins its ranks instead of starting any:

    torchrun --nproc-per-node 2 -m weft train run.toml

    All replicas of local SGD or DiLoCo, or of a plan with a codec, on one GPU or core, to study how they train:

    weft train run.toml --plan diloco.toml --replicas-in-process
    """
    del traceback  # read by main()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched() else 0
    from weft.cli.which_run import which_run
    from weft.training.run.preview import require_sound

    run = which_run(job_file, output=output, resume=resume, plan_file=plan_file, steps=steps, restarted=attempt > 0)
    arguments: dict[str, Any] = {"directory": run.directory, "resume": run.resumes, "trace": trace}
    arguments["replicas_in_process"] = replicas_in_process
    refuse_ranks(ranks, JobError)
    besides: list[str] = []
    if replicas_in_process:
        plan, num_ranks = run.job.plan or Plan(axes=Axes(data=ALL)), 1
        besides = _in_process_problems(plan if "plan" not in run.reading.doubtful else None, ranks)
    else:
        plan, num_ranks = fit_to_ranks(run.job.plan, ranks)
    plan = _with_timeout(plan, timeout)
    if run.reading.problems or not is_launched():
        # Every mistake in the plan and the job is found here, before any rank is started. Ranks of a launcher look for
        # themselves once they have met: their hosts may have other files.
        needed = plan.axes.num_ranks if replicas_in_process and plan.axes.data != ALL else num_ranks
        require_sound(run.reading, plan, num_ranks=needed, global_batch=run.job.steps.global_batch, besides=besides)
    arguments["job"] = replace(run.job, plan=plan)
    if is_launched():
        _run_rank(folder=None, attempt=attempt, **arguments)
        return
    results = launch(_run_rank, arguments, num_ranks=num_ranks, max_restarts=restarts)
    if any(result.stopped_early for result in results):
        raise typer.Exit(130)


def _with_timeout(plan: Plan, timeout_s: float | None) -> Plan:
    return plan if timeout_s is None else replace(plan, comm=replace(plan.comm, timeout_s=timeout_s))


def _in_process_problems(plan: Plan | None, ranks: int | None) -> list[str]:
    """What is wrong with replicas in process; `plan`: None if it could not be read."""
    from weft.plan.partition.replicas import in_process_problems

    running = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
    problems = [] if plan is None else list(in_process_problems(plan, num_processes=running))
    if ranks not in (None, 1):
        problems.append(
            f"--ranks {ranks} has no effect with --replicas-in-process, which starts one process; leave one of them out"
        )
    return problems


def _run_rank(
    *,
    folder: Path | None,
    attempt: int,
    job: Job,
    directory: Path,
    resume: bool,
    trace: Path | None,
    replicas_in_process: bool,
) -> Any:
    """The work of every rank. A rank that was started again continues from the last checkpoint."""
    from weft.cli.progress import TerminalObserver
    from weft.mesh import leave_world
    from weft.training.run.loop import train
    from weft.training.run.rank_log import RankLog

    stop_file = None if folder is None else folder / STOP_FILE
    with RankLog(attempt=attempt) as log:
        observer = TerminalObserver(log, attempt=attempt) if is_first_rank() else None
        try:
            summary = train(
                job,
                directory=directory,
                resume=resume or attempt > 0,
                observer=observer,
                stop_file=stop_file,
                trace_file=trace,
                on_open=log.attach,
                replicas_in_process=replicas_in_process,
            )
        finally:
            if observer is not None:
                observer.close()
        if observer is not None:
            observer.finished(summary)
        leave_world()
    return summary
