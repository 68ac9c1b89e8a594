"""Streaming outer steps held to one process that plays all replicas by the rule, whatever is inside a replica."""

from __future__ import annotations

from typing import Any

import pytest
from meshes import verify
from oracle import ADAMW, SGD, image_batch, small_convnet, small_gpt, token_batch
from ranks import ranks

from weft.plan.plan import Axes, Codec, Comm, Data, Pipeline, Plan, Precision, Step

SIZES = (6, 7, 5, 6, 8, 6, 7)
CODECS = {
    "half": Codec(name="half"),
    "topk": Codec(name="topk", density=0.1, dense_below=100),
    "onebit": Codec(name="onebit", dense_below=100),
    "qsgd": Codec(name="qsgd", levels=4, dense_below=100),
    "terngrad": Codec(name="terngrad", dense_below=100),
    "powersgd": Codec(name="powersgd", rank=2, dense_below=100),
}
DILOCO = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def streaming_plan(axes: dict[str, int], *, sections: dict[str, Any] | None = None, **data: Any) -> Plan:
    settings = {"sync": "local", "every": 4, "fragments": 2, "delay": 2, "mix": 0.25, **DILOCO, **data}
    return Plan(axes=Axes(**axes), data=Data(**settings), **(sections or {}))


def check(plan: Plan, model: Any = None, make_batch: Any = token_batch, optimizer: Any = ADAMW) -> None:
    batches = [make_batch(size, seed=seed) for seed, size in enumerate(SIZES)]
    outcome = verify(
        model or small_gpt(num_layers=2), plan, batches=batches, loss="cross-entropy", optimizer=optimizer, device="cpu"
    ).require()
    assert outcome.first is None and outcome.rule == "one process that plays all replicas"
    assert not any("instead of" in note for note in outcome.notes), "merged as the plan says"


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("mix", [0.0, 0.5])
@pytest.mark.parametrize(("every", "fragments", "delay"), [(4, 2, 0), (4, 2, 1), (3, 1, 2), (3, 2, 2), (4, 2, 3)])
def test_two_replicas(every: int, fragments: int, delay: int, mix: float) -> None:
    if (fragments, delay, mix) == (1, 0, 0.0):
        pytest.skip("DiLoCo")
    check(streaming_plan({"data": 2}, every=every, fragments=fragments, delay=delay, mix=mix))


@ranks(2)
def test_plain_averages_of_fragments_after_steps_together() -> None:
    check(streaming_plan({"data": 2}, every=3, delay=1, switch_step=2, outer="average", outer_lr=1.0, outer_momentum=0))


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec(name: str, delay: int) -> None:
    sections = {"codec": CODECS[name], "comm": Comm(bucket_bytes=2000)}
    check(streaming_plan({"data": 2}, delay=delay, sections=sections))


@ranks(2)
def test_running_statistics_stay_a_replicas_own() -> None:
    check(streaming_plan({"data": 2}, fragments=1, every=3), small_convnet(), image_batch, SGD)


@pytest.mark.sampled(4, long=8)
@ranks(4)
@pytest.mark.parametrize("codec", ["none", "topk", "powersgd"])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2}, {"data": 2, "ring": 2}, {"replicate": 2, "data": 2}, {"data": 2, "pipeline": 2}]
)
def test_inside_a_replica(axes: dict[str, int], codec: str) -> None:
    sections: dict[str, Any] = {"codec": CODECS[codec]} if codec != "none" else {}
    if "pipeline" in axes:
        sections |= {"pipeline": Pipeline(schedule="1f1b"), "step": Step(microbatches=2)}
    check(streaming_plan(axes, shard="parameters" if "replicate" in axes else "nothing", sections=sections))


@ranks(4)
def test_shards_in_16_bits() -> None:
    sections = {"precision": Precision(compute="bf16")}
    check(streaming_plan({"replicate": 2, "data": 2}, shard="optimizer", sections=sections))
