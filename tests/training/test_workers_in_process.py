"""Data ranks of a plan with a codec in one process against real ranks under the same plan; and what is refused there.

Every replica of the other kind, with weights of its own, is in `test_replicas_in_process.py`; with codecs these are
compared here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from pretend_gpu import no_waits, pretended_gpu
from ranks import ranks
from torch import Tensor, nn

import weft
from weft.errors import DataError, PlanError
from weft.plan.plan import Axes, Codec, Data, Plan, Precision, Step
from weft.training.parallelize import parallelize
from weft.training.replicas_in_process import ReplicasInProcess
from weft.training.step import update
from weft.training.trainer import Trainer
from weft.training.workers_in_process import WorkersInProcess

pytestmark = pytest.mark.long

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
NUM_STEPS = 20
SMALL = 64
"""Elements from which tensors are compressed here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A codec, and what it is trained with."""

    codec: dict[str, Any]
    data: Data = Data()
    step: Step = Step(clip_norm=0.5)
    compute: str = "model"
    model: Callable[[], nn.Module] = functools.partial(small_gpt, dropout=0.2)
    optimizer: Any = ADAMW

    def plan(self, num_ranks: int) -> Plan:
        return Plan(
            axes=Axes(data=num_ranks),
            data=self.data,
            step=self.step,
            precision=Precision(compute=self.compute),
            codec=Codec(**{"dense_below": SMALL, **self.codec}),
        )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Of 8 samples; in every third step one part is shorter, in one it is empty, so that counts differ."""
        make = image_batch if self.model is broadcast_convnet else token_batch
        inputs, targets = make(1 if step == 7 else 7 if step % 3 == 0 else 8, seed=step)
        return inputs.float() if inputs.is_floating_point() else inputs, targets


def broadcast_convnet() -> nn.Module:
    return small_convnet()


