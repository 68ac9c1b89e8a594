"""`weft verify`: prove that a plan gives one process's losses, gradients and weights on a job's own model.

The exit code is the verdict: 0 equal, 1 not equal; 2: the request is invalid.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.terminal import JobFile, PlanFile, Traceback, fit_to_ranks, is_first_rank, print_table, say
from weft.errors import JobError
from weft.launch import is_launched, launch
from weft.plan.late_merges import steps_to_verify
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Axes, Plan

if TYPE_CHECKING:
    from weft.training.run.job import Job
    from weft.verification.verdict import Verification

_USUAL_STEPS, _MOST_STEPS = 3, 12
"""Steps that are compared unless others are given, and the most of a plan that needs more to show all it does."""


class Format(StrEnum):
    """The dtype of the comparison."""

    double = "float64"
    single = "float32"


def command(
    job_file: JobFile = None,
    plan_file: PlanFile = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps to compare; default: 3, or up to 12 where exchanges are merged later."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a global batch; default: the job's.")] = None,
    dtype: Annotated[
        Format, typer.Option(help="Compute in float64, and compare everything; or in float32, and compare losses.")
    ] = Format.double,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the outcome there too.")] = None,
    traceback: Traceback = False,
) -> None:
    """Train a job's model a few steps under its plan and in one process, and compare everything.

    Example:  weft verify run.toml --plan plan.toml
    """
    del traceback  # read by main()
    from weft.cli.which_run import read_given_job
    from weft.training.run.preview import require_sound

    reading = read_given_job(job_file, plan_file)
    job = reading.job
    global_batch = batch or job.steps.global_batch
    arguments: dict[str, Any] = {"global_batch": global_batch, "dtype_name": dtype.value}
    plan, num_ranks = fit_to_ranks(job.plan, None)
    arguments["num_steps"] = steps or max(_USUAL_STEPS, min(steps_to_verify(plan), _MOST_STEPS))
    if reading.problems or not is_launched():
        require_sound(reading, plan, num_ranks=num_ranks, global_batch=global_batch)
    arguments["job"] = replace(job, plan=plan)
    if is_launched():
        outcome = _run_rank(folder=None, attempt=0, **arguments)
    else:
        outcome = launch(_run_rank, arguments, num_ranks=num_ranks, max_restarts=0)[0]
    if is_first_rank():
        _print(outcome)
        if output is not None:
            values = _finite({"ok": outcome.ok, **asdict(outcome)})
            output.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    if not outcome.ok:
        raise typer.Exit(1)


def _run_rank(
    *, folder: Path | None, attempt: int, job: Job, num_steps: int, global_batch: int, dtype_name: str
) -> Verification:
    del folder, attempt
    import numpy as np
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from weft.training.data.datasets import fetch
    from weft.training.run.components import prepare
    from weft.verification.verify import verify
    from weft.world import join_world, leave_world

    plan = job.plan
    if plan is None or not is_served(plan):
        rank, num_ranks = (world := join_world()).rank, world.size
    else:  # workers are worlds of their own
        rank, num_ranks = int(os.environ.get("RANK", "0")), plan.axes.num_ranks
    prepared = prepare(job)
    needed = num_steps * global_batch
    if len(prepared.train_data) < needed:
        raise JobError(
            f"{num_steps} steps of {global_batch} samples need {needed}, the data holds {len(prepared.train_data)}"
        )
    torch.manual_seed(job.steps.seed)
    columns = (TextColumn("comparing step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, transient=True, disable=rank != 0 or not Console().is_terminal) as bar:
        task = bar.add_task("", total=num_steps)
        outcome = verify(
            prepared.make_model(),
            plan or Plan(axes=Axes(data=num_ranks)),
            loss=prepared.loss,
            optimizer=prepared.optimizer,
            groups=prepared.groups,
            batches=[
                fetch(prepared.train_data, np.arange(step * global_batch, (step + 1) * global_batch))
                for step in range(num_steps)
            ],
            dtype=getattr(torch, dtype_name),
            on_step=lambda done: bar.update(task, completed=done),
        )
    leave_world()
    return outcome


def _finite(value: Any) -> Any:
    """The same values, with None for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(outcome: Verification) -> None:
    from rich.console import Console

    console, worst = Console(), {one.what: one for one in reversed(outcome.differences)}  # they come worst first
    rows = [
        (what, f"{worst[what].error:.1e}", worst[what].name or "-", str(worst[what].rank), str(worst[what].step))
        for what in ("loss", "gradient", "state", "weight", "buffer")
        if what in worst
    ]
    print_table(console, ("compared", "worst relative error", "where", "rank", "step"), rows)
    verdict = f"{'equal' if outcome.is_equal else 'NOT equal'} to {outcome.rule} over {outcome.num_steps} steps"
    lines = [f"{verdict} (tolerance {outcome.tolerance:.0e})", *outcome.notes]
    if outcome.first is not None:
        lines.append(str(outcome.first))
    if outcome.deviation is not None:
        lines += [str(outcome.deviation), *filter(None, [outcome.deviation.problem])]
    for line in lines:
        say(console, line)
