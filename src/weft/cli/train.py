"""`weft train`: run a job on local ranks, or join the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.roles import Role, RoleFlags, serve, train_served
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
            help='Run all replicas of a plan with [data] sync = "local" or "delayed", or a codec, in one process '
            "on one device, with the results of real ranks.",
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
    role: Annotated[
        Role | None,
        typer.Option(
            help='Of a plan with [data] sync = "server", start only its servers here, or only one more worker.'
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Address of this host at which servers let workers of other hosts join; default: none.",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address of the first server, which it prints, with --role worker."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The job's key, without which nobody joins from another host; servers make it, by default in the "
            "run's directory.",
        ),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Servers to start here, with --role server; default: all. The others --join the first.",
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

    Servers on one machine, which say how a worker joins them from any other:

    weft train run.toml --role server --listen 10.0.0.1:5000
    """
    del traceback  # read by main()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched() else 0
    from weft.cli.which_run import which_run
    from weft.plan.partition.one_worker import is_served
    from weft.training.run.preview import require_sound

    flags = RoleFlags(role=role, listen=listen, join=join, key=key, servers=servers)
    run = which_run(
        job_file,
        output=output,
        resume=resume,
        plan_file=plan_file,
        steps=steps,
        restarted=attempt > 0,
        joins=role == Role.WORKER,
    )
    arguments: dict[str, Any] = {"directory": run.directory, "resume": run.resumes, "trace": trace}
    arguments["environment"] = flags.environment
    arguments["replicas_in_process"] = replicas_in_process
    refuse_ranks(ranks, JobError)
    given = run.job.plan or Plan(axes=Axes(data=ALL))
    is_known = "plan" not in run.reading.doubtful
    besides = flags.problems(given if is_known else None, ranks=ranks, replicas_in_process=replicas_in_process)
    if replicas_in_process:
        plan, num_ranks = given, 1
        besides += _in_process_problems(given if is_known else None, ranks)
    elif role is not None:
        plan, num_ranks = given, given.axes.besides_data if given.axes.data == ALL else given.axes.num_ranks
    else:
        plan, num_ranks = fit_to_ranks(run.job.plan, ranks)
    plan = _with_timeout(plan, timeout)
    if run.reading.problems or besides or not is_launched():
        # Every mistake in the plan and the job is found here, before any rank is started. Ranks of a launcher look for
        # themselves once they have met: their hosts may have other files.
        needed = plan.axes.num_ranks if replicas_in_process and plan.axes.data != ALL else num_ranks
        require_sound(run.reading, plan, num_ranks=needed, global_batch=run.job.steps.global_batch, besides=besides)
    arguments["job"] = replace(run.job, plan=plan)
    if is_launched():
        _run_rank(folder=None, attempt=attempt, **arguments)
        return
    joining = _joining(job_file, run.directory, plan_file=plan_file, steps=steps, resume=resume)
    if role == Role.SERVER:
        serve(run, plan, flags, joining=joining, max_restarts=restarts)
        return
    if is_served(plan):
        results = train_served(_run_rank, arguments, run, plan, flags, joining=joining, max_restarts=restarts)
    else:
        results = launch(_run_rank, arguments, num_ranks=num_ranks, max_restarts=restarts)
    if any(result.stopped_early for result in results):
        raise typer.Exit(130)


def _joining(
    job_file: Path | None, directory: Path, *, plan_file: Path | None, steps: int | None, resume: str | None
) -> Sequence[str]:
    """The arguments of this command that a worker needs, too, which joins the run that it starts."""
    given = {"--plan": plan_file, "--steps": steps, "--resume": resume}
    from weft.cli.which_run import AUTO

    words = [] if job_file is None else [str(job_file)]
    words += [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    return words if resume not in (None, AUTO) else [*words, "--output", str(directory)]


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
    environment: dict[str, str],
) -> Any:
    """The work of every rank. A rank that was started again continues from the last checkpoint. `environment`: which
    run with servers it joins, and how."""
    from weft.cli.progress import TerminalObserver
    from weft.server.worker_mesh import JOIN
    from weft.training.run.loop import train
    from weft.training.run.rank_log import RankLog
    from weft.world import leave_world

    os.environ.update(environment)
    if JOIN in environment and (task := os.environ.get("SLURM_LOCALID")):  # Slurm's tasks of a host are workers
        os.environ["LOCAL_RANK"] = str(int(task) * int(os.environ["WORLD_SIZE"]) + int(os.environ["LOCAL_RANK"]))
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
