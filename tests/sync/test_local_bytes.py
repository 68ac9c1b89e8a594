"""The bytes that an exchange between replicas sends equal what `plan/exchange/weight_exchange.py` predicts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from oracle import Batch, cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import nn

from weft.parallel.state.batchnorm import running_statistics
from weft.plan.exchange.weight_exchange import Weight, exchange_buckets, exchange_bytes, kept_weights
from weft.plan.late_merges import exchanges_after
from weft.plan.plan import Axes, Codec, Comm, Data, Plan, Precision
from weft.sync.delayed import DelayedSync
from weft.sync.local import LocalSync
from weft.training.exchanged_bytes import weight_buckets_of
from weft.training.trainer import Trainer

LOCAL = Data(sync="local", every=2, check_every=0)
DILOCO = replace(LOCAL, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
HALF = Codec(name="half")


def predicted_bytes(trainer: Trainer) -> int:
    """From the plan and the shapes alone, without the sync's buckets."""
    plan, sync = trainer.plan, trainer.sync
    if sync.flats:
        weights = kept_weights([flat.buffer for flat in sync.flats], trainer.mesh.state_group("gradients").index)
    else:
        weights = [
            Weight(numel=one.numel(), dtype=str(one.dtype).removeprefix("torch."), name=name, shape=tuple(one.shape))
            for name, one in trainer.model.named_parameters()
            if one.requires_grad
        ]
    assert [weight.numel for weight in weights] == [piece.tensor.numel() for piece in sync.pieces]
    num_statistics = sum(one.numel() for one in running_statistics(trainer.model))
    buckets = exchange_buckets(weights, plan.comm.bucket_bytes, plan.codec)
    return exchange_bytes(buckets, plan, num_statistics=num_statistics)


def check_bytes(model: nn.Module, plan: Plan, batch: Batch) -> int:
    """Two exchanges and the steps between them; returns the bytes of one."""
    trainer = make_trainer(model, plan, example=batch[0][:1])
    assert isinstance(trainer.sync, LocalSync) and plan.replica_axis is not None
    expected = predicted_bytes(trainer)
    for step in range(1, 5):
        before = trainer.mesh.traffic[plan.replica_axis].sent_bytes
        trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
        sent = trainer.mesh.traffic[plan.replica_axis].sent_bytes - before
        assert sent == (expected if exchanges_after(plan.data, step) else 0), f"step {step}"
    return expected


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 26214400])
@pytest.mark.parametrize(("data", "codec"), [(LOCAL, Codec()), (DILOCO, Codec()), (DILOCO, HALF)])
def test_an_exchange_sends_what_is_predicted(data: Data, codec: Codec, bucket_bytes: int) -> None:
    model = small_gpt()
    plan = Plan(axes=Axes(data=2), data=data, codec=codec, comm=Comm(bucket_bytes=bucket_bytes))
    numel = sum(parameter.numel() for parameter in model.parameters())
    # Each of two replicas sends all it has: 4 bytes per weight, or 2; and two words of each in float64.
    assert check_bytes(model, plan, token_batch(4)) == numel * (2 if codec.name == "half" else 4) + 32


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("codec", [Codec(), HALF, Codec(name="onebit", dense_below=100)], ids=lambda one: one.name)
@pytest.mark.parametrize("delay", [1, 3])
def test_exchanges_under_way_send_what_is_predicted_once_all_have_arrived(delay: int, codec: Codec) -> None:
    plan = Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=delay, check_every=0), codec=codec)
    trainer = make_trainer(small_gpt(), plan)
    assert isinstance(trainer.sync, DelayedSync)
    expected, before = predicted_bytes(trainer), trainer.mesh.traffic["data"].sent_bytes
    for _ in range(5):
        trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])
    trainer.sync.drain()
    assert trainer.mesh.traffic["data"].sent_bytes - before == 5 * expected