LOCAL = {"sync": "local", "every": 3, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
CASES = {
    "topk": Case(codec={"name": "topk", "density": 0.05}),
    "dgc": Case(
        codec={"name": "dgc", "density": 0.05, "clip": 0.1, "warmup_steps": 8},
        step=Step(microbatches=2),
        optimizer=functools.partial(MOMENTUM, nesterov=True),
    ),
    "powersgd": Case(codec={"name": "powersgd", "rank": 2}),
    "onebit": Case(codec={"name": "onebit", "warmup_steps": 3}, step=Step(microbatches=2)),
    "qsgd": Case(codec={"name": "qsgd", "levels": 16}),
    "terngrad": Case(codec={"name": "terngrad"}),
    "sign": Case(codec={"name": "sign"}, step=Step()),
    "topk, bf16": Case(codec={"name": "topk", "density": 0.05, "bits": 8}, compute="bf16"),
    "BatchNorm": Case(
        codec={"name": "topk", "density": 0.1},
        data=Data(buffers="broadcast"),
        model=broadcast_convnet,
        optimizer=MOMENTUM,
    ),
    "local topk": Case(codec={"name": "topk", "density": 0.1, "bits": 2, "memory": 0.95}, data=Data(**LOCAL)),
    "local onebit": Case(codec={"name": "onebit"}, data=Data(**LOCAL)),
    "local powersgd": Case(codec={"name": "powersgd", "rank": 1}, data=Data(**LOCAL)),
}
QUICK = ("topk", "dgc", "local powersgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What one process gave: losses and weights, of every replica where these differ."""

    losses: list[list[float]]
    weights: list[dict[str, Tensor]]
    kept: list[dict[str, Tensor]]
    """What each worker's codecs keep."""
    held_out: float


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.flush()
    return {name: tensor.detach().clone() for name, tensor in trainer.named_model.state_dict().items()}


def kept_of(sync: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in sync.compressed.tensors().items()}


def make(case: Case, num_ranks: int, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"loss": "cross-entropy", "optimizer": case.optimizer, "device": "cpu", **changes}
    trainer = parallelize(case.model(), case.plan(num_ranks), replicas_in_process=True, **given)
    torch.manual_seed(1)
    return trainer


def play(case: Case, num_ranks: int) -> Played:
    trainer = make(case, num_ranks)
    losses = []
    for step in range(NUM_STEPS):
        loss = float(trainer.step(*case.batch(step)))
        own = [float(one) for one in trainer.replica_losses] if isinstance(trainer, ReplicasInProcess) else [loss]
        losses.append(own)
    held_out = trainer.evaluate([case.batch(100), case.batch(101)])
    if isinstance(trainer, WorkersInProcess):
        kept = [{name: one.clone() for name, one in exchange.tensors().items()} for exchange in trainer.sync.exchanges]
        return Played(losses=losses, weights=[weights_of(trainer)] * num_ranks, kept=kept, held_out=held_out)
    assert isinstance(trainer, ReplicasInProcess)
    return Played(
        losses=losses,
        weights=[weights_of(one) for one in trainer.replicas],
        kept=[kept_of(one.sync) for one in trainer.replicas],
        held_out=held_out,
    )


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Played:
    """Of the case of this test, in pytest's own process."""
    return play(CASES[request.getfixturevalue("name")], request.getfixturevalue("num_ranks"))


def compare(case: Case, num_ranks: int, played: Played, *, tolerance: float) -> None:
    """Train by this rank, and compare with what one process gave."""
    torch.manual_seed(0)
    trainer = make_trainer(case.model(), case.plan(num_ranks), optimizer=case.optimizer)
    torch.manual_seed(1)
    rank = trainer.data_rank
    for step in range(NUM_STEPS):
        batch = cut_evenly(case.batch(step), num_ranks)[rank]
        loss, expected = float(trainer.step(*batch)), played.losses[step]
        if case.data.sync == "all-reduce":
            assert loss == pytest.approx(expected[0], rel=1e-6), f"step {step}"
        elif len(batch[0]):
            assert loss == pytest.approx(expected[rank], rel=tolerance, abs=0), f"step {step}"
    for name, tensor in weights_of(trainer).items():
        torch.testing.assert_close(tensor, played.weights[rank][name], rtol=tolerance, atol=tolerance, msg=name)
    kept = kept_of(trainer.sync)
    assert sorted(kept) == sorted(played.kept[rank])
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, played.kept[rank][name], rtol=tolerance, atol=tolerance, msg=name)
    parts = [cut_evenly(case.batch(number), num_ranks)[rank] for number in (100, 101)]
    assert trainer.evaluate(parts) == pytest.approx(played.held_out, rel=1e-6)


def slow_unless_quick(quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize("num_ranks", [2], ids=[""])
@pytest.mark.parametrize("name", slow_unless_quick(QUICK))
def test_two_ranks_in_process_equal_two_ranks_to_the_bit(name: str, num_ranks: int, played: Played) -> None:
    compare(CASES[name], num_ranks, played, tolerance=0)


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.parametrize("num_ranks", [4], ids=[""])
@pytest.mark.parametrize("name", slow_unless_quick(()))
def test_four_ranks_in_process_equal_four_ranks(name: str, num_ranks: int, played: Played) -> None:
    compare(CASES[name], num_ranks, played, tolerance=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing_of_any_worker() -> None:
    case = Case(codec={"name": "topk", "density": 0.05}, model=small_convnet_without_batches, optimizer=MOMENTUM)
    trainer = make(case, 2)
    for step in range(3):
        trainer.step(*images(step))
    before = (weights_of(trainer), [dict(exchange_tensors(trainer, worker)) for worker in range(2)])
    inputs, targets = images(3)
    inputs[-1] = float("nan")  # the last worker's
    trainer.step(inputs, targets)
    assert trainer.num_skipped == 1
    after = (weights_of(trainer), [dict(exchange_tensors(trainer, worker)) for worker in range(2)])
    assert any(tensor.any() for tensor in before[1][0].values())
    for old, new in zip((before[0], *before[1]), (after[0], *after[1]), strict=True):
        assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())


def small_convnet_without_batches() -> nn.Module:
    return small_convnet(batch_norm=False)


def images(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = image_batch(8, seed=step)
    return inputs.float(), targets


def exchange_tensors(trainer: Any, worker: int) -> list[tuple[str, Tensor]]:
    return [(name, one.clone()) for name, one in trainer.sync.exchanges[worker].tensors().items()]


@pytest.mark.parametrize("name", ["topk", "onebit", "powersgd"])
def test_a_steady_step_never_waits(name: str) -> None:
    """Where the host knows nothing of the GPU's decision to skip."""
    case = dataclasses.replace(
        CASES[name], model=small_gpt, step=Step(clip_norm=1.0), optimizer=functools.partial(ADAMW, fused=True)
    )
    case = dataclasses.replace(case, codec={**case.codec, "warmup_steps": 0})
    with mock.patch.object(update, "can_skip_on_device", lambda _: True):
        trainer = make(case, 2)
    with pretended_gpu():
        for step in range(3):
            trainer.step(*case.batch(3 * step + 1))
        with no_waits():
            loss = trainer.step(*case.batch(1))
        trainer.flush()
    assert loss.isfinite() and trainer.num_skipped == 0


TOPK = Codec(name="topk", density=0.1, dense_below=SMALL)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(axes=Axes(data=4), step=Step(microbatches=2)), r"one rank with \[step\] microbatches = 8"),
        (Plan(axes=Axes(data=2, tensor=2), codec=TOPK), "tensor = 2"),
        (Plan(axes=Axes(data=2), codec=TOPK, data=Data(balance=True)), "ranks in process have none"),
        (Plan(axes=Axes(data="all"), codec=TOPK), "write the number of replicas"),
    ],
    ids=["no codec", "tensor", "balance", "all"],
)
def test_other_plans_are_refused_with_what_to_do(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parallelize(small_gpt(), plan, loss="cross-entropy", optimizer=ADAMW, device="cpu", replicas_in_process=True)


def test_statistics_over_all_ranks_are_refused() -> None:
    case = dataclasses.replace(CASES["BatchNorm"], data=Data())
    with pytest.raises(PlanError, match='set \\[data\\] buffers = "broadcast"'):
        make(case, 2)


def test_a_loss_that_gathers_the_batch_is_refused() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(weft.gather_batch(output.flatten(1)), targets[:, 0])

    trainer = make(CASES["topk"], 2, loss=loss)
    with pytest.raises(PlanError, match="2 data ranks, and in process"):
        trainer.step(*token_batch(4))


def test_an_empty_global_batch_is_refused() -> None:
    trainer = make(CASES["topk"], 2)
    with pytest.raises(DataError, match="global batch is empty"):
        trainer.step(*token_batch(0))
