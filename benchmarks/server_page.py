"""What the studies of parameter servers write: a page for `benchmarks/results`, and pictures' data for `plots.py`."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from compression import STUDENT_T


def machine() -> str:
    """Where this runs, in a few words."""
    return f"{os.cpu_count()} cores ({platform.machine()}, no GPU used), torch {torch.__version__}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def mean_and_range(values: Sequence[float], form: str = ".1f") -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def paired(mine: Sequence[float], others: Sequence[float], form: str = "+.2f") -> str:
    """The mean difference of pairs with its interval of 95 %."""
    differences = [a - b for a, b in zip(mine, others, strict=True)]
    mean = f"{statistics.fmean(differences):{form}}"
    if len(differences) not in STUDENT_T:
        return mean
    half = STUDENT_T[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean} ± {half:.2f}"


class Page:
    """Lines that are printed as they come, and written as a page at the end."""

    def __init__(self, title: str, description: str) -> None:
        self._started = time.perf_counter()
        self._lines: list[str] = []
        command = shlex.join(["python", *sys.argv])
        self.add(f"# {title}", "", f"{time.strftime('%Y-%m-%d')}, {machine()}.", "", f"    {command}", "", description)

    def add(self, *lines: str) -> None:
        self._lines += lines
        print(*lines, sep="\n", flush=True)

    def write(self, path: Path | None) -> None:
        """To be called at the end; None prints only."""
        self.add("", f"It took {(time.perf_counter() - self._started) / 60:.1f} minutes.")
        if path is not None:
            path.write_text("\n".join(self._lines) + "\n")


def write_picture(path: Path | None, title: str, panels: Sequence[dict[str, Any]]) -> None:
    """Data for `plots.py`."""
    if path is not None:
        path.write_text(json.dumps({"title": title, "panels": panels}, indent=1))
