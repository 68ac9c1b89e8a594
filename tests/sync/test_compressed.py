"""Gradients through codecs: exact where a codec loses nothing, one order of exchanges, no trace of a skipped step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from oracle import MLP, MakeOptimizer, batch_of, batches_of, cut_evenly, make_trainer, small_gpt, token_batch
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.errors import PlanError
from weft.plan.plan import Axes, Codec, Comm, Data, Pipeline, Plan, Precision, Step
from weft.training.trainer import Trainer

MOMENTUM: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ALL = Codec(name="topk", density=1.0, dense_below=1)
STATEFUL = {
    "topk": Codec(name="topk", density=0.1, dense_below=1),
    "dgc": Codec(name="dgc", density=0.1, dense_below=1),
    "onebit": Codec(name="onebit", dense_below=1),
    "powersgd": Codec(name="powersgd", rank=1, dense_below=1),
    "qsgd": Codec(name="qsgd", levels=16, dense_below=1),
}


def weights_after(model: nn.Module, plan: Plan, *, num_steps: int = 3, **settings: Any) -> dict[str, Tensor]:
    """This rank's pieces after some steps on tokens."""
    batches = [token_batch(8, seed=step) for step in range(num_steps)]
    with make_trainer(model, plan, optimizer=MOMENTUM, example=batches[0][0][:2], **settings) as trainer:
        for batch in batches:
            trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
        return {piece.name: piece.tensor.detach().clone() for piece in trainer.sync.pieces}


PLANS = {
    "data": Plan(axes=Axes(data=4)),
    "many buckets": Plan(axes=Axes(data=4), comm=Comm(bucket_bytes=1)),
    "microbatches": Plan(axes=Axes(data=4), step=Step(microbatches=2)),
    "tensor": Plan(axes=Axes(data=2, tensor=2)),
    "split tokens": Plan(axes=Axes(data=2, ring=2)),
    "pipeline": Plan(axes=Axes(data=2, pipeline=2), step=Step(microbatches=2), pipeline=Pipeline(cuts=(1,))),
    "zero-1": Plan(axes=Axes(replicate=2, data=2), data=Data(shard="optimizer"), comm=Comm(bucket_bytes=4000)),
    "zero-2": Plan(axes=Axes(replicate=2, data=2), data=Data(shard="gradients"), step=Step(microbatches=2)),
    "zero-3": Plan(axes=Axes(replicate=2, data=2), data=Data(shard="parameters")),
    "local": Plan(axes=Axes(data=4), data=Data(sync="local", every=2)),
    "local of zero-1": Plan(axes=Axes(replicate=2, data=2), data=Data(sync="local", every=2, shard="optimizer")),
}

SHORT = ("many buckets", "zero-1", "local")
"""The others run with the long tests."""


@pytest.mark.sampled(2, long=3)
@ranks(4)
@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=() if name in SHORT else pytest.mark.long) for name, plan in PLANS.items()],
)
def test_a_codec_that_sends_everything_changes_nothing(plan: Plan) -> None:
    torch.manual_seed(0)
    dense = weights_after(small_gpt().double(), plan)
    torch.manual_seed(0)
    mine = weights_after(small_gpt().double(), dataclasses.replace(plan, codec=ALL))
    for name, weight in dense.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@ranks(4)
def test_everything_may_also_be_sent_in_bf16_steps() -> None:
    plan = Plan(axes=Axes(data=4), precision=Precision(compute="bf16"))
    torch.manual_seed(0)
    dense = weights_after(small_gpt().float(), plan, num_steps=1)
    torch.manual_seed(0)
    mine = weights_after(small_gpt().float(), dataclasses.replace(plan, codec=ALL), num_steps=1)
    for name, weight in dense.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-6, atol=1e-7)


