"""Delayed averaging held to one process that plays all replicas by the rule, whatever is inside a replica."""

from __future__ import annotations

from typing import Any

import pytest
from meshes import verify
from oracle import ADAMW, SGD, image_batch, small_convnet, small_gpt, token_batch
from ranks import ranks

from weft.plan.plan import Axes, Codec, Comm, Data, Pipeline, Plan, Precision, Step

SIZES = (6, 7, 5, 6, 8, 6)
CODECS = {
    "half": Codec(name="half"),
    "topk": Codec(name="topk", density=0.1, dense_below=100),
    "onebit": Codec(name="onebit", dense_below=100),
    "qsgd": Codec(name="qsgd", levels=4, dense_below=100),
    "terngrad": Codec(name="terngrad", dense_below=100),
    "powersgd": Codec(name="powersgd", rank=2, dense_below=100),
}


def delayed_plan(
    axes: dict[str, int], *, delay: int = 2, every: int = 1, shard: str = "nothing", **sections: Any
) -> Plan:
    data = Data(sync="delayed", delay=delay, every=every, shard=shard)
    return Plan(axes=Axes(**axes), data=data, **sections)


def check(plan: Plan, model: Any = None, make_batch: Any = token_batch, optimizer: Any = ADAMW) -> None:
    batches = [make_batch(size, seed=seed) for seed, size in enumerate(SIZES)]
    outcome = verify(
        model or small_gpt(), plan, batches=batches, loss="cross-entropy", optimizer=optimizer, device="cpu"
    ).require()
    assert outcome.first is None and outcome.rule == "one process that plays all replicas"
    assert not any("instead of" in note for note in outcome.notes), "merged as the plan says"


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_two_replicas(delay: int, every: int) -> None:
    check(delayed_plan({"data": 2}, delay=delay, every=every, step=Step(microbatches=2, clip_norm=0.5)))


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec(name: str, delay: int) -> None:
    check(delayed_plan({"data": 2}, delay=delay, codec=CODECS[name], comm=Comm(bucket_bytes=2000)))


@ranks(2)
def test_running_statistics_stay_a_replicas_own() -> None:
    check(delayed_plan({"data": 2}, delay=2), small_convnet(), image_batch, SGD)


@pytest.mark.sampled(3, long=6)
@ranks(4)
@pytest.mark.parametrize("codec", ["none", "topk", "powersgd"])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2}, {"data": 2, "ring": 2}, {"replicate": 2, "data": 2}, {"data": 2, "pipeline": 2}]
)
def test_inside_a_replica(axes: dict[str, int], codec: str) -> None:
    sections: dict[str, Any] = {"codec": CODECS[codec]} if codec != "none" else {}
    if "pipeline" in axes:
        sections |= {"pipeline": Pipeline(schedule="1f1b"), "step": Step(microbatches=2)}
    shard = "parameters" if "replicate" in axes else "nothing"
    check(delayed_plan(axes, shard=shard, **sections), small_gpt(num_layers=2))


@ranks(4)
def test_shards_in_16_bits() -> None:
    plan = delayed_plan({"replicate": 2, "data": 2}, shard="optimizer", precision=Precision(compute="bf16"))
    check(plan)
