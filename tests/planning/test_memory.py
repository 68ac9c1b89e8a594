"""Predicted memory against the formulas of ZeRO, and against buffers added up by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weft.errors import PlanError
from weft.plan.partition.flat_buffers import ParameterSpec
from weft.plan.partition.groups import COMMUNICATOR_BYTES
from weft.plan.plan import Average, Axes, Codec, Comm, Data, Plan, Precision, Recompute, Step
from weft.planning.memory import Memory, predict_memory
from weft.profiles.model import ModelProfile, Segment, Size

GB = 10**9
SHARDS = ("nothing", "optimizer", "gradients", "parameters")
HALF_GRADIENTS = Precision(compute="bf16", accumulate="bf16", reduce="bf16")


def make_profile(*block_numels: int, root: int = 0, compute: str = "model", **changes: Any) -> ModelProfile:
    """A model of blocks with one matrix each, and a root with another."""
    parameters = [ParameterSpec(name="root", shape=(root,))] if root else []
    parameters += [
        ParameterSpec(name=f"blocks.{number}", shape=(numel,), block=number)
        for number, numel in enumerate(block_numels)
    ]
    blocks = tuple(f"blocks.{number}" for number in range(len(block_numels)))
    return ModelProfile(parameters=tuple(parameters), blocks=blocks, compute=compute, **changes)


def make_plan(shard: str, data: int, **sections: Any) -> Plan:
    return Plan(axes=Axes(data=data), data=Data(shard=shard), **sections)


# Bytes a parameter, largest model in 80 GB and a model of 7.5 billion parameters, both on 64 ranks.
ZERO_TABLE = [
    ("nothing", lambda n: 16, 5, 120.0),
    ("optimizer", lambda n: 4 + 12 / n, 19, 31.4),
    ("gradients", lambda n: 2 + 14 / n, 36, 16.6),
    ("parameters", lambda n: 16 / n, 320, 1.9),
]


@pytest.mark.parametrize(("shard", "formula", "largest", "of_seven_and_a_half"), ZERO_TABLE)
def test_the_table_of_zero(shard: str, formula: Any, largest: int, of_seven_and_a_half: float) -> None:
    profile = make_profile(*[200_000_000] * 36, root=300_000_000, compute="bf16")
    assert profile.numel == 7.5 * GB
    for data in (2, 4, 64):
        state = predict_memory(make_plan(shard, data, precision=HALF_GRADIENTS), profile).state
        assert state == pytest.approx(formula(data) * profile.numel, rel=1e-4)
    assert round(state / GB, 1) == of_seven_and_a_half
    assert int(80 * GB / (state / profile.numel) / GB + 0.05) == largest


@pytest.mark.parametrize(
    ("precision", "moments", "bytes_a_parameter"),
    [
        (HALF_GRADIENTS, 8, 16),
        (Precision(compute="bf16"), 8, 18),
        (Precision(compute="fp16"), 8, 18),
        (Precision(), 8, 16),
        (Precision(), 4, 12),
        (Precision(), 0, 8),
    ],
)
def test_bytes_of_a_parameter_at_stage_0(precision: Precision, moments: int, bytes_a_parameter: int) -> None:
    profile = make_profile(1_000_000, root=1_000_000, compute=precision.compute)
    plan = make_plan("nothing", 4, precision=precision)
    memory = predict_memory(plan, profile, optimizer_bytes_per_parameter=moments)
    assert memory.state == pytest.approx(bytes_a_parameter * profile.numel, rel=1e-3)
    assert memory.total == memory.state + memory.gradient_buffers + memory.update


@pytest.mark.parametrize("shard", SHARDS)
def test_an_average_takes_what_a_master_takes(shard: str) -> None:
    """Each rank keeps the average of its own part, in float32 whatever the model computes in."""
    profile = make_profile(1600, 1600, root=3200, compute="bf16")
    plain, kept = (
        predict_memory(make_plan(shard, 2, precision=Precision(compute="bf16"), average=Average(decay=decay)), profile)
        for decay in (0.0, 0.5)
    )
    assert (plain.average, kept.average) == (0, 6400 * 4 // (1 if shard == "nothing" else 2))
    assert kept.total == plain.total + kept.average and kept.state == plain.state + kept.average


def test_an_average_of_16_bits_is_in_32() -> None:
    parameters = (ParameterSpec(name="root", shape=(1000,), dtype="bfloat16"),)
    plan = Plan(average=Average(decay=0.5))
    assert predict_memory(plan, ModelProfile(parameters=parameters, blocks=())).average == 4000


def test_each_category_of_every_stage() -> None:
    profile = make_profile(1600, 1600, root=3200, compute="bf16")
    found = {}
    for shard in SHARDS:
        memory = predict_memory(make_plan(shard, 2, precision=Precision(compute="bf16")), profile)
        found[shard] = (memory.parameters, memory.gradients, memory.master, memory.optimizer)
    assert found == {
        "nothing": (12800, 25600, 25600, 51200),
        "optimizer": (12800, 25600, 12800, 25600),
        "gradients": (12800, 12800, 12800, 25600),
        "parameters": (6400, 12800, 12800, 25600),
    }


def test_padding_is_counted() -> None:
    profile = make_profile(17, 1, root=3)
    memory = predict_memory(make_plan("parameters", 4), profile)
    assert memory.parameters == 3 * 16 * 4  # three units of 64 elements, of which a rank keeps 16
    assert predict_memory(make_plan("nothing", 4), profile).parameters == 21 * 4


def test_frozen_parameters_and_those_that_keep_their_dtype() -> None:
    profile = ModelProfile(
        parameters=(
            ParameterSpec(name="frozen", shape=(64,), trainable=False),
            ParameterSpec(name="norm", shape=(64,), keeps_dtype=True),
            ParameterSpec(name="weight", shape=(4, 16)),
        ),
        compute="bf16",
    )
    for shard, parameters in (("nothing", 64 * (2 + 4 + 2)), ("parameters", 32 * (2 + 4 + 2))):
        memory = predict_memory(make_plan(shard, 2, precision=Precision(compute="bf16")), profile)
        part = 64 if shard == "nothing" else 32
        assert memory.parameters == parameters
        assert memory.gradients == 2 * part * 4
        assert memory.master == part * 4
        assert memory.optimizer == 2 * part * 8


def test_a_wider_model_keeps_its_width() -> None:
    wide = ParameterSpec(name="w", shape=(64,), dtype="float64")
    memory = predict_memory(make_plan("optimizer", 2), ModelProfile(parameters=(wide,)))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (64 * 8, 64 * 8, 32 * 16)


PASSING = (Segment(name="prelude"), *[Segment(name=f"blocks.{n}") for n in range(4)], Segment(name="postlude"))


def test_stage_3_gathers_the_root_and_two_blocks() -> None:
    profile = make_profile(1600, 3200, 4800, 1600, root=6400, segments=PASSING)
    memory = predict_memory(make_plan("parameters", 2), profile, one_host=False)
    assert memory.gathered == 4 * (6400 + 3200 + 4800)
    assert memory.moment == "forward of blocks.1"
    for reshard, gathered in (("step", sum((1600, 3200, 4800, 1600, 6400))), ("microbatch", 6400 + 3200 + 4800)):
        plan = Plan(axes=Axes(data=2), data=Data(shard="parameters", reshard=reshard), step=Step(microbatches=2))
        assert predict_memory(plan, profile, one_host=False).gathered == 4 * gathered
    assert predict_memory(make_plan("gradients", 2), profile, one_host=False).gathered == 0


def test_ranks_that_share_memory_have_one_copy_and_receive_nothing() -> None:
    profile = make_profile(*[1600] * 4, root=6400, segments=PASSING)
    sockets = Comm(transport="c10d")
    for shard in ("optimizer", "gradients", "parameters"):
        shared, apart = (
            predict_memory(make_plan(shard, 2), profile),
            predict_memory(make_plan(shard, 2, comm=sockets), profile),
        )
        assert shared.state == apart.state and shared.gathered == 0
        assert shared.gradient_buffers < apart.gradient_buffers
        assert predict_memory(make_plan(shard, 2), profile, one_host=False) == apart
    assert apart.gathered == 4 * (6400 + 1600 + 1600)
    assert shared.gradient_buffers == 4 * (3 * 1600 + 6400)


def test_buffers_of_gradients_on_their_way() -> None:
    """Of each unit: its gradient and as much to receive into. Two are under way while a third fills."""
    profile = make_profile(*[1600] * 5, root=6400, segments=())
    block, root = 4 * 1600, 4 * 6400

    def buffers(shard: str, data: int = 2, **sections: Any) -> int:
        return predict_memory(make_plan(shard, data, **sections), profile, one_host=False).gradient_buffers

    assert buffers("parameters") == 5 * block + 2 * root
    one_each = Comm(bucket_bytes=1)
    assert buffers("gradients", comm=one_each) == 5 * block + 2 * root
    assert buffers("optimizer", comm=one_each) == 2 * block + root  # whole gradients are kept anyway
    assert buffers("nothing") == 0
    # Stage 3 that keeps gradients whole over microbatches borrows all of them.
    assert buffers("parameters", step=Step(microbatches=2)) == 5 * block + root + 2 * block + root
    # What adds up in float32 and travels in bfloat16 is copied.
    narrow = Precision(reduce="bf16")
    assert buffers("optimizer", comm=one_each, precision=narrow) == 2 * (2 * block + root) // 2
    assert buffers("nothing", precision=narrow) == profile.numel * 2
    # On a GPU the collective has its own ways to receive.
    on_gpu = make_profile(*[1600] * 5, root=6400, device="cuda")
    assert predict_memory(make_plan("parameters", 2), on_gpu).gradient_buffers == 3 * block + root


def test_buffers_of_about_one_size_are_used_for_each_other() -> None:
    """Else buckets of ever so slightly different sizes would end up as a second copy of all gradients."""
    profile = make_profile(*range(1600, 1600 + 16 * 20, 16), root=1600, segments=())
    plan = make_plan("gradients", 2, comm=Comm(bucket_bytes=1))
    uneven = predict_memory(plan, profile, one_host=False).gradient_buffers
    assert 5 * 4 * 1600 < uneven <= 5 * 4 * (1600 + 16 * 20)


def make_segments() -> tuple[Segment, ...]:
    block = {
        "saved": Size(sample_bytes=100),
        "selective": Size(sample_bytes=40),
        "inputs": Size(sample_bytes=10),
        "forward_peak": Size(sample_bytes=120),
        "backward_peak": Size(fixed_bytes=7, sample_bytes=30),
    }
    return (
        Segment(
            name="prelude", saved=Size(sample_bytes=5), selective=Size(sample_bytes=5), inputs=Size(sample_bytes=5)
        ),
        Segment(name="a", **block),
        Segment(name="b", **block),
        Segment(name="postlude", backward_peak=Size(sample_bytes=20)),
    )


@pytest.mark.parametrize(
    ("policy", "moment", "activations", "workspace"),
    [
        ("none", "backward of b", 205, 37),
        ("selective", "backward of b", 85, 60 + 37),
        ("full", "backward of b", 25, 90 + 37),
    ],
)
def test_activations_of_a_policy(policy: str, moment: str, activations: int, workspace: int) -> None:
    """What is kept before the fullest segment, all that it saves, and what it needs besides."""
    profile = make_profile(0, 0, segments=make_segments())
    memory = predict_memory(Plan(recompute=Recompute(policy=policy)), profile)
    assert (memory.moment, memory.activations, memory.workspace) == (moment, activations, workspace)


def test_activations_follow_the_samples_of_a_microbatch() -> None:
    profile = make_profile(0, 0, segments=make_segments(), batch=Size(sample_bytes=1), samples=2)
    plan = Plan(step=Step(microbatches=3))
    assert predict_memory(plan, profile).activations == 2 * 205 + 3 * 2
    memory = predict_memory(plan, profile, microbatch_samples=10)
    assert memory.activations == 10 * 205 + 3 * 10
    assert memory.workspace == 7 + 300


def test_the_update_is_a_moment_of_its_own() -> None:
    profile = make_profile(1600, root=6400, compute="bf16", segments=make_segments()[1:])
    plan = make_plan("optimizer", 2, precision=HALF_GRADIENTS)
    memory = predict_memory(plan, profile)
    casts, largest = 4 * 4000, 4 * 4000
    assert (memory.moment, memory.update) == ("update", casts + 2 * largest)
    assert (memory.activations, memory.gathered) == (0, 0)
    assert predict_memory(plan, profile, update_bytes_per_parameter=0).update == casts
    on_gpu = make_profile(1600, root=6400, device="cuda")
    assert predict_memory(make_plan("nothing", 2), on_gpu).update == 4 * 8000
    assert predict_memory(make_plan("nothing", 2), on_gpu, update_bytes_per_parameter=0).update == 0


def test_offloaded_state_is_counted_apart() -> None:
    profile = make_profile(3200, compute="bf16", device="cuda")
    plan = Plan(axes=Axes(data=2), data=Data(shard="optimizer", offload=True), precision=Precision(compute="bf16"))
    memory = predict_memory(plan, profile)
    assert (memory.master, memory.optimizer, memory.update) == (0, 0, 0)
    assert memory.host == 1600 * (4 + 8 + 4)  # master, moments, gradients
    assert memory.communicators == 2 * COMMUNICATOR_BYTES  # gradients, parameters
    assert memory.total == 3200 * (2 + 4) + memory.communicators
    on_host = predict_memory(plan, make_profile(3200, compute="bf16"))
    assert (on_host.host, on_host.master) == (0, 1600 * 4)


LOCAL = Data(sync="local", every=2)
DILOCO = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)


@pytest.mark.parametrize(
    ("data", "codec", "copies", "buffer_bytes"),
    [
        (LOCAL, "none", 0, 2 * 4 * 1600),
        (DILOCO, "none", 2, 2 * 4 * 1600),
        (LOCAL, "half", 1, 2 * 4 * 1600 + 2 * 1600),
        (DILOCO, "half", 2, 2 * 4 * 1600 + 2 * 1600),
    ],
)
def test_replicas_that_differ_keep_anchor_and_momentum(data: Data, codec: str, copies: int, buffer_bytes: int) -> None:
    """Two buckets are under way at a time; with a codec the values of two, and the message of one."""
    profile = make_profile(1600, 1600, root=800)
    plan = Plan(axes=Axes(data=4), data=data, codec=Codec(name=codec), comm=Comm(bucket_bytes=1))
    memory, plain = predict_memory(plan, profile), predict_memory(Plan(), profile)
    assert (memory.outer, memory.exchange_buffers) == (copies * 4 * 4000, buffer_bytes)
    assert memory.state == plain.state + memory.outer
    assert memory.gradient_buffers == 0


def test_outer_state_is_sharded_like_the_weights_and_offloaded_with_them() -> None:
    profile = make_profile(1600, root=1600)
    plan = Plan(axes=Axes(replicate=2, data=4), data=dataclasses.replace(DILOCO, shard="parameters"))
    assert predict_memory(plan, profile).outer == 2 * 4 * 3200 // 4
    offloaded = dataclasses.replace(plan, data=dataclasses.replace(plan.data, offload=True))
    on_gpu = make_profile(1600, root=1600, device="cuda")
    kept, moved = predict_memory(plan, on_gpu), predict_memory(offloaded, on_gpu)
    assert (kept.outer, moved.outer) == (6400, 0)
    assert moved.host == 800 * (4 + 8 + 4) + 6400  # master, moments, gradients; anchor and momentum


def test_an_exchange_is_a_moment_of_its_own() -> None:
    profile = make_profile(160_000)
    plan = Plan(axes=Axes(data=2), data=DILOCO)
    memory = predict_memory(plan, profile, update_bytes_per_parameter=0)
    assert (memory.moment, memory.update) == ("exchange", 2 * 4 * 160_000)
    plan = Plan(axes=Axes(data=2), data=LOCAL)
    assert predict_memory(plan, profile, update_bytes_per_parameter=0).update == 4 * 160_000


def test_replicas_share_nothing() -> None:
    profile = make_profile(3200)
    plan = Plan(axes=Axes(data=2, replicate=4), data=Data(shard="parameters"))
    assert predict_memory(plan, profile).state == predict_memory(make_plan("parameters", 2), profile).state


def test_plans_that_cannot_be_predicted() -> None:
    plan = Plan(axes=Axes(tensor=2, pipeline=2), precision=Precision(compute="bf16"))
    with pytest.raises(PlanError) as caught:
        predict_memory(plan, make_profile(16))
    assert len(caught.value.problems) == 3
    assert 'profile the model again with compute = "bf16"' in str(caught.value)


def test_a_table_for_people() -> None:
    table = Memory(moment="update", parameters=1 << 20, update=3 << 20, host=5 << 30).table()
    assert [line.split("  ")[0] for line in table.splitlines()] == ["parameters", "update", "total", "on the host"]
    assert "4.0 MiB" in table
    assert "at its peak: update" in table
