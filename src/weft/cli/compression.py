"""The table of codecs that `weft profile` prints: which pays below which bandwidth, for a model's size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.terminal import print_table, say
from weft.errors import LaunchError
from weft.planning.compression import SAFE_WITH, Advice, Lines, Shape, advise, describe, lines_of, usual_shapes
from weft.units import format_bandwidth, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from weft.profiles.cluster import Cluster

_USUAL_PARAMETERS = 25_000_000
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The exchange that is asked for."""

    num_parameters: int | None = None
    """None: those of the job, or a usual number."""
    job: Path | None = None
    num_replicas: int | None = None
    """None: the hosts, or the ranks of one host."""


def read_count(text: str | None) -> int | None:
    """124M -> 124000000."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGB]?)", text.strip().upper())
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise LaunchError(f"--parameters {text} is not a number of parameters; write one such as 124M or 1.3B")
    return count


def print_codecs(console: Console, cluster: Cluster, question: Question) -> None:
    """Print, per codec, the bandwidth below which it pays; nothing where no codec was measured."""
    if not cluster.compressions:
        return
    shapes, model = _model(question)
    lines = lines_of(cluster, question.num_replicas)
    rows = [_row(advise(measured, shapes, lines), lines) for measured in cluster.compressions]
    heads = ["codec", "compression", "codec time", "pays below", "safe with"]
    if lines.bytes_per_s is not None:
        heads.insert(4, f"faster at {format_bandwidth(lines.bytes_per_s)}")
    say(console, f"gradients of {model}, exchanged between {lines.num_replicas} replicas, against a dense all-reduce:")
    print_table(console, heads, rows)


def _row(advice: Advice, lines: Lines) -> list[str]:
    pays_below = advice.pays_below_bytes_per_s
    bound = {0.0: "never", math.inf: "always"}.get(pays_below) or format_bandwidth(pays_below)
    cells = [describe(advice.codec), f"{advice.compression:.1f}×", format_seconds(advice.codec_s), bound]
    if lines.bytes_per_s is not None:
        cells.append(f"{advice.dense_s(lines.bytes_per_s) / advice.coded_s(lines.bytes_per_s):.1f}×")
    return [*cells, SAFE_WITH[advice.codec.name]]


def _model(question: Question) -> tuple[list[Shape], str]:
    """The shapes of the model's parameters, and the model in words."""
    doubt = ""
    if question.job is not None:
        if shapes := _shapes_of_job(question.job):
            return shapes, f"{question.job.name} ({format_count(sum(map(math.prod, shapes)))} parameters)"
        doubt = f" (the model of {question.job.name} cannot be built without memory)"
    count = question.num_parameters or _USUAL_PARAMETERS
    return usual_shapes(count), f"a model of {format_count(count)} parameters{doubt}"


def _shapes_of_job(path: Path) -> list[Shape]:
    """Of all trainable parameters; empty where the model cannot be built without memory."""
    import torch

    from weft.training.run.components import build
    from weft.training.run.job import read_job

    parts, _ = build(read_job(path), doubtful=("dataset",))
    try:
        with torch.device("meta"):
            model = parts.make_empty()
    except Exception:  # a user's function may do anything; the table is then of a usual model
        return []
    return [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
