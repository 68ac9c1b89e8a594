"""`weft verify`: prove that a plan gives one process's losses, gradients and weights on a job's own model.

The exit code is the verdict: 0 equal, 1 not equal; 2 is a mistake in what was asked.
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

from weft.errors import JobError
from weft.launch import default_num_ranks, is_launched, launch
from weft.plan.check import check
from weft.plan.plan import Axes, Plan

if TYPE_CHECKING:
    from weft.training.run.job import Job
    from weft.verification.verdict import Verification


class Format(StrEnum):
    """What is computed with."""

    double = "float64"
    single = "float32"


def command(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="What to verify; without it, the embedded default.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Verify this plan instead of the job's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a global batch; default: the job's.")] = None,
    dtype: Annotated[
        Format, typer.Option(help="Compute in float64, and compare everything; or in float32, and compare losses.")
    ] = Format.double,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the outcome there too.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")] = False,
) -> None:
    """Train a job's model a few steps under its plan and in one process, and compare everything.

    Example:  weft verify run.toml --plan plan.toml
    """
    del traceback  # read by main()
    from weft.plan.text import read_plan
    from weft.training.run.components import prepare
    from weft.training.run.job import default_job, read_job

    job = default_job() if job_file is None else read_job(job_file)
    given = read_plan(plan_file) if plan_file is not None else job.plan
    arguments: dict[str, Any] = {
        "num_steps": steps,
        "global_batch": batch or job.steps.global_batch,
        "dtype_name": dtype.value,
    }
    if is_launched():
        outcome = _run_rank(folder=None, attempt=0, job=replace(job, plan=given), **arguments)
    else:
        plan = given or Plan(axes=Axes(data=default_num_ranks()))
        prepare(job, besides=check(plan, num_ranks=plan.axes.num_ranks, global_batch=arguments["global_batch"]))
        arguments["job"] = replace(job, plan=plan)
        outcome = launch(_run_rank, arguments, num_ranks=plan.axes.num_ranks, max_restarts=0)[0]
    if os.environ.get("RANK", "0") == "0":
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

    from weft.mesh import join_world, leave_world
    from weft.training.data.datasets import fetch
    from weft.training.run.components import prepare
    from weft.verification.verify import verify

    world, prepared = join_world(), prepare(job)
    needed = num_steps * global_batch
    if len(prepared.train_data) < needed:
        raise JobError(
            f"{num_steps} steps of {global_batch} samples need {needed}, the data holds {len(prepared.train_data)}"
        )
    torch.manual_seed(job.steps.seed)
    bar = _Bar(num_steps) if world.rank == 0 else None
    try:
        outcome = verify(
            prepared.make_model(),
            job.plan or Plan(axes=Axes(data=world.size)),
            loss=prepared.loss,
            optimizer=prepared.optimizer,
            batches=[
                fetch(prepared.train_data, np.arange(step * global_batch, (step + 1) * global_batch))
                for step in range(num_steps)
            ],
            dtype=getattr(torch, dtype_name),
            on_step=bar,
        )
    finally:
        if bar is not None:
            bar.close()
    leave_world()
    return outcome


def _finite(value: Any) -> Any:
    """The same values, None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Bar:
    """The steps that are compared, where there is a terminal to draw them on."""

    def __init__(self, num_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("comparing step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True))
        console = Console()
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=num_steps)
        self._progress.start()

    def __call__(self, steps_done: int) -> None:
        self._progress.update(self._task, completed=steps_done)

    def close(self) -> None:
        self._progress.stop()


def _print(outcome: Verification) -> None:
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
    verdict = f"{'equal' if outcome.is_equal else 'NOT equal'} to {outcome.rule} over {outcome.num_steps} steps"
    lines = [f"{verdict} (tolerance {outcome.tolerance:.0e})"]
    if outcome.first is not None:
        lines.append(str(outcome.first))
    if outcome.deviation is not None:
        lines += [str(outcome.deviation), *filter(None, [outcome.deviation.problem])]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
