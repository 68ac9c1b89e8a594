"""Plans that compress what replicas exchange: held to the codec's rule, computed by one process for all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from meshes import verify
from oracle import ADAMW, MakeOptimizer, image_batch, small_convnet, small_gpt, token_batch
from ranks import gathered, ranks
from torch import Tensor, nn

import weft
from weft.errors import PlanError
from weft.plan.plan import Average, Axes, Codec, Comm, Data, Plan, Precision, Step
from weft.plan.plan import Tensor as TensorSection
from weft.verification.compressed_replicas import CompressedReplicas, with_compression
from weft.verification.one_process import OneProcess
from weft.verification.oracles import rule_of
from weft.verification.replicas import LocalReplicas
from weft.verification.verdict import Verification

MOMENTUM: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.05},
    "dgc": {"density": 0.05},
    "onebit": {},
    "sign": {},
    "qsgd": {"levels": 16},
    "terngrad": {},
    "powersgd": {"rank": 2},
}
OF_CHANGES = [name for name in SETTINGS if name not in ("dgc", "sign")]


def codec(name: str, **settings: Any) -> Codec:
    return Codec(name=name, dense_below=64, **{**SETTINGS[name], **settings})


class Mixed(nn.Module):
    """Registered in another order than used, so that buckets change after the first step."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.last, self.middle, self.first = nn.Linear(24, 5), nn.Linear(32, 24), nn.Linear(16, 32)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4

    def forward(self, inputs: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


def vectors(size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 16, generator=generator).double(), torch.randint(5, (size,), generator=generator)


def check(
    plan: Plan,
    *sizes: int,
    model: nn.Module | None = None,
    make_batch: Any = vectors,
    optimizer: MakeOptimizer = MOMENTUM,
    loss: Any = "cross-entropy",
) -> Verification:
    batches = [make_batch(size, seed=seed) for seed, size in enumerate(sizes)]
    model = model or Mixed()
    outcome = verify(model, plan, loss=loss, optimizer=optimizer, batches=batches, device="cpu").require()
    assert outcome.first is None
    assert {one.name for one in outcome.differences if one.what == "gradient"} == set(dict(model.named_parameters()))
    if plan.replica_axis is None:
        assert outcome.rule == "one process that compresses for all replicas"
    assert len(set(gathered(str(outcome)))) == 1
    return outcome


def check_tokens(plan: Plan, *sizes: int, **settings: Any) -> Verification:
    return check(plan, *sizes, model=small_gpt(num_layers=2), make_batch=token_batch, **settings)


@ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in ("dgc", "powersgd"))) for name in SETTINGS]
)
def test_every_codec_follows_its_rule(name: str) -> None:
    """Unequal parts, in microbatches, in a number of targets that changes from step to step."""
    outcome = check(Plan(axes=Axes(data=2), codec=codec(name), step=Step(microbatches=2)), 7, 5, 9)
    deviation = outcome.deviation
    assert deviation is not None and deviation.against == "training without the codec in one process"
    assert deviation.movement is not None and 1e-3 < deviation.movement < 100


@ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_small_buckets_adamw_and_a_warm_up(name: str) -> None:
    plan = Plan(axes=Axes(data=2), codec=codec(name, warmup_steps=2), comm=Comm(bucket_bytes=999))
    check(plan, 8, 7, 8, 6, 8, optimizer=MOMENTUM if name == "dgc" else ADAMW)


@ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("settings", [{"clip": 0.01}, {"clip": 1.0}, {"masking": False}, {"memory": 0.5}, {"bits": 2}])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_its_rule_with_every_setting(settings: dict[str, Any], nesterov: bool) -> None:
    optimizer = functools.partial(MOMENTUM, nesterov=nesterov)
    check(Plan(axes=Axes(data=2), codec=codec("dgc", **settings)), 8, 5, 7, 8, optimizer=optimizer)


@ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("name, bits", [("topk", 8), ("topk", 2), ("dgc", 8)])
def test_values_of_few_bits(name: str, bits: int) -> None:
    check_tokens(Plan(axes=Axes(data=2), codec=codec(name, bits=bits)), 8, 7, 8, 6)


@pytest.mark.sampled(long=4)
@ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("name", OF_CHANGES)
@pytest.mark.parametrize("outer", [{}, {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}], ids=str)
def test_changes_of_weights(name: str, outer: dict[str, Any]) -> None:
    data = Data(sync="local", every=2, switch_step=1, **outer)
    plan = Plan(axes=Axes(data=2), data=data, codec=codec(name), average=Average(decay=0.5))
    outcome = check(plan, 8, 7, 8, 6, 8, optimizer=ADAMW)
    assert outcome.rule == "one process that plays all replicas"


@pytest.mark.sampled(long=9)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline", "ring", "ulysses"])
def test_every_rank_of_a_replica_compresses_its_own_part(name: str, axis: str) -> None:
    axes = {"data": 4} if axis == "data" else {"data": 2, axis: 2}
    check_tokens(Plan(axes=Axes(**axes), codec=codec(name), step=Step(microbatches=2)), 8, 7, 9)


