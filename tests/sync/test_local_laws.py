"""What local steps must equal at their ends: synchronous SGD, each other, and the optimizer inside."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from oracle import (
    ADAMW,
    MLP,
    MakeOptimizer,
    Seen,
    assert_same,
    batches_of,
    cut_evenly,
    data_plan,
    make_trainer,
    train_alone,
    train_parallel,
)
from ranks import gathered, ranks

from weft.plan.plan import Axes, Data, Plan

PLAIN: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1)


def local_plan(num_replicas: int, **settings: Any) -> Plan:
    return Plan(axes=Axes(data=num_replicas), data=Data(sync="local", **settings))


def train(plan: Plan, optimizer: MakeOptimizer, *sizes: int) -> list[Seen]:
    torch.manual_seed(0)
    with make_trainer(MLP(), plan, optimizer=optimizer) as trainer:
        return train_parallel(trainer, [cut_evenly(batch, trainer.data_size) for batch in batches_of(*sizes)])


def assert_same_weights(mine: list[Seen], theirs: list[Seen]) -> None:
    """Of runs whose losses and gradients are not of the same samples."""
    for here, there in zip(mine, theirs, strict=True):
        for name, weight in there.weights.items():
            torch.testing.assert_close(here.weights[name], weight, rtol=1e-12, atol=1e-14)


@ranks(4)
def test_an_exchange_after_every_step_of_plain_sgd_is_synchronous_sgd() -> None:
    local = train(local_plan(4, every=1), PLAIN, 8, 8, 12, 8)
    assert_same_weights(local, train(data_plan(4), PLAIN, 8, 8, 12, 8))


@ranks(4)
def test_diloco_without_momentum_and_rate_1_is_local_sgd() -> None:
    outer = {"outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0}
    sizes = (8, 9, 7, 8, 8)
    assert_same(train(local_plan(4, every=2, **outer), ADAMW, *sizes), train(local_plan(4, every=2), ADAMW, *sizes))


def test_one_replica_is_the_inner_optimizer() -> None:
    torch.manual_seed(0)
    model = MLP()
    alone = copy.deepcopy(model)
    expected = train_alone(alone, batches_of(6, 5, 7, 6), optimizer=lambda model: ADAMW(model.parameters()))
    assert_same(train(local_plan(1, every=2), ADAMW, 6, 5, 7, 6), expected)


@ranks(3)
def test_until_the_switch_replicas_are_bit_identical_after_every_step() -> None:
    seen = train(local_plan(3, every=2, switch_step=2), ADAMW, 6, 7, 8, 6, 6)
    for step, one in enumerate(seen, start=1):
        weights = gathered({name: weight.tolist() for name, weight in one.weights.items()})
        assert all(mine == weights[0] for mine in weights) == (step in (1, 2, 4))
