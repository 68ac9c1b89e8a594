"""The plans that `gpu_smoke.py` runs: every axis alone, two axes at once, and what goes over or beside them.

An axis alone has all ranks; two axes at once have 2 and the rest, so they need 4 ranks. On 6 and 8 ranks there are a
few plans of their own. Names say what is in a plan, for a run of only some of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.plan.plan import (
    Average,
    Axes,
    Codec,
    Compile,
    Data,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    Sequence,
    Step,
    Tensor,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream", "2bw")
DRIFTS = "tied weights"
"""In the name of a case that trains for many steps and asks whether copies of a weight stay equal."""
COMPILED = "compiled"
"""In the name of a case that takes long, and is only run by name."""

ZERO_1, ZERO_2, ZERO_3 = (Data(shard=shard) for shard in ("optimizer", "gradients", "parameters"))
BF16, FP16 = Precision(compute="bf16"), Precision(compute="fp16")
AVERAGE, LATE_AVERAGE = Average(decay=0.9), Average(decay=0.9, start=1)
LOCAL: dict[str, Any] = {"sync": "local", "every": 3}
NESTEROV: dict[str, Any] = {**LOCAL, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
FULL, SELECTIVE = Recompute(policy="full"), Recompute(policy="selective")

ON_DATA: dict[str, dict[str, Any]] = {
    "data": {},
    "zero 1": {"data": ZERO_1},
    "zero 2": {"data": ZERO_2},
    "zero 3": {"data": ZERO_3},
    "zero 3, gathered for every microbatch": {"data": Data(shard="parameters", reshard="microbatch")},
    "zero 3, bf16, recomputed": {"data": ZERO_3, "precision": BF16, "recompute": SELECTIVE},
    "zero 3, recomputed": {"data": ZERO_3, "recompute": FULL},
    "zero 3, offloaded": {"data": Data(shard="parameters", offload=True)},
    "fp16": {"precision": FP16},
    "bf16, offloaded": {"data": Data(offload=True), "precision": Precision(compute="bf16", accumulate="bf16")},
}
ON_TENSOR: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor, split tokens": {"tensor": Tensor(sequence=True)},
    "tensor, bf16, recomputed": {"precision": BF16, "recompute": SELECTIVE},
    "tensor, split tokens, recomputed": {"tensor": Tensor(sequence=True), "recompute": FULL},
    f"tensor, {COMPILED}": {"compile": Compile(blocks=True)},
}
ON_RING: dict[str, dict[str, Any]] = {
    "ring": {},
    "ring, contiguous, zero 2": {"sequence": Sequence(layout="contiguous"), "data": ZERO_2},
    "ring self-attention": {"sequence": Sequence(variant="ring-self-attention")},
    "ring, bf16": {"precision": BF16},
    "ring, recomputed": {"recompute": FULL},
    f"ring, {COMPILED}": {"compile": Compile(blocks=True)},
}
ON_ULYSSES: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "ulysses, bf16, recomputed": {"precision": BF16, "recompute": SELECTIVE},
}
TWO_AXES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "replicate x data, zero 2": ("replicate", "data", {"data": ZERO_2}),
    "replicate x data, zero 3": ("replicate", "data", {"data": ZERO_3}),
    "pipeline x data, interleaved, zero 1": (
        "pipeline",
        "data",
        {"pipeline": Pipeline(schedule="interleaved", chunks=2), "data": ZERO_1},
    ),
    "pipeline x data, zero 3": ("pipeline", "data", {"data": ZERO_3}),
    "data outside x pipeline inside": ("data", "pipeline", {}),
    "pipeline x tensor": ("pipeline", "tensor", {}),
    "pipeline x tensor, zero-bubble, split tokens": (
        "pipeline",
        "tensor",
        {"pipeline": Pipeline(schedule="zero-bubble"), "tensor": Tensor(sequence=True)},
    ),
    "pipeline x tensor, bf16, recomputed": ("pipeline", "tensor", {"precision": BF16, "recompute": FULL}),
    "data x tensor, zero 3": ("data", "tensor", {"data": ZERO_3}),
    "data x tensor, zero 3, bf16, split tokens": (
        "data",
        "tensor",
        {"data": ZERO_3, "precision": BF16, "tensor": Tensor(sequence=True)},
    ),
    "data x ring": ("data", "ring", {}),
    "data x ulysses, zero 3": ("data", "ulysses", {"data": ZERO_3}),
    "ring x ulysses": ("ring", "ulysses", {}),
    "ring x ulysses, bf16, recomputed": ("ring", "ulysses", {"precision": BF16, "recompute": SELECTIVE}),
    "ring x tensor": ("ring", "tensor", {}),
    "ulysses x tensor": ("ulysses", "tensor", {}),
    "pipeline x ring": ("pipeline", "ring", {}),
    "pipeline x ulysses, zero-bubble": ("pipeline", "ulysses", {"pipeline": Pipeline(schedule="zero-bubble")}),
}
ON_DATA_AVERAGED: dict[str, dict[str, Any]] = {
    "averaged": {},
    "averaged, not clipped": {"step": Step()},
    "averaged, zero 1, bf16": {"data": ZERO_1, "precision": BF16},
    "averaged, zero 3, fp16": {"data": ZERO_3, "precision": FP16},
}
"""Run by a check of their own, with a batch that is not finite."""
ON_DATA_LOCAL: dict[str, dict[str, Any]] = {
    "local": {"data": Data(**LOCAL)},
    "local, after a switch": {"data": Data(**LOCAL, switch_step=2)},
    "local, nesterov": {"data": Data(**NESTEROV)},
    "local, nesterov, offloaded": {"data": Data(**NESTEROV, offload=True)},
    "local, nesterov, half": {"data": Data(**NESTEROV), "codec": Codec(name="half")},
    "local, nesterov, bf16": {"data": Data(**NESTEROV), "precision": BF16},
}
STREAMING = {**NESTEROV, "every": 2, "fragments": 2, "delay": 1, "mix": 0.25}
DELAYED: dict[str, Any] = {"sync": "delayed", "delay": 2}
ON_DATA_LATE: dict[str, dict[str, Any]] = {
    "late, delayed": {"data": Data(**DELAYED)},
    "late, delayed by one": {"data": Data(sync="delayed", delay=1)},
    "late, delayed, offloaded": {"data": Data(**DELAYED, offload=True)},
    "late, delayed, onebit": {"data": Data(**DELAYED), "codec": Codec(name="onebit")},
    "late, delayed, powersgd": {"data": Data(**DELAYED), "codec": Codec(name="powersgd")},
    "late, delayed, bf16": {"data": Data(**DELAYED), "precision": BF16},
    "late, streaming": {"data": Data(**STREAMING)},
    "late, streaming, after a switch": {"data": Data(**STREAMING, switch_step=1)},
    "late, streaming, topk, offloaded": {"data": Data(**STREAMING, offload=True), "codec": Codec(name="topk")},
}
"""Exchanges that are merged steps after they were sent."""
SHARDED_LATE: dict[str, dict[str, Any]] = {
    "late, delayed between zero 3": {"data": Data(**DELAYED, shard="parameters")},
    "late, streaming between zero 3": {"data": Data(**STREAMING, shard="parameters")},
}
SHARDED_LOCAL: dict[str, dict[str, Any]] = {
    "local between zero 1": {"data": Data(**LOCAL, shard="optimizer")},
    "local between zero 3, nesterov": {"data": Data(**NESTEROV, shard="parameters")},
    "local between zero 3, nesterov, offloaded": {"data": Data(**NESTEROV, shard="parameters", offload=True)},
}
"""Replicas of two ranks."""
LARGE: dict[int, dict[str, dict[str, Any]]] = {
    6: {f"pipeline x data 3, {DRIFTS}": {"axes": Axes(pipeline=2, data=3), "data": Data(check_every=20)}},
    8: {
        "pipeline x data x tensor, zero 1": {"axes": Axes(pipeline=2, data=2, tensor=2), "data": ZERO_1},
        "data x ring x ulysses, zero 3": {"axes": Axes(data=2, ring=2, ulysses=2), "data": ZERO_3},
        "pipeline 4 x data, interleaved": {
            "axes": Axes(pipeline=4, data=2),
            "pipeline": Pipeline(schedule="interleaved", chunks=2),
            "step": Step(microbatches=4, clip_norm=1.0),
        },
    },
}
"""By number of ranks, where not every plan is run."""
ELSEWHERE = (
    ("zero 3", "pipeline x tensor"),
    ("pipeline x tensor", "ring x ulysses"),
    ("ring x ulysses", "data x tensor, zero 3"),
    ("data x tensor, zero 3", "pipeline, zero-bubble"),
    ("pipeline, zero-bubble", "replicate x data, zero 3"),
    ("tensor", "data"),
)
"""Saved under the first, loaded under the second."""


def all_plans(num_ranks: int) -> dict[str, Plan]:
    """By name; every one for this number of ranks."""
    base = Plan(step=Step(microbatches=2, clip_norm=1.0))
    if num_ranks in LARGE:
        return {name: replace(base, **changes) for name, changes in LARGE[num_ranks].items()}
    plans = {}
    for axis, changes_of in (("data", ON_DATA), ("tensor", ON_TENSOR), ("ring", ON_RING), ("ulysses", ON_ULYSSES)):
        plans |= {name: replace(base, axes=Axes(**{axis: num_ranks}), **kw) for name, kw in changes_of.items()}
    plans |= {f"pipeline, {schedule}": pipeline_plan(base, schedule, num_ranks) for schedule in SCHEDULES}
    plans["pipeline, 1f1b, averaged"] = replace(plans["pipeline, 1f1b"], average=LATE_AVERAGE)
    plans["pipeline, 2bw, averaged"] = replace(plans["pipeline, 2bw"], average=LATE_AVERAGE)
    for name, (outer, inner, changes) in TWO_AXES.items() if num_ranks >= 4 and num_ranks % 2 == 0 else ():
        default = Axes().order
        order = default
        if default.index(outer) > default.index(inner):
            order = (outer, *(axis for axis in default if axis != outer))
        plans[name] = replace(base, axes=Axes(**{outer: 2, inner: num_ranks // 2}, order=order), **changes)
    return plans


def averaged_plans(num_ranks: int) -> dict[str, Plan]:
    base = Plan(axes=Axes(data=num_ranks), step=Step(clip_norm=1.0), average=AVERAGE)
    return {name: replace(base, **changes) for name, changes in ON_DATA_AVERAGED.items()}


def local_plans(num_ranks: int) -> dict[str, Plan]:
    plans = {name: Plan(axes=Axes(data=num_ranks), **changes) for name, changes in ON_DATA_LOCAL.items()}
    if num_ranks >= 4 and num_ranks % 2 == 0:
        axes = Axes(replicate=num_ranks // 2, data=2)
        plans |= {name: Plan(axes=axes, **changes) for name, changes in SHARDED_LOCAL.items()}
    return plans


def late_plans(num_ranks: int) -> dict[str, Plan]:
    plans = {name: Plan(axes=Axes(data=num_ranks), **changes) for name, changes in ON_DATA_LATE.items()}
    if num_ranks >= 4 and num_ranks % 2 == 0:
        axes = Axes(replicate=num_ranks // 2, data=2)
        plans |= {name: Plan(axes=axes, **changes) for name, changes in SHARDED_LATE.items()}
    return plans


def pipeline_plan(base: Plan, schedule: str, num_ranks: int) -> Plan:
    # PipeDream knows no norm of a whole gradient, and 2BW needs a microbatch a stage.
    clip_norm = 0.0 if schedule == "pipedream" else base.step.clip_norm
    step = Step(microbatches=max(num_ranks, 2), clip_norm=clip_norm)
    return replace(base, axes=Axes(pipeline=num_ranks), pipeline=Pipeline(schedule=schedule), step=step)