@pytest.mark.sampled(long=6)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_every_rank_compresses_its_own_shard(name: str, shard: str) -> None:
    plan = Plan(axes=Axes(replicate=2, data=2), data=Data(shard=shard), codec=codec(name), step=Step(microbatches=2))
    check_tokens(plan, 8, 7, 9)


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("name", ["topk", "powersgd"])
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "ring", "sharded"])
def test_changes_of_weights_inside_a_replica(name: str, axis: str) -> None:
    axes, shard = ({"data": 2, axis: 2}, "nothing") if axis != "sharded" else ({"replicate": 2, "data": 2}, "gradients")
    plan = Plan(axes=Axes(**axes), data=Data(sync="local", every=2, shard=shard), codec=codec(name))
    check_tokens(plan, 8, 7, 9, 8)


@ranks(4)
@pytest.mark.long
def test_tokens_split_over_tensor_ranks() -> None:
    plan = Plan(axes=Axes(data=2, tensor=2), tensor=TensorSection(sequence=True), codec=codec("topk"))
    check_tokens(plan, 8, 7, 9)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("sync", ["all-reduce", "local"])
def test_rows_that_several_tensor_ranks_hold(sync: str) -> None:
    """One head of keys and values for both: their gradients are summed, so they travel as they are; changes of their
    weights would be compressed beside different queries, and are refused."""
    model = small_gpt(num_layers=2, kv_heads=1)
    plan = Plan(axes=Axes(data=2, tensor=2), data=Data(sync=sync), codec=codec("topk"))
    if sync == "all-reduce":
        check(plan, 8, 7, 9, model=model, make_batch=token_batch)
        return
    with pytest.raises(PlanError, match="copies of these rows would drift apart; set .axes. tensor to a divisor"):
        check(plan, 8, 7, model=model, make_batch=token_batch)


@ranks(4)
@pytest.mark.long
def test_slices_of_buckets_stay() -> None:
    """Layers are registered in the reverse order of their use."""
    model = small_gpt(num_layers=2, positions="learned", tied=False)
    modules = list(model._modules.items())
    model._modules.clear()
    model._modules.update(reversed(modules))
    check(Plan(axes=Axes(data=2, ring=2), codec=codec("topk")), 8, 7, 9, model=model, make_batch=token_batch)


@ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_batch_norms_of_the_whole_batch(name: str) -> None:
    """Statistics are of the whole batch, and a rank has one sample or none in some microbatches."""
    plan = Plan(axes=Axes(data=2), codec=codec(name), step=Step(microbatches=2))
    outcome = check(plan, 9, 3, 8, model=small_convnet(), make_batch=image_batch)
    assert any("running_var" in one.name for one in outcome.differences)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("axis", ["replicate", "ring", "pipeline"])
def test_batch_norms_of_the_whole_batch_inside_a_replica(axis: str) -> None:
    data = Data(shard="gradients" if axis == "replicate" else "nothing")
    plan = Plan(axes=Axes(**{"data": 2, axis: 2}), data=data, codec=codec("dgc"))  # type: ignore[arg-type]
    check(plan, 9, 6, 8, model=small_convnet(), make_batch=image_batch)


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.logsumexp(outputs @ weft.gather_batch(outputs).T, dim=1).mean()


@ranks(2)
@pytest.mark.long
def test_a_loss_that_gathers_the_batch() -> None:
    check(Plan(axes=Axes(data=2), codec=codec("topk")), 8, 7, 8, loss=contrast)


@ranks(2)
@pytest.mark.long
def test_16_bits_are_measured_without_the_codec() -> None:
    plan = Plan(axes=Axes(data=2), codec=codec("topk"), precision=Precision(compute="bf16"))
    outcome = check(plan, 8, 7, 8)
    deviation = outcome.deviation
    assert deviation is not None and deviation.against == "one process in float32"
    assert deviation.gradient is not None and 0 < deviation.gradient < 0.1
    assert "deviation from training without the codec in one process" in outcome.notes[-1]


def test_few_steps_show_compression_all_the_same() -> None:
    def shown(warmup_steps: int, num_steps: int) -> tuple[int, list[str]]:
        plan, notes = with_compression(Plan(codec=codec("topk", warmup_steps=warmup_steps)), num_steps=num_steps)
        return plan.codec.warmup_steps, notes

    assert shown(500, 3) == (1, ["the codec's warm-up was cut from 500 steps to 1, to be over in 3 steps"])
    assert shown(500, 2)[0] == 0 and shown(2, 3)[0] == 1 and len(shown(2, 3)[1]) == 1
    assert shown(2, 4) == (2, []) and shown(1, 3) == (1, []) and shown(0, 1) == (0, [])


def test_one_replica_compresses_nothing() -> None:
    assert rule_of(Plan(codec=codec("topk"))) is OneProcess
    assert rule_of(Plan(axes=Axes(data=2), codec=codec("topk"))) is CompressedReplicas
    assert rule_of(Plan(axes=Axes(data=2), codec=codec("topk"), data=Data(sync="local"))) is LocalReplicas
