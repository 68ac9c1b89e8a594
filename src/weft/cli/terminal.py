"""Console output and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.launch import default_num_ranks, is_launched
from weft.plan.all_ranks import ranks_to_start, with_ranks
from weft.plan.partition.one_worker import WORKER
from weft.plan.plan import ALL, Axes, Plan

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0
"""Time between lines of progress where there is no terminal for a bar."""

Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")]
"""Read by `main()`, because an error may arise anywhere."""
JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="The job to run; without it, the embedded default.")
]

PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan instead of the job's or the run's.")
]


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0" and os.environ.get(WORKER, "0") == "0"


def refuse_ranks(ranks: int | None, kind: type[Exception]) -> None:
    """Refuse --ranks under a launcher that has started another number of them."""
    if is_launched() and ranks not in (None, running := int(os.environ["WORLD_SIZE"])):
        raise kind(f"--ranks {ranks} has no effect here: a launcher started {running} already; leave --ranks out")


def fit_to_ranks(plan: Plan | None, asked: int | None) -> tuple[Plan, int]:
    """A plan (by default all ranks along data) with a number for `data = "all"`, and the ranks that are running or to
    be started: those asked for, or what the plan needs."""
    known = int(os.environ["WORLD_SIZE"]) if is_launched() else asked
    given = plan or Plan(axes=Axes(data=ALL))
    num_ranks = known or (
        given.axes.num_ranks if given.axes.data != ALL else ranks_to_start(given, default_num_ranks())
    )
    return with_ranks(given, num_ranks), num_ranks


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    if rows:
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
