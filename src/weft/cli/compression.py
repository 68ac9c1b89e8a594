"""The table of codecs that `weft profile` prints: which pays below which bandwidth, for a model's size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.terminal import print_table, say
from weft.errors import LaunchError
from weft.planning.compression import SAFE_WITH, Advice, Links, Shape, advise, describe, links_of, usual_shapes
from weft.units import format_bandwidth, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from weft.profiles.cluster import Cluster

_USUAL_PARAMETERS = 25_000_000
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model and the replicas that are asked for."""

    num_parameters: int | None = None
    """None: those of the job, or a usual number."""
    job: Path | None = None
    num_replicas: int | None = None
    """None: the hosts, or the ranks of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What is known of the model that is asked for."""

    shapes: tuple[Shape, ...]
    """The shapes of its trainable parameters."""
    model_text: str
    """The model in words."""
    num_blocks: int | None = None
    """Its blocks; None where only its size is known."""


def read_count(text: str | None) -> int | None:
    """124M -> 124000000."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGB]?)", text.strip().upper())
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise LaunchError(f"--parameters {text} is not a number of parameters; write one such as 124M or 1.3B")
    return count


def print_codecs(console: Console, cluster: Cluster, model: ModelOptions) -> None:
    """Print, per codec, the bandwidth below which it pays; nothing where no codec was measured."""
    if not cluster.compressions:
        return
    known = model_of(model)
    links = links_of(cluster, model.num_replicas)
    rows = [_row(advise(measured, known.shapes, links), links) for measured in cluster.compressions]
    heads = ["codec", "compression", "codec time", "pays below", "safe with"]
    if links.bytes_per_s is not None:
        heads.insert(4, f"faster at {format_bandwidth(links.bytes_per_s)}")
    between = f"exchanged between {links.num_replicas} replicas, against a dense all-reduce"
    say(console, f"gradients of {known.model_text}, {between}:")
    print_table(console, heads, rows)


def _row(advice: Advice, links: Links) -> list[str]:
    pays_below = advice.pays_below_bytes_per_s
    bound = {0.0: "never", math.inf: "always"}.get(pays_below) or format_bandwidth(pays_below)
    cells = [describe(advice.codec), f"{advice.compression:.1f}×", format_seconds(advice.codec_s), bound]
    if links.bytes_per_s is not None:
        cells.append(f"{advice.dense_s(links.bytes_per_s) / advice.coded_s(links.bytes_per_s):.1f}×")
    return [*cells, SAFE_WITH[advice.codec.name]]


def model_of(model: ModelOptions) -> KnownModel:
    """The model of the job, or one of the size that is asked for."""
    doubt = ""
    if model.job is not None:
        if known := _model_of_job(model.job):
            return known
        doubt = f" (the model of {model.job.name} cannot be built without memory)"
    count = model.num_parameters or _USUAL_PARAMETERS
    model_text = f"a model of {format_count(count)} parameters{doubt}"
    return KnownModel(shapes=tuple(usual_shapes(count)), model_text=model_text)


def _model_of_job(path: Path) -> KnownModel | None:
    """The job's model; None where it cannot be built without memory, or has nothing to train."""
    import torch

    from weft.blueprint import find_blueprint
    from weft.training.run.components import build
    from weft.training.run.job import read_job

    parts, _ = build(read_job(path), doubtful=("dataset",))
    try:
        with torch.device("meta"):
            model = parts.make_empty()
    except Exception:  # a user's function may do anything; the table is then of a usual model
        return None
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad)
    if not shapes:
        return None
    model_text = f"{path.name} ({format_count(sum(map(math.prod, shapes)))} parameters)"
    return KnownModel(shapes=shapes, model_text=model_text, num_blocks=len(find_blueprint(model).blocks))