@ranks(2)
def test_statistics_travel_beside_weights() -> None:
    model = small_convnet()
    images, classes = image_batch(8)
    sent = check_bytes(model, Plan(axes=Axes(data=2), data=LOCAL, codec=HALF), (images.float(), classes))
    statistics = sum(one.numel() for one in running_statistics(model))
    assert sent == 2 * sum(parameter.numel() for parameter in model.parameters()) + 8 * statistics + 32
    assert statistics > 0


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(axes=Axes(replicate=2, data=2), data=replace(LOCAL, shard="optimizer"), comm=Comm(bucket_bytes=2000)),
        Plan(axes=Axes(replicate=2, data=2), data=replace(DILOCO, shard="parameters"), codec=HALF),
        Plan(axes=Axes(data=2, tensor=2), data=DILOCO, codec=HALF),
        Plan(axes=Axes(data=2, pipeline=2), data=LOCAL),
        Plan(axes=Axes(data=4), data=LOCAL, precision=Precision(compute="bf16")),
    ],
    ids=["zero-1", "zero-3", "tensor", "pipeline", "masters"],
)
def test_an_exchange_of_parts_sends_parts(plan: Plan) -> None:
    model = small_gpt(num_layers=2)
    whole = sum(parameter.numel() for parameter in model.parameters())
    sent = check_bytes(model, plan, token_batch(8))
    num_parts = math.prod(plan.axes.sizes.values()) // plan.num_replicas
    dense = 2 * whole * (2 if plan.codec.name == "half" else 4) * (plan.num_replicas - 1) / plan.num_replicas
    # A part: exactly one of equal parts, or what tensor ranks and stages do not hold twice.
    assert dense / num_parts * 0.7 < sent < dense * (1 if num_parts == 1 else 0.8) + 97


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("codec", ["none", "topk"])
def test_a_fragment_sends_its_own_bytes(codec: str, delay: int) -> None:
    data = replace(DILOCO, every=4, fragments=2, delay=delay, switch_step=1)
    section = Codec(name=codec, **({"density": 0.1, "dense_below": 100} if codec == "topk" else {}))
    plan = Plan(axes=Axes(data=2), data=data, codec=section, comm=Comm(bucket_bytes=4000))
    trainer = make_trainer(small_gpt(num_layers=3), plan)
    buckets = weight_buckets_of(trainer.sync, trainer.mesh)
    found = []
    for step in range(9):
        before = trainer.mesh.traffic["data"].sent_bytes
        trainer.step(*cut_evenly(token_batch(4, seed=step), 2)[trainer.data_rank])
        trainer.sync.drain()
        found.append(trainer.mesh.traffic["data"].sent_bytes - before)
    expected = [exchange_bytes(buckets, plan, step=s) if exchanges_after(data, s + 1) else 0 for s in range(9)]
    assert found == expected and [one > 0 for one in expected] == [True, False, True, False, True] + 2 * [False, True]
    assert len(set(expected)) > 2, "fragments differ"


def test_16_bit_weights_are_summed_in_32() -> None:
    weights = [Weight(numel=10, dtype="bfloat16"), Weight(numel=0, dtype="float32"), Weight(numel=3, dtype="float32")]
    first, second = exchange_buckets(weights, 1000)
    assert (first.members, first.numel, first.dtype, first.num_bytes) == ((0,), 10, "float32", 40)
    assert (second.members, second.numel, second.dtype) == ((2,), 3, "float32")
    plan = Plan(axes=Axes(data=4), data=LOCAL)
    assert exchange_bytes([first, second], plan) == 60 + 18 + 96
    assert exchange_bytes([first, second], plan, num_statistics=2) == 60 + 18 + 24 + 96
    halved = exchange_buckets(weights, 1000, HALF)
    assert exchange_bytes(halved, replace(plan, codec=HALF)) == 30 + 9 + 96
    assert exchange_bytes([first, second], replace(plan, axes=Axes(data=1))) == 0
