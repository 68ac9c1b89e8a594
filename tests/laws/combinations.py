"""Fields of a plan that combine, and a pairwise sample of their combinations: `combinations.json`, one row per line.

Models, optimizers and batches count as fields too. After adding a field or lifting a refusal, compute the sample again
(minutes): `PYTHONPATH=tests python tests/laws/combinations.py`, or let it grow: the same with the word `extend` keeps
the rows that still run, and adds others for pairs that are in none of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oracle import ADAMW, SGD, MakeOptimizer, small_convnet, small_gpt
from pairwise import Pair, Row, sample
from torch import nn

from weft.plan.check import _idle, check
from weft.plan.fields import facts_of
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import AXES, CODECS, SECTIONS, Plan
from weft.verification.compression.parts import num_coded_replicas

FILE = Path(__file__).with_suffix(".json")
NUM_RANKS = (4, 8)

DATA_OUTSIDE = ("data", "pipeline", "replicate", "ulysses", "ring", "tensor")
TENSOR_OUTSIDE = ("tensor", "ulysses", "ring", "data", "replicate", "pipeline")

PLAN_FIELDS: dict[str, tuple[object, ...]] = {
    **{f"axes.{axis}": (1, 2) for axis in AXES},
    "axes.order": (AXES, DATA_OUTSIDE, TENSOR_OUTSIDE),
    "step.microbatches": (1, 2, 4),
    "step.clip_norm": (0.0, 0.1),
    "pipeline.schedule": ("1f1b", "naive", "gpipe", "interleaved", "zero-bubble", "pipedream", "2bw"),
    "pipeline.chunks": (1, 2),
    "pipeline.cuts": ((), (2,), (1, 2, 3)),
    "pipeline.vertical_sync": (False, True),
    "tensor.sequence": (False, True),
    "sequence.layout": ("zigzag", "contiguous"),
    "sequence.variant": ("ring", "ring-self-attention"),
    "data.shard": ("nothing", "optimizer", "gradients", "parameters"),
    "data.reshard": ("step", "microbatch"),
    "data.offload": (False, True),
    "data.sync": ("all-reduce", "local", "delayed", "server"),
    "data.every": (1, 2),
    "data.switch_step": (0, 1),
    "data.outer": ("average", "nesterov"),
    "data.outer_lr": (1.0, 0.7),
    "data.outer_momentum": (0.0, 0.9),
    "data.fragments": (1, 2),
    "data.delay": (0, 1, 2),
    "data.mix": (0.0, 0.25),
    "data.balance": (False, True),
    "data.buffers": ("synchronise", "broadcast"),
    "data.check_every": (0, 1),
    "server.mode": ("sync", "async", "bounded"),
    "server.shards": (1, 2),
    "server.staleness": (0, 2),
    "server.backups": (0, 1),
    "server.compensation": (0.0, 0.5),
    "server.lr_scaling": ("none", "staleness"),
    "server.pull": ("master", "bf16", "fp16"),
    "precision.compute": ("model", "bf16", "fp16"),
    "precision.reduce": ("fp32", "bf16"),
    "precision.accumulate": ("fp32", "bf16"),
    "recompute.policy": ("none", "selective", "full"),
    "comm.bucket_bytes": (26214400, 999),
    "average.decay": (0.0, 0.9),
    "average.start": (0, 1),
    "codec.name": ("none", *CODECS),
    "codec.bits": (32, 8),
    "codec.warmup_steps": (0, 1),
}

SMALL_MODELS: dict[str, dict[str, object]] = {
    name: {"dense_below": 64, **settings}
    for name, settings in {
        **dict.fromkeys(("topk", "dgc"), {"density": 0.1}),
        **dict.fromkeys(("onebit", "sign", "terngrad"), {}),
        "qsgd": {"levels": 16},
        "powersgd": {"rank": 2},
    }.items()
}
"""Settings with which codecs compress the tensors of these models."""

_OF_ONE_CODEC = "has an effect on one codec or a few, whatever the plan: tests/verification/test_verify_codecs.py"

OTHERWISE = {
    "codec.clip": "refused with nearly everything else: tests/verification/test_verify_codecs.py",
    **{f"codec.{name}": "one value in all rows: models are small" for one in SMALL_MODELS.values() for name in one},
    "codec.masking": _OF_ONE_CODEC,
    "codec.memory": _OF_ONE_CODEC,
    "comm.timeout_s": "how long ranks wait, not what they compute: tests/comm/test_hangs.py",
    "comm.transport": "exchanges are tested through sockets by make test-long",
    "compile.blocks": "seconds of compiling per row; tests/zero/test_gather.py and others",
    "precision.loss_scale": "only for fp16: tests/training/test_loss_scale.py",
}
"""Fields that are tested elsewhere, and why."""


def small_llama() -> nn.Module:
    """An unmodified Hugging Face Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Any] = {
    "untied gpt": functools.partial(
        small_gpt, num_layers=4, heads=8, positions="learned", tied=False, norm="layer", bias=True
    ),
    "gpt": functools.partial(small_gpt, num_layers=4, heads=8, kv_heads=4),
    "convnet": functools.partial(small_convnet, num_blocks=4),
    "llama": small_llama,
}
OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": SGD, "adamw": ADAMW}
BATCHES = {"even": (8, 8), "uneven": (13, 3)}

