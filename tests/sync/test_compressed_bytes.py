"""The bytes that a step with a codec sends equal what `plan/exchange/` predicts, by axis, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oracle import cut_evenly, make_trainer, small_gpt, token_batch
from ranks import ranks

from weft.plan.exchange.coded_tensor import coded_tensors
from weft.plan.exchange.compression import Compression, between_replicas, bytes_of_steps, dense_bytes, exchanging_axes
from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues, coded_bytes
from weft.plan.plan import CODECS, Axes, Codec, Comm, Data, Plan, Precision, Step
from weft.training.exchanged_bytes import predicted_compression, sent_bytes_of_step
from weft.training.run.compression_report import compression_of_run

SETTINGS: dict[str, dict[str, object]] = {
    "topk": {"density": 0.05, "bits": 8},
    "dgc": {"density": 0.05},
    "powersgd": {"rank": 2},
    "qsgd": {"levels": 16},
}
WARM_UP = 3
"""The order of buckets is agreed after the first step, so that the third is the first one with those of all later."""


def codec_of(name: str) -> Codec:
    plain = {} if name == "half" else {"dense_below": 300, "warmup_steps": WARM_UP}
    return Codec(name=name, **{**plain, **SETTINGS.get(name, {})})  # type: ignore[arg-type]


def check_bytes(plan: Plan) -> None:
    """Every step sends what is predicted, that of a warm-up too."""
    tokens = token_batch(8)
    trainer = make_trainer(small_gpt(), plan, example=tokens[0][:1])
    seen = 0
    for step in range(WARM_UP + 1):
        before = {axis: one.sent_bytes for axis, one in trainer.mesh.traffic.items()}
        trainer.step(*cut_evenly(tokens, trainer.data_size)[trainer.data_rank])
        if step < 2 and plan.replica_axis is None:
            continue
        found = {axis: one.sent_bytes - before.get(axis, 0) for axis, one in trainer.mesh.traffic.items()}
        predicted = sent_bytes_of_step(trainer.parts, step=step)
        assert set(predicted) <= {*found, *(axis for axis in predicted if not predicted[axis])}
        for axis in exchanging_axes(plan):
            assert found.get(axis, 0) == predicted.get(axis, 0), f"step {step} over {axis}"
            seen += predicted.get(axis, 0)
    assert seen > 0


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("name", [name for name in CODECS if name != "half"])  # which is for local steps
def test_a_step_sends_what_is_predicted(name: str) -> None:
    check_bytes(Plan(axes=Axes(data=2), data=Data(check_every=0), codec=codec_of(name), comm=Comm(bucket_bytes=6000)))


LOCAL = Data(sync="local", every=2, check_every=0)


@ranks(2)
@pytest.mark.parametrize("name", ["topk", *(pytest.param(name, marks=pytest.mark.long) for name in ("onebit", "qsgd"))])
def test_an_exchange_of_local_steps_sends_what_is_predicted(name: str) -> None:
    check_bytes(Plan(axes=Axes(data=2), data=LOCAL, codec=codec_of(name), comm=Comm(bucket_bytes=6000)))


PLANS = {
    "four": Plan(axes=Axes(data=4)),
    "hybrid": Plan(axes=Axes(replicate=2, data=2), data=Data(shard="optimizer"), step=Step(clip_norm=1.0)),
    "zero-3": Plan(axes=Axes(replicate=2, data=2), data=Data(shard="parameters"), step=Step(microbatches=2)),
    "masters": Plan(axes=Axes(data=4), precision=Precision(compute="bf16")),
    "tensor": Plan(axes=Axes(data=2, tensor=2)),
    "pipeline": Plan(axes=Axes(data=2, pipeline=2)),
    "ring": Plan(axes=Axes(data=2, ring=2)),
    "ring of masters": Plan(axes=Axes(data=2, ring=2), precision=Precision(compute="bf16")),
    "local": Plan(axes=Axes(data=4), data=LOCAL),
    "local zero-3": Plan(axes=Axes(replicate=2, data=2), data=replace(LOCAL, shard="parameters")),
    "local tensor": Plan(axes=Axes(data=2, tensor=2), data=LOCAL),
}


@pytest.mark.sampled(long=9)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("codec", ["topk", "onebit", "powersgd"])
@pytest.mark.parametrize("name", PLANS)
def test_every_axis_sends_what_is_predicted(name: str, codec: str) -> None:
    plan = PLANS[name]
    data = replace(plan.data, check_every=0)
    check_bytes(replace(plan, data=data, codec=codec_of(codec), comm=Comm(bucket_bytes=6000)))


def test_a_bucket_by_hand() -> None:
    """999 elements of two tensors, which two slices cannot share evenly."""
    values = CodedValues(
        tensors=coded_tensors([("a", (20, 25), 500), ("b", (499, 1), 499)]), numel=999, dtype="float32"
    )
    rank_2 = Codec(name="powersgd", rank=2)
    # a: 2 × 20 and 2 × 25; b, of one column: 499 and 1.
    assert coded_bytes(values, rank_2, CodecGroups(num_across=2), step=0) == (0, 4 * (40 + 499) + 4 * (50 + 1))
    # The first half: 500 elements of a; each of two ranks sends half of 1000 twice.
    halves = CodecGroups(num_across=2, num_inside=2, index_inside=0)
    assert coded_bytes(values, rank_2, halves, step=0) == (2 * 4 * 500, 4 * 40 + 4 * 50)
    warm = replace(rank_2, warmup_steps=1)
    assert coded_bytes(values, warm, CodecGroups(num_across=4), step=0) == (0, 4 * 999 * 3 // 2)


def test_the_compression_of_a_run() -> None:
    """All of it counts: the warm-up, and with local steps the steps without an exchange."""
    plan = Plan(axes=Axes(data=4), codec=Codec(name="topk"))
    assert dense_bytes(1000, plan, num_steps=10) == 10 * 6000
    assert Compression(dense_bytes=60_000, sent_bytes=600).ratio == 100
    assert bytes_of_steps(lambda step: 100 if step < 3 else 7, 10, settled=3) == 300 + 49
    assert bytes_of_steps(lambda step: 100 if step < 3 else 7, 2, settled=3) == 200
    every_third = bytes_of_steps(lambda step: 50 if step % 3 == 2 else 0, 10, period=3)
    assert every_third == sum(50 for step in range(10) if step % 3 == 2)
    hybrid = Plan(axes=Axes(replicate=2, data=8), data=Data(shard="parameters"), codec=Codec(name="topk"))
    assert dense_bytes(1000, hybrid, num_steps=1) == 4000  # a rank's own part, over two replicas
    assert between_replicas({"data": 5, "replicate": 7}, hybrid) == 7
    assert (
        between_replicas({"data": 5, "ring+ulysses": 7, "data+ring+ulysses": 1}, Plan(axes=Axes(data=2, ring=2))) == 13
    )


@ranks(2)
def test_the_compression_of_a_trainer() -> None:
    """A hundredth of the entries, in 6 of 4 bytes each: the rest is small tensors, the tail and counts of entries."""
    plan = Plan(axes=Axes(data=2), data=Data(check_every=0), codec=Codec(name="topk", density=0.01, dense_below=200))
    trainer = make_trainer(small_gpt(hidden=64, mlp_hidden=256), plan)
    found = predicted_compression(trainer.parts, num_steps=20)
    numel = sum(one.numel() for one in trainer.model.parameters())
    assert found.dense_bytes == 20 * 4 * numel
    assert 20 * 4 * numel / 100 < found.sent_bytes < 20 * 4 * numel / 20


@ranks(2)
def test_a_description_tells_what_codecs_send_and_keep() -> None:
    codec = Codec(name="powersgd", rank=2, dense_below=300)
    trainer = make_trainer(small_gpt(), Plan(axes=Axes(data=2), codec=codec))
    (line,) = [line for line in trainer.describe().splitlines() if line.strip().startswith("codec")]
    assert "codec powersgd: 6 of 14 tensors are compressed" in line, line
    assert "of state are kept (residual, start)" in line and "between replicas" in line


@ranks(2)
def test_the_report_of_a_run_counts_all_its_steps(tmp_path: Path) -> None:
    """From the metrics, of which only rank 0 has a file; layers' own exchanges do not count."""
    trainer = make_trainer(small_gpt(), Plan(axes=Axes(data=2), codec=Codec(name="topk", dense_below=300)))
    metrics = tmp_path / f"metrics-{trainer.mesh.world.rank}.jsonl"
    if trainer.mesh.world.rank == 0:
        lines = [{"sent_bytes": {"data": 500, "world": 3}}, {"held_out_loss": 1.0}, {"sent_bytes": {"data": 70}}]
        metrics.write_text("".join(json.dumps({"step": 1, **line}) + "\n" for line in lines))
    numel = sum(one.numel() for one in trainer.model.parameters())
    found = compression_of_run(trainer, metrics)
    assert found == Compression(dense_bytes=2 * 4 * numel, sent_bytes=570)
    dense = make_trainer(small_gpt(), Plan(axes=Axes(data=2)))
    assert compression_of_run(dense, metrics) is None