def kept(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.sync.compressed is not None
    return {name: tensor.clone() for name, tensor in trainer.sync.compressed.tensors().items()}


@pytest.mark.sampled(3, long=3)
@ranks(4)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "data") for name in STATEFUL),
        ("topk", "tensor"),
        *(
            pytest.param(name, shape, marks=pytest.mark.long)
            for name in STATEFUL
            for shape in ("hybrid", "tensor")
            if (name, shape) != ("topk", "tensor")
        ),
    ],
)
def test_a_gradient_that_is_not_finite_leaves_no_trace(name: str, shape: str) -> None:
    """One rank's gradient is not finite: all ranks skip the step, and none changes what its codec keeps."""
    axes, data = {
        "data": (Axes(data=4), Data()),
        "hybrid": (Axes(replicate=2, data=2), Data(shard="optimizer")),
        "tensor": (Axes(data=2, tensor=2), Data()),
    }[shape]
    torch.manual_seed(0)
    plan, example = Plan(axes=axes, data=data, codec=STATEFUL[name]), token_batch(2)[0]
    with make_trainer(small_gpt().float(), plan, optimizer=MOMENTUM, example=example) as trainer:

        def step(seed: int) -> None:
            trainer.step(*cut_evenly(token_batch(8, seed=seed), trainer.data_size)[trainer.data_rank])

        step(0)
        step(1)
        before, weights = kept(trainer), [piece.tensor.detach().clone() for piece in trainer.sync.pieces]
        assert name == "qsgd" or any(tensor.any() for tensor in before.values())
        spoil = trainer.mesh.world.rank == 1
        target = next(one for one in trainer.named_model.parameters() if one.dim() == 2 and one.requires_grad)
        hook = target.register_hook(lambda gradient: gradient * math.inf if spoil else gradient)
        step(2)
        hook.remove()
        assert trainer.num_skipped == 1
        after = kept(trainer)
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        now = [piece.tensor.detach() for piece in trainer.sync.pieces]
        assert all(torch.equal(mine, old) for mine, old in zip(now, weights, strict=True))
        step(3)
        assert trainer.num_skipped == 1
        changed = kept(trainer)
        assert not changed or any(not torch.equal(changed[key], tensor) for key, tensor in before.items())
        assert all(bool(tensor.isfinite().all()) for tensor in changed.values())


@pytest.mark.sampled(2)
@ranks(3)
@pytest.mark.parametrize("name", ["powersgd", "topk", "onebit"])
def test_many_buckets_come_in_one_order(name: str) -> None:
    """One bucket per tensor, ranks that become ready at different times, and two messages per bucket."""
    plan = Plan(axes=Axes(data=3), codec=STATEFUL[name], comm=Comm(bucket_bytes=1))
    torch.manual_seed(0)
    with make_trainer(small_gpt().float(), plan, optimizer=MOMENTUM) as trainer:
        for step in range(6):
            trainer.step(*cut_evenly(token_batch(6, seed=step), 3)[trainer.data_rank])
        weights = gathered([float(piece.tensor.detach().double().sum()) for piece in trainer.sync.pieces])
    assert weights[0] == weights[1] == weights[2]


