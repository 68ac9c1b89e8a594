"""Replicas in one process against real ranks under the same plan: losses, weights, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.plan.plan import Axes, Data, Plan, Precision, Step
from weft.training.parallelize import parallelize
from weft.training.replicas_in_process import ReplicasInProcess
from weft.training.trainer import Trainer

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUM_STEPS = 11
DILOCO = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def local(data: int, **settings: Any) -> Plan:
    return Plan(axes=Axes(data=data), data=Data(sync="local", **settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, a model, and what it is trained with."""

    plan: Plan
    model: Callable[[], nn.Module] = functools.partial(small_gpt, dropout=0.2)
    optimizer: Any = ADAMW

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Of 8 samples; the last of an epoch of three steps is short."""
        make = image_batch if self.model is small_convnet else token_batch
        inputs, targets = make(8 if step % 3 else 7, seed=step)
        return inputs.float() if inputs.is_floating_point() else inputs, targets


CASES = {
    "local SGD": Case(plan=local(2, every=3)),
    "DiLoCo": Case(plan=local(2, every=4, **DILOCO)),
    "DiLoCo after steps together": Case(plan=local(2, every=3, switch_step=4, **DILOCO)),
    "BatchNorm": Case(plan=local(2, every=2), model=small_convnet, optimizer=MOMENTUM),
    "bf16, clipped, microbatches": Case(
        plan=dataclasses.replace(
            local(2, every=2), precision=Precision(compute="bf16"), step=Step(clip_norm=0.5, microbatches=2)
        )
    ),
}
FOUR = {
    "DiLoCo": Case(plan=local(4, every=3, **DILOCO)),
    "BatchNorm": dataclasses.replace(CASES["BatchNorm"], plan=local(4, every=3)),
}


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.flush()
    return {name: tensor.detach().clone() for name, tensor in trainer.named_model.state_dict().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What replicas in process gave: for every replica its losses and its weights."""

    losses: list[list[float]]
    weights: list[dict[str, Tensor]]
    spread: float
    held_out: float


def make(case: Case, **changes: Any) -> ReplicasInProcess:
    torch.manual_seed(0)
    given = {"loss": "cross-entropy", "optimizer": case.optimizer, "device": "cpu", **changes}
    trainer = parallelize(case.model(), case.plan, replicas_in_process=True, **given)
    assert isinstance(trainer, ReplicasInProcess)
    torch.manual_seed(1)
    return trainer


def play(case: Case) -> Played:
    trainer = make(case)
    losses = []
    for step in range(NUM_STEPS):
        mean = trainer.step(*case.batch(step))
        losses.append([float(loss) for loss in trainer.replica_losses])
        assert float(mean) == pytest.approx(sum(losses[-1]) / len(losses[-1]))
    held_out = trainer.evaluate([case.batch(100), case.batch(101)])
    assert trainer.sync.spread is not None
    return Played(
        losses=losses,
        weights=[weights_of(one) for one in trainer.replicas],
        spread=float(trainer.sync.spread),
        held_out=held_out,
    )


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Played:
    """Of the case of this test, in pytest's own process."""
    return play(request.getfixturevalue("cases")[request.getfixturevalue("name")])


def compare(case: Case, played: Played, *, tolerance: float) -> None:
    """Train by this rank, and compare with the replica of its number."""
    torch.manual_seed(0)
    trainer = make_trainer(case.model(), case.plan, optimizer=case.optimizer)
    torch.manual_seed(1)
    for step in range(NUM_STEPS):
        batch = cut_evenly(case.batch(step), trainer.data_size)[trainer.data_rank]
        loss = float(trainer.step(*batch))
        assert loss == pytest.approx(played.losses[step][trainer.data_rank], rel=tolerance, abs=0), f"step {step}"
    for name, tensor in weights_of(trainer).items():
        expected = played.weights[trainer.data_rank][name]
        torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance, msg=name)
    if trainer.data_rank == 0:
        assert float(trainer.sync.spread) == pytest.approx(played.spread, rel=max(tolerance, 1e-12))
    parts = [cut_evenly(case.batch(number), trainer.data_size)[trainer.data_rank] for number in (100, 101)]
    return
    assert trainer.evaluate(parts) == pytest.approx(played.held_out, rel=1e-6)


@ranks(2)
@pytest.mark.parametrize("cases", [CASES], ids=[""])
@pytest.mark.parametrize("name", CASES)
def test_two_replicas_equal_two_ranks_to_the_bit(name: str, cases: dict[str, Case], played: Played) -> None:
    compare(cases[name], played, tolerance=0)


@ranks(4)
@pytest.mark.parametrize("cases", [FOUR], ids=[""])
@pytest.mark.parametrize("name", FOUR)
def test_four_replicas_equal_four_ranks(name: str, cases: dict[str, Case], played: Played) -> None:
    compare(cases[name], played, tolerance=1e-6)
