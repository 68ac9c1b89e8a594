"""Replicas that differ between exchanges: held to one process that plays them all, whatever is inside a replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import verify
from oracle import ADAMW, SGD, image_batch, small_convnet, small_gpt, token_batch
from ranks import gathered, ranks

from weft.plan.check import check as check_plan
from weft.plan.late_merges import exchanges_after
from weft.plan.plan import Average, Axes, Codec, Data, Pipeline, Plan, Precision, Step
from weft.plan.plan import Tensor as TensorSection
from weft.verification.replicas import with_an_exchange
from weft.verification.verdict import Verification

DILOCO = {"every": 2, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def local_plan(axes: dict[str, int], **settings: Any) -> Plan:
    """A plan of local steps; settings are fields of `[data]`, sections, or microbatches and clip_norm."""
    step = {name: settings.pop(name) for name in ("microbatches", "clip_norm") if name in settings}
    sections = {
        name: settings.pop(name) for name in ("pipeline", "tensor", "average", "precision", "codec") if name in settings
    }
    return Plan(axes=Axes(**axes), step=Step(**step), data=Data(sync="local", **{"every": 2, **settings}), **sections)


def check(plan: Plan, *sizes: int, model: Any = None, make_batch: Any = token_batch, **settings: Any) -> Verification:
    """Verify a plan on one batch per size."""
    model = model or small_gpt()
    batches = [make_batch(size, seed=seed) for seed, size in enumerate(sizes)]
    given = {"loss": "cross-entropy", "optimizer": ADAMW, "device": "cpu", **settings}
    outcome = verify(model, plan, batches=batches, **given).require()
    assert outcome.rule == "one process that plays all replicas" and outcome.first is None
    assert {one.name for one in outcome.differences if one.what == "weight"} == set(dict(model.named_parameters()))
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight"}
    deviation = outcome.deviation
    assert deviation is not None
    if plan.num_replicas > 1 and deviation.limit is None:  # else it is that of rounding
        assert deviation.movement is not None
        assert deviation.against == "synchronous training in one process" and 1e-6 < deviation.movement < 10
    assert len(set(gathered(str(outcome)))) == 1
    return outcome


@ranks(2)
def test_two_replicas_of_one_rank() -> None:
    check(local_plan({"data": 2}, **DILOCO, clip_norm=0.5, microbatches=2), 6, 7, 5, 6)


@ranks(4)
def test_two_replicas_that_shard_everything() -> None:
    check(local_plan({"replicate": 2, "data": 2}, shard="parameters", **DILOCO), 6, 7, 5, 6)


@ranks(2)
def test_batch_norms_an_average_and_a_replica_without_samples() -> None:
    plan = local_plan({"data": 2}, average=Average(decay=0.5, start=1), switch_step=1)
    sizes, settings = (8, 1, 8, 6, 8), {"model": small_convnet(), "make_batch": image_batch}
    outcome = check(plan, *sizes, optimizer=SGD, **settings)
    assert {"average", "buffer"} <= {one.what for one in outcome.differences}
    assert any("running_var" in one.name for one in outcome.differences)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_sharded_inside(shard: str) -> None:
    """Uneven parts, several microbatches, and steps in which a rank, or a whole replica, has no samples."""
    plan = local_plan({"replicate": 2, "data": 2}, shard=shard, **DILOCO, microbatches=2, clip_norm=0.5)
    check(plan, 9, 7, 3, 2, 8)


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("outer", ["average", "nesterov"])
@pytest.mark.parametrize(
    "axes",
    [{"tensor": 2}, {"ring": 2}, {"ulysses": 2}, {"data": 4}],
    ids=lambda axes: next(iter(axes)),
)
def test_split_inside(axes: dict[str, int], outer: str) -> None:
    settings = DILOCO if outer == "nesterov" else {"every": 3, "switch_step": 1}
    outcome = check(local_plan({"data": 2, **axes}, **settings, clip_norm=0.5), 6, 8, 5, 6, 7)
    assert not outcome.notes, "exchanges were as the plan says"


@ranks(4)
@pytest.mark.long
def test_split_tokens_inside() -> None:
    check(local_plan({"data": 2, "tensor": 2}, **DILOCO, tensor=TensorSection(sequence=True)), 6, 8, 5, 6)


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_pipeline_inside(schedule: str) -> None:
    """Stages that hold a tied weight, and a replica that has no samples in the third step."""
    chunks = 2 if schedule == "interleaved" else 1
    plan = local_plan(
        {"data": 2, "pipeline": 2},
        **DILOCO,
        microbatches=2,
        clip_norm=0.5,
        pipeline=Pipeline(schedule=schedule, chunks=chunks),
    )
    check(plan, 8, 6, 1, 8, model=small_gpt(num_layers=4))


@ranks(8)
@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", "ring", "pipeline"])
def test_eight_ranks(axis: str) -> None:
    plan = local_plan({"replicate": 2, "data": 2, axis: 2}, shard="parameters", **DILOCO, microbatches=2)
    check(plan, 8, 9, 7, 8)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("shard", ["nothing", "gradients"])
def test_batch_norms_inside(shard: str) -> None:
    axes = {"data": 4} if shard == "nothing" else {"replicate": 2, "data": 2}
    plan = local_plan(axes, shard=shard, every=2, average=Average(decay=0.9))
    check(plan, 12, 8, 11, 12, model=small_convnet(), make_batch=image_batch, optimizer=SGD)


@ranks(2)
@pytest.mark.long
def test_one_replica_is_verified_too() -> None:
    """With a rate other than 1 or momentum an outer step is no identity, even alone."""
    check(local_plan({"data": 1, "tensor": 2}, **DILOCO), 6, 7, 5, 6)


@ranks(4)
@pytest.mark.long
def test_an_offloaded_optimizer() -> None:
    check(local_plan({"replicate": 2, "data": 2}, shard="gradients", offload=True, **DILOCO), 6, 7, 5, 6)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_bf16_is_left_out_and_its_deviation_reported(shard: str) -> None:
    axes = {"data": 4} if shard == "nothing" else {"replicate": 2, "data": 2}
    plan = local_plan(axes, shard=shard, **DILOCO, precision=Precision(compute="bf16"))
    deviation = check(plan, 8, 8, 8, 8, optimizer=SGD).deviation
    assert deviation is not None and deviation.gradient is not None and 0 < deviation.gradient < 0.1
    assert deviation.against == "one process that plays all replicas, in float32"


def test_few_steps_show_an_exchange_all_the_same() -> None:
    """The rule is compared, not the number: every 500 steps, 3 of them would compare no exchange."""
    cases = {
        # steps, every, switch_step: every, switch_step
        (3, 500, 0): (2, 0),
        (1, 500, 0): (1, 0),
        (2, 50, 10): (2, 0),
        (3, 50, 10): (2, 1),
        (5, 4, 2): (2, 1),
        (5, 4, 1): (4, 1),
        (9, 4, 0): (4, 0),
    }
    for (num_steps, every, switch_step), expected in cases.items():
        plan = local_plan({"data": 2}, every=every, switch_step=switch_step)
        changed, notes = with_an_exchange(plan, num_steps=num_steps)
        assert (changed.data.every, changed.data.switch_step) == expected
        assert check_plan(changed, num_ranks=2) == [] and bool(notes) == (changed != plan)
        assert any(exchanges_after(changed.data, step) for step in range(1, num_steps + 1))
    (note,) = with_an_exchange(local_plan({"data": 2}, every=500, switch_step=9), num_steps=3)[1]
    assert note == "replicas exchanged every 2 steps instead of 500 after step 1 instead of 9, to be seen in 3 steps"
    assert with_an_exchange(Plan(), num_steps=1) == (Plan(), [])


@ranks(2)
@pytest.mark.long
def test_losses_in_float32() -> None:
    outcome = check_losses(local_plan({"data": 2}, **DILOCO))
    assert outcome.tolerance == 1e-5 and {one.what for one in outcome.differences} == {"loss"}


def check_losses(plan: Plan) -> Verification:
    batches = [token_batch(6, seed=seed) for seed in range(4)]
    given = {"loss": "cross-entropy", "optimizer": ADAMW, "device": "cpu", "dtype": torch.float32}
    return verify(small_gpt(), plan, batches=batches, **given).require()


@ranks(2)
@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_a_codec_is_left_out_and_its_deviation_reported(outer: str) -> None:
    settings = DILOCO if outer == "nesterov" else {}
    outcome = check(local_plan({"data": 2}, codec=Codec(name="half"), **settings), 8, 8, 8, 8, optimizer=SGD)
    deviation = outcome.deviation
    assert deviation is not None and deviation.against == "one process that plays all replicas, in float32"
    assert deviation.movement is not None and 1e-5 < deviation.movement < 0.01
    assert "deviation from synchronous training in one process: loss" in outcome.notes[0]


@ranks(2)
def test_a_codec_that_loses_more_than_it_may_is_found() -> None:
    """A change of a wrong size deviates by more than any rounding."""

    def decode(self: Any, number: int, received: Any, values: Any, *, scale: float) -> None:
        values.copy_(received)  # the sum, for the mean

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.codecs.half.Half.decode", decode)
        plan = local_plan({"data": 2}, codec=Codec(name="half"))
        batches = [token_batch(8, seed=seed) for seed in range(4)]
        settings = {"loss": "cross-entropy", "optimizer": SGD, "device": "cpu"}
        outcome = verify(small_gpt(), plan, batches=batches, **settings)
    assert outcome.is_equal and not outcome.ok and outcome.deviation is not None
    assert "gives weights that are" in str(outcome.deviation.problem)
