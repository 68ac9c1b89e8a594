"""Faults in the exchange between replicas: `verify` must fail and say which rule was broken, and on which replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ADAMW
from planting import Patch, Plant, find, scaled
from ranks import ranks

from weft.comm.collectives import all_reduce
from weft.plan.plan import Average, Axes, Data, Plan
from weft.sync import local
from weft.sync.local import LocalSync
from weft.training.trainer import Trainer

DILOCO = {"outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.9}


def plan_of(*, sharded: bool = False, average: float = 0.0, **settings: Any) -> Plan:
    axes, shard = (Axes(replicate=2, data=2), "parameters") if sharded else (Axes(data=2), "nothing")
    data = Data(sync="local", shard=shard, **{"every": 2, **settings})
    return Plan(axes=axes, data=data, average=Average(decay=average))


def with_outer_step(wrong: Any) -> Plant:
    return lambda patch, trainer: patch.setattr(local, "nesterov_", wrong)


def against_the_change(anchor: Any, change: Any, momentum: Any, *, rate: float, beta: float) -> None:
    momentum.mul_(beta).sub_(change)
    anchor.add_(change, alpha=rate).sub_(momentum, alpha=rate * beta)


def heavy_ball(anchor: Any, change: Any, momentum: Any, *, rate: float, beta: float) -> None:
    """The momentum of `torch.optim.SGD` without nesterov."""
    momentum.mul_(beta).add_(change)
    anchor.sub_(momentum, alpha=rate)


def momentum_of_the_round_before(anchor: Any, change: Any, momentum: Any, *, rate: float, beta: float) -> None:
    """Right in the first round, when there is no momentum yet; then one term short."""
    anchor.add_(change, alpha=-rate * (1 + beta)).add_(momentum, alpha=-rate * beta)
    momentum.mul_(beta).add_(change)


@ranks(2)
@pytest.mark.parametrize("wrong, ratio", [(against_the_change, "-1"), (heavy_ball, "0.526315789")])
def test_an_outer_step_by_another_rule(wrong: Any, ratio: str) -> None:
    first = find(plan_of(**DILOCO), with_outer_step(wrong), num_steps=2)
    assert (first.step, first.phase, first.what) == (2, "exchange", "weight"), first
    assert (first.cause.kind, first.cause.axes) == ("outer", ("data",)), first
    assert f"since the last exchange it moved {ratio} times as far as it should" in first.cause.text, first.cause


@pytest.mark.long
@ranks(2)
def test_a_momentum_that_is_a_round_late() -> None:
    first = find(plan_of(**DILOCO), with_outer_step(momentum_of_the_round_before), num_steps=4)
    assert (first.step, first.what, first.places) == (4, "weight", "every rank"), first


@pytest.mark.long
@ranks(4)
def test_an_outer_step_by_another_rule_on_shards() -> None:
    first = find(plan_of(sharded=True, **DILOCO), with_outer_step(against_the_change), num_steps=2)
    assert (first.step, first.cause.kind, first.cause.axes) == (2, "outer", ("replicate",)), first


@ranks(2)
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["average", "nesterov"])
def test_a_replica_that_does_not_take_the_average(outer: dict[str, Any]) -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        if trainer.mesh.replica == 1:
            trainer.sync.take = lambda number, total: None  # type: ignore[attr-defined]

    first = find(plan_of(**outer), plant, num_steps=2)
    assert (first.step, first.phase, first.what, first.ranks) == (2, "exchange", "weight", (1,)), first
    assert first.cause.kind == "not exchanged" and "the replica's own" in first.cause.text
    assert first.places == "replica 1, data 1 (rank 1)" and "on replica 1" in str(first)


@ranks(2)
def test_an_exchange_that_is_a_step_late() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        patch.setattr(local, "exchanges_after", lambda data, step: step % 2 == 1 and step > 1)

    first = find(plan_of(), plant, num_steps=3)
    assert (first.step, first.cause.kind, first.places) == (2, "not exchanged", "every rank"), first


@pytest.mark.long
@ranks(2)
def test_an_exchange_that_is_a_step_early() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        patch.setattr(local, "exchanges_after", lambda data, step: step % 2 == 1)

    first = find(plan_of(), plant, num_steps=3)
    assert (first.step, first.what, first.cause.kind) == (1, "weight", "exchanged"), first
    assert "not due" in first.cause.text


@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["average", "nesterov"])
def test_a_sum_instead_of_a_mean(outer: dict[str, Any]) -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        assert isinstance(trainer.sync, LocalSync)
        take = trainer.sync.take
        patch.setattr(trainer.sync, "take", lambda number, total: take(number, total.mul_(2)))  # of two replicas

    first = find(plan_of(**outer), plant, num_steps=2)
    assert (first.step, first.what) == (2, "weight") and "2" in first.cause.text, first
    assert (first.cause.kind == "outer") == bool(outer), first


@ranks(2)
def test_running_statistics_that_were_not_averaged() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        trainer.sync._statistics = list  # type: ignore[attr-defined]

    first = find(plan_of(), plant, num_steps=2, images=True)
    assert (first.step, first.phase, first.what) == (2, "exchange", "buffer"), first
    assert first.cause.kind == "not summed" and "whose mean is the true one" in first.cause.text


@ranks(2)
def test_moments_of_the_optimizer_stay_each_replicas_own() -> None:
    """To average them as well would be another method. It shows in the step after the exchange."""

    def plant(patch: Patch, trainer: Trainer) -> None:
        sync = trainer.sync
        assert isinstance(sync, LocalSync)
        finish = sync.finish_exchange

        def finish_and_average() -> None:
            finish()
            with torch.no_grad():
                for state in trainer.optimizer.state.values():
                    for moment in (state["exp_avg"], state["exp_avg_sq"]):
                        all_reduce(moment, trainer.mesh.between_replicas("weights"))
                        moment /= 2

        sync.finish_exchange = finish_and_average  # type: ignore[method-assign]

    first = find(plan_of(), plant, num_steps=3, optimizer=ADAMW)
    assert (first.step, first.phase, first.what) == (3, "update", "weight"), first


@pytest.mark.long
@ranks(2)
def test_an_average_of_every_step() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        update, average = trainer.update, trainer.average
        assert average is not None
        patch.setattr(update, "_add_exchanged", average.add)

    first = find(plan_of(average=0.5), plant, num_steps=2)
    assert (first.step, first.what) == (1, "average"), first


@pytest.mark.long
@ranks(2)
def test_gradients_of_a_replica_are_its_own_and_not_a_sum() -> None:
    first = find(plan_of(), scaled(2.0), num_steps=2)
    assert (first.what, first.phase, first.cause.kind, first.cause.axes) == (
        "gradient",
        "backward",
        "factor",
        ("data",),
    )


@pytest.mark.long
@ranks(2)
def test_the_loss_of_one_replica_is_off() -> None:
    """Replicas have different losses; the verdict is about those of the one that is off."""

    def plant(patch: Patch, trainer: Trainer) -> None:
        finish = trainer.sync.finish

        def finish_twice_the_loss(loss_sum: Any, count: Any, **kwargs: Any) -> Any:
            return finish(loss_sum * (1 + trainer.mesh.replica), count, **kwargs)

        trainer.sync.finish = finish_twice_the_loss  # type: ignore[method-assign]

    first = find(plan_of(), plant, num_steps=2)
    assert (first.what, first.ranks, first.places) == ("loss", (1,), "replica 1, data 1 (rank 1)"), first
    assert first.cause.kind == "factor" and "too large by exactly 2" in first.cause.text