FIELDS = {**PLAN_FIELDS, "model": tuple(MODELS), "optimizer": tuple(OPTIMIZERS), "batches": tuple(BATCHES)}


def make_plan(row: Row) -> Plan:
    plan, sections = Plan(), {path.split(".")[0] for path in PLAN_FIELDS}
    made = replace(
        plan,
        **{
            section: replace(
                getattr(plan, section),
                **{path.split(".")[1]: row[path] for path in PLAN_FIELDS if path.startswith(f"{section}.")},
            )
            for section in sections
        },
    )
    settings = SMALL_MODELS.get(made.codec.name, {})
    return replace(made, codec=replace(made.codec, **settings))  # type: ignore[arg-type]


def settle(row: Row) -> Row | None:
    """The row with fields that have no effect at their defaults, or None if weft refuses it."""
    plan = make_plan(row)
    while idle := _idle(plan):
        if "axes.replicate" in idle:
            return None
        for path in idle:
            section, name = path.split(".")
            row = {**row, path: facts_of(SECTIONS[section])[name].default}
        plan = make_plan(row)
    if check(plan) or model_refuses(row):
        return None
    corrects = plan.server.compensation > 0 or plan.server.lr_scaling != "none"
    if is_served(plan) and plan.server.updates_together and corrects:
        return None  # no gradient is old
    if plan.codec.name != "none" and not is_served(plan) and num_coded_replicas(plan) == 1:
        return None  # there is nobody to send anything to
    return row


def model_refuses(row: Row) -> bool:
    """True if these models cannot run under an otherwise valid plan."""
    if row["codec.name"] == "dgc" and row["optimizer"] != "sgd":
        return True  # it takes over the momentum of SGD
    num_stages = row["axes.pipeline"] * row["pipeline.chunks"]  # type: ignore[operator]
    is_split = any(row[f"axes.{axis}"] != 1 for axis in ("pipeline", "tensor", "ulysses"))
    if num_stages > 4:
        return True
    if row["pipeline.schedule"] == "pipedream" and row["model"] == "gpt":
        return True  # a tied weight is on two stages, which update separately
    if row["model"] == "llama":  # in float64 it casts to float32, which verify cannot undo there
        return row["recompute.policy"] == "selective"
    if row["model"] != "convnet":
        return False
    if row["data.buffers"] != "synchronise" and row["axes.data"] * row["axes.replicate"] > 1:  # type: ignore[operator]
        return True  # its results differ from one process's, by design
    if row["data.sync"] != "all-reduce" and row["precision.compute"] != "model":
        return True  # batch norms of the few images that a replica has amplify rounding beyond what verify allows
    return bool(
        row["tensor.sequence"]
        or row["axes.ulysses"] != 1
        or row["sequence.layout"] != "zigzag"
        or row["sequence.variant"] != "ring"
        or (row["axes.ring"] != 1 and is_split)
    )