@ranks(4)
@pytest.mark.parametrize("compute", ["model", "bf16"])
def test_a_layer_that_one_rank_of_a_sequence_does_not_use_stops_no_other(compute: str) -> None:
    """Its gradients are ready only after the backward pass, in which attention exchanges with the other rank."""
    precision, batch = Precision(compute=compute), token_batch(8)
    plan = Plan(axes=Axes(data=2, ring=2), comm=Comm(bucket_bytes=1), precision=precision)
    weights = []
    for codec in (Codec(), ALL):
        torch.manual_seed(0)
        model = small_gpt() if compute == "bf16" else small_gpt().double()
        made = dataclasses.replace(plan, codec=codec)
        with make_trainer(model, made, optimizer=MOMENTUM, example=batch[0][:2]) as trainer:
            if trainer.mesh.index("ring") == 1:
                trainer.model.get_submodule("blocks.1.mlp").forward = lambda x: x * 0
            for _ in range(3):
                trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
            weights.append([piece.tensor.detach().clone() for piece in trainer.sync.pieces])
    for dense, mine in zip(*weights, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_buckets_that_are_laid_out_anew_keep_their_state() -> None:
    plan = Plan(axes=Axes(data=2), codec=STATEFUL["topk"])
    torch.manual_seed(0)
    with make_trainer(MLP(), plan, optimizer=MOMENTUM) as trainer:
        first, second = (cut_evenly(batch, 2)[trainer.data_rank] for batch in batches_of(8, 8))
        trainer.step(*first)
        before = kept(trainer)
        assert any(tensor.any() for tensor in before.values())
        trainer.sync.begin()  # the order of the first step is agreed on
        after = kept(trainer)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        trainer.step(*second)


@ranks(2)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_dgc_that_sends_everything_without_masking_is_momentum_sgd(weight_decay: float, nesterov: bool) -> None:
    """Momentum of compressed tensors by the codec, of biases and of the decay by the optimizer."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay)
    found = []
    for codec in (Codec(), Codec(name="dgc", density=1.0, masking=False, dense_below=1)):
        torch.manual_seed(0)
        with make_trainer(MLP(), Plan(axes=Axes(data=2), codec=codec), optimizer=optimizer) as trainer:
            for batch in batches_of(8, 8, 8, 8):
                trainer.step(*cut_evenly(batch, 2)[trainer.data_rank])
            found.append([piece.tensor.detach().clone() for piece in trainer.sync.pieces])
    for dense, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-10, atol=1e-12)


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks."""
    return torch.tensor(gathered(tensor.tolist()), dtype=torch.float64).sum(0)


@ranks(2)
@pytest.mark.parametrize("name", ["topk", "onebit", "powersgd"])
def test_nothing_is_lost_where_batches_have_other_sizes(name: str) -> None:
    """What is kept is a sum over targets: that of all gradients is that of all updates and of what is kept, each by the
    number of its targets."""
    sizes = (8, 6, 12, 4)
    torch.manual_seed(0)
    model, plan = MLP(), Plan(axes=Axes(data=2), codec=STATEFUL[name])
    alone, given, updated = MLP(), {}, {}
    with make_trainer(model, plan, optimizer=functools.partial(torch.optim.SGD, lr=1e-2)) as trainer:
        for batch, size in zip(batches_of(*sizes), sizes, strict=True):
            before = {key: value.clone() for key, value in model.state_dict().items()}
            alone.load_state_dict(before)
            alone.zero_grad()
            torch.nn.functional.cross_entropy(alone(batch[0]), batch[1]).backward()
            trainer.step(*cut_evenly(batch, 2)[trainer.data_rank])
            for key, parameter in alone.named_parameters():
                given[key] = given.get(key, 0) + size * parameter.grad
                updated[key] = updated.get(key, 0) + size * (before[key] - model.state_dict()[key]) / 1e-2
        rest = {key: summed(value) for key, value in kept(trainer).items()}
    for key, total in given.items():
        waiting = rest.get(f"residual/{key}", torch.zeros(()))
        # The last gradients were divided by the count of the step before.
        found = updated[key] + sizes[-2] * waiting.view_as(total) if waiting.dim() else updated[key]
        torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-10, msg=lambda text, k=key: f"{k}: {text}")


@ranks(2)
def test_local_clipping_is_by_the_norm_of_the_rank_alone() -> None:
    found = []
    for clip in (0.0, 1e-3):
        torch.manual_seed(0)
        plan = Plan(axes=Axes(data=2), codec=Codec(name="dgc", density=1.0, clip=clip, dense_below=1))
        with make_trainer(MLP(), plan, optimizer=functools.partial(torch.optim.SGD, lr=1.0)) as trainer:
            before = [piece.tensor.detach().clone() for piece in trainer.sync.pieces]
            trainer.step(*cut_evenly(batch_of(8), 2)[trainer.data_rank])
            found.append([old - piece.tensor.detach() for old, piece in zip(before, trainer.sync.pieces, strict=True)])
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in found[1]]))
    assert norm <= 1e-3 * math.sqrt(2) * 1.0001
    assert torch.linalg.vector_norm(torch.cat([one.flatten() for one in found[0]])) > 0.01


@pytest.mark.parametrize(
    ("codec", "optimizer", "words"),
    [
        (
            STATEFUL["dgc"],
            torch.optim.AdamW,
            "takes over the optimizer's momentum, and AdamW has moments",
        ),
        (STATEFUL["dgc"], torch.optim.RMSprop, "takes over the momentum of torch.optim.SGD"),
        (Codec(name="topk", density=1e-9, dense_below=1), torch.optim.SGD, "so nothing would be sent of any tensor"),
        (Codec(name="powersgd", rank=50, dense_below=1), torch.optim.SGD, "factors of [codec] rank = 50 would be no"),
        (Codec(name="onebit", dense_below=10**6), torch.optim.SGD, "and [codec] dense_below = 1000000"),
    ],
)
@ranks(2)
def test_bad_input_is_one_message(codec: Codec, optimizer: Any, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        make_trainer(MLP(), Plan(axes=Axes(data=2), codec=codec), optimizer=functools.partial(optimizer, lr=0.1))
    assert len(refusal.value.problems) == 1 and words in refusal.value.problems[0]
