"""Replicas that differ over the strict stand-in for NCCL: the weights' groups keep its rules, also on one stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import ADAMW, small_gpt, token_batch
from ranks import ranks
from strict_nccl.mode import StrictMode
from strict_plans import verify_over_strict

from weft.plan.plan import Axes, Codec, Comm, Data, Plan, Step

DILOCO = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
PLANS = {
    "zero-3 inside": Plan(
        axes=Axes(replicate=2, data=2),
        data=replace(DILOCO, shard="parameters"),
        codec=Codec(name="half"),
        comm=Comm(bucket_bytes=999),
    ),
    "delayed, zero-3 inside": Plan(
        axes=Axes(replicate=2, data=2),
        data=Data(sync="delayed", delay=3, shard="parameters"),
        codec=Codec(name="topk", density=0.1, dense_below=100),
        comm=Comm(bucket_bytes=999),
    ),
    "streaming, pipeline inside": Plan(
        axes=Axes(data=2, pipeline=2),
        step=Step(microbatches=2),
        data=replace(DILOCO, every=3, fragments=2, delay=1, mix=0.5),
        comm=Comm(bucket_bytes=999),
    ),
    "pipeline inside": Plan(axes=Axes(data=2, pipeline=2), step=Step(microbatches=2), data=DILOCO),
}
MODES = {"one stream": StrictMode(one_stream=True), "delays": StrictMode(delay_ms=1.0)}


@ranks(4)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("zero-3 inside", "one stream"),
        ("delayed, zero-3 inside", "delays"),
        ("streaming, pipeline inside", "delays"),
        pytest.param("delayed, zero-3 inside", "one stream", marks=pytest.mark.long),
        pytest.param("pipeline inside", "delays", marks=pytest.mark.long),
    ],
)
def test_an_exchange_between_replicas_keeps_nccls_rules(name: str, mode: str) -> None:
    verify_over_strict(
        small_gpt(num_layers=2),
        PLANS[name],
        MODES[mode],
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[token_batch(size, seed=seed) for seed, size in enumerate((8, 5, 6, 7, 8))],
        dtype=torch.float64,
    ).require()
