"""`weft verify`: prove that a plan gives one process's losses, gradients and weights on a job's own model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.errors import JobError
from weft.launch import default_num_ranks, is_launched, launch
from weft.plan.check import check
from weft.plan.plan import Axes, Plan

if TYPE_CHECKING:
    from weft.training.job import Job


def command(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="What to verify; without it, the embedded default.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Verify this plan instead of the job's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a global batch; default: the job's.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")] = False,
) -> None:
    """Train a job's model a few steps under its plan and in one process, in float64, and compare everything.

    Example:  weft verify run.toml --plan plan.toml
    """
    del traceback  # read by main()
    from weft.plan.text import read_plan
    from weft.training.components import prepare
    from weft.training.job import default_job, read_job

    job = default_job() if job_file is None else read_job(job_file)
    given = read_plan(plan_file) if plan_file is not None else job.plan
    size = batch or job.steps.global_batch
    if is_launched():
        _run_rank(folder=None, attempt=0, job=replace(job, plan=given), num_steps=steps, global_batch=size)
        return
    plan = given or Plan(axes=Axes(data=default_num_ranks()))
    prepare(job, besides=check(plan, num_ranks=plan.axes.num_ranks, global_batch=size))
    arguments = {"job": replace(job, plan=plan), "num_steps": steps, "global_batch": size}
    launch(_run_rank, arguments, num_ranks=plan.axes.num_ranks, max_restarts=0)


def _run_rank(*, folder: Path | None, attempt: int, job: Job, num_steps: int, global_batch: int) -> Any:
    del folder, attempt
    import numpy as np
    import torch

    from weft.mesh import join_world, leave_world
    from weft.training.components import prepare
    from weft.training.datasets import fetch
    from weft.training.verify import verify

    world, prepared = join_world(), prepare(job)
    needed = num_steps * global_batch
    if len(prepared.train_data) < needed:
        raise JobError(
            f"{num_steps} steps of {global_batch} samples need {needed}, the data holds {len(prepared.train_data)}"
        )
    torch.manual_seed(job.steps.seed)
    outcome = verify(
        prepared.make_model(),
        job.plan or Plan(axes=Axes(data=world.size)),
        loss=prepared.loss,
        optimizer=prepared.optimizer,
        batches=[
            fetch(prepared.train_data, np.arange(step * global_batch, (step + 1) * global_batch))
            for step in range(num_steps)
        ],
    )
    if os.environ.get("RANK", "0") == "0":
        _print(outcome)
    leave_world()
    outcome.require()


def _print(outcome: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("compared", "worst relative error", "where", "rank", "step")
    for what in ("loss", "gradient", "weight", "buffer"):
        found = [difference for difference in outcome.differences if difference.what == what]
        if found:
            worst = found[0]
            table.add_row(what, f"{worst.error:.1e}", worst.name or "-", str(worst.rank), str(worst.step))
    console = Console()
    console.print(table)
    verdict = "equal to one process" if outcome.ok else "NOT equal to one process"
    console.print(f"{verdict} over {outcome.num_steps} steps (tolerance {outcome.tolerance:.0e})", highlight=False)