def name_of(row: Row) -> str:
    """The fields of a row that are not the default."""
    named = [f"{axis} {row[f'axes.{axis}']}" for axis in AXES if row[f"axes.{axis}"] != 1]
    default = Plan()
    for path in PLAN_FIELDS:
        section, field = path.split(".")
        if section != "axes" and row[path] != getattr(getattr(default, section), field):
            named.append(f"{field} {row[path]}")
    order = {DATA_OUTSIDE: ["data outside"], TENSOR_OUTSIDE: ["tensor outside"]}.get(row["axes.order"], [])  # type: ignore[call-overload]
    return ", ".join([*named, *order, *(str(row[name]) for name in ("model", "optimizer", "batches"))])


def find_rows(begun: Sequence[Row] = ()) -> tuple[list[Row], list[Pair]]:
    """The sample, which begins with these rows, and the pairs of values that cannot be combined."""
    shapes: list[Row] = [
        {f"axes.{axis}": size for axis, size in zip(AXES, sizes, strict=True)}
        for sizes in itertools.product((1, 2), repeat=len(AXES))
        if math.prod(sizes) in NUM_RANKS
    ]
    return sample(FIELDS, settle, together=shapes, cost=cost_of, begun=begun)


def cost_of(row: Row) -> float:
    """Approximate time on fewer cores than ranks; a 16-bit plan is run twice, a Llama makes more calls, and local steps
    are more steps."""
    default = Plan().precision
    rounds = any(row[f"precision.{name}"] != getattr(default, name) for name in ("compute", "reduce", "accumulate"))
    rounds = rounds or row["codec.name"] == "half"
    return num_ranks_of(row) * (1 + rounds) * (1 + (row["model"] == "llama")) * len(sizes_of(row)) / 2


def sizes_of(row: Row) -> tuple[int, ...]:
    """The numbers of samples of the global batches. Replicas that differ need three steps: alone, and exchanges by both
    rules of a plan that switches."""
    sizes = BATCHES[str(row["batches"])]
    return (*sizes, sizes[0]) if row["data.sync"] != "all-reduce" else sizes


def is_served_row(row: Row) -> bool:
    """Its workers are worlds of their own: `test_served_combinations.py` runs it."""
    return row["data.sync"] == "server"


def num_ranks_of(row: Row) -> int:
    return math.prod(int(row[f"axes.{axis}"]) for axis in AXES)  # type: ignore[call-overload]


def read_rows() -> tuple[list[Row], list[Pair]]:
    """The sample as last computed."""
    kept = json.loads(FILE.read_text())
    rows = [{name: _as_tuple(value) for name, value in row.items()} for row in kept["rows"]]
    return rows, [((one[0], _as_tuple(one[1])), (two[0], _as_tuple(two[1]))) for one, two in kept["never"]]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def rows_that_still_run() -> list[Row]:
    """The sample as last computed, with fields that are new at their first values."""
    rows = [{name: row.get(name, values[0]) for name, values in FIELDS.items()} for row in read_rows()[0]]
    return [row for row in rows if settle(row) == row]


def write_rows(begun: Sequence[Row] = ()) -> None:
    rows, never = find_rows(begun)
    lines = {"rows": [json.dumps(row) for row in rows], "never": [json.dumps(pair) for pair in never]}
    blocks = [f'"{name}": [\n' + ",\n".join(inside) + "\n]" for name, inside in lines.items()]
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    print(f"{len(rows)} rows, {len(never)} pairs that cannot be combined: {FILE}")


if __name__ == "__main__":
    write_rows(rows_that_still_run() if sys.argv[1:] == ["extend"] else ())
