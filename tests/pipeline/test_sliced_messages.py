"""Tensor ranks that send slices of what crosses between stages, and gather them: same answer, fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from meshes import verify
from oracle import SGD, make_trainer, pipeline_plan, small_gpt, tensor_plan, token_batch
from ranks import ranks
from strict_nccl.mode import StrictMode
from strict_plans import verify_over_strict

from weft.mesh import make_mesh
from weft.parallel.pipeline.stage_messages import _are_slices_faster
from weft.plan.partition.wire import SplitLayers, num_slices, pipeline_bytes, tensor_bytes
from weft.plan.plan import Plan
from weft.world import World


@contextmanager
def in_slices() -> Iterator[None]:
    """Context in which all but the totals of a step travel in slices, also through the memory of one host."""
    with (
        mock.patch("weft.parallel.pipeline.stage_messages._are_slices_faster", return_value=True),
        mock.patch("weft.plan.partition.wire.SMALLEST_SLICED_BYTES", 64),
    ):
        yield


PLANS = {
    "1f1b, split tokens, through sockets": tensor_plan(2, pipeline=2, microbatches=2, sequence=True, transport="c10d"),
    "zero-bubble": tensor_plan(2, pipeline=2, microbatches=2, schedule="zero-bubble", clip_norm=0.1),
    "interleaved": tensor_plan(2, pipeline=2, microbatches=4, schedule="interleaved", chunks=2),
}


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("name", PLANS)
def test_slices_give_the_same_answer(name: str) -> None:
    batches = [token_batch(8, seed=seed) for seed in range(3)]
    with in_slices():
        verify(
            small_gpt(num_layers=4).double(),
            PLANS[name],
            loss="cross-entropy",
            optimizer=SGD,
            batches=batches,
            device="cpu",
        ).require()


@pytest.mark.long
@ranks(4)
def test_slices_keep_nccls_rules() -> None:
    """Gathers on arrival match between tensor ranks, whose other exchanges share their communicator."""
    plan = tensor_plan(2, pipeline=2, microbatches=3, schedule="zero-bubble", sequence=True)
    with in_slices():
        verify_over_strict(
            small_gpt(num_layers=2).double(),
            plan,
            StrictMode(is_eager=True, delay_ms=1),
            loss="cross-entropy",
            optimizer=SGD,
            batches=[token_batch(6, seed=seed) for seed in range(2)],
        ).require()


def sent(plan: Plan) -> tuple[dict[str, int], int]:
    """Bytes that this rank sends in a step of 4 samples per microbatch, by axis, and its place along the pipeline."""
    inputs, targets = token_batch(4 * plan.step.microbatches)
    trainer = make_trainer(small_gpt(num_layers=4, tied=False).double(), plan, example=inputs[:4])
    trainer.step(inputs, targets)
    before = {axis: trainer.mesh.traffic[axis].sent_bytes for axis in ("pipeline", "tensor")}
    trainer.step(inputs, targets)
    return {axis: trainer.mesh.traffic[axis].sent_bytes - before[axis] for axis in before}, trainer.mesh.index(
        "pipeline"
    )


@ranks(4)
def test_bytes_of_slices_are_those_predicted() -> None:
    """8 tokens of 16 channels and 8 bytes cross the boundary; of each message half is sent, and half of it gathered."""
    plan = tensor_plan(2, pipeline=2, microbatches=3, cuts=(2,))
    whole, rank = sent(plan)
    with in_slices():
        sliced, _ = sent(plan)
        assert num_slices(4 * 8 * 16, 8, 2) == 2
    crossing = 4 * 8 * 16 * 8
    assert whole["pipeline"] == pipeline_bytes([(crossing, crossing)], plan, rank=rank)
    assert sliced["pipeline"] == pipeline_bytes([(crossing // 2, crossing // 2)], plan, rank=rank)
    layers = [
        SplitLayers(activation_bytes=crossing, num_regions=4, sliced_receive_bytes=arriving)
        for arriving in ((), (crossing,))
    ]
    without, gathered = (tensor_bytes(one, plan) for one in layers)
    assert sliced["tensor"] - whole["tensor"] == gathered - without == 3 * crossing // 2


def test_small_and_odd_tensors_travel_whole() -> None:
    assert num_slices(2**20, 2, 4) == 4
    assert num_slices(2**18, 2, 4) == 1
    assert num_slices(2**20 + 2, 2, 4) == 1


@pytest.mark.parametrize(
    ("hosts", "backend", "is_faster"),
    [
        ((0, 0, 0, 0), "gloo", False),
        ((0, 0, 1, 1), "gloo", True),
        ((0, 1, 0, 1), "gloo", False),
        ((0, 1, 2, 3), "gloo", False),
        ((0, 0, 0, 0), "nccl", True),
    ],
)
def test_where_the_way_between_stages_is_the_slower_one(hosts: tuple[int, ...], backend: str, is_faster: bool) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second."""
    world = World(rank=0, size=4, local_rank=0, device=torch.device("meta"), hosts=hosts, backend=backend)
    for plan in (tensor_plan(2, pipeline=2), pipeline_plan(4)):
        assert _are_slices_faster(make_mesh(plan, world)) == (is_faster and plan.axes.tensor > 1)
