"""The process that plays all replicas, against loops written by hand: plain torch, one model per replica."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from oracle import ADAMW, MLP, SGD, MakeOptimizer, batch_of, image_batch, small_convnet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from weft.plan.plan import Average, Axes, Data, Plan, Step
from weft.verification.one_process import Key, OneProcess, Recipe
from weft.verification.oracles import rule_of
from weft.verification.replicas import LocalReplicas

PLAIN: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1)


def recipe(optimizer: MakeOptimizer) -> Recipe:
    return Recipe(loss="cross-entropy", optimizer=optimizer, schedule=None, groups=None)


def local(every: int, **settings: Any) -> Data:
    return Data(sync="local", every=every, **settings)


def assert_near(mine: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-14)


def weights_of(oracle: LocalReplicas, replica: int) -> list[Tensor]:
    return [tensor for key, tensor in oracle.tensors() if key.what == "weight" and key.replica == replica]


class ByHand:
    """Replicas trained by torch alone, with torch's own SGD as the outer optimizer of an anchor model."""

    def __init__(self, model: nn.Module, num_replicas: int, data: Data, optimizer: MakeOptimizer) -> None:
        self.replicas = [copy.deepcopy(model) for _ in range(num_replicas)]
        self.inner = [optimizer(one.parameters()) for one in self.replicas]
        self.anchor = copy.deepcopy(model)
        momentum = data.outer_momentum
        self.outer = torch.optim.SGD(
            self.anchor.parameters(), lr=data.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def local_step(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        for replica, optimizer, (inputs, targets) in zip(self.replicas, self.inner, parts, strict=True):
            optimizer.zero_grad()
            if len(inputs):
                cross_entropy(replica(inputs), targets).backward()
                optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        for alike in zip(*(one.parameters() for one in [self.anchor, *self.replicas]), strict=True):
            mean = sum(alike[1:]) / len(self.replicas)
            for one in alike:
                one.copy_(mean)

    @torch.no_grad()
    def outer_step(self) -> None:
        for old, *new in zip(self.anchor.parameters(), *(one.parameters() for one in self.replicas), strict=True):
            old.grad = sum(old - one for one in new) / len(new)
        self.outer.step()
        for replica in self.replicas:
            for one, old in zip(replica.parameters(), self.anchor.parameters(), strict=True):
                one.copy_(old)


def compare(oracle: LocalReplicas, by_hand: ByHand) -> None:
    for number, model in enumerate(by_hand.replicas):
        for mine, true in zip(weights_of(oracle, number), model.parameters(), strict=True):
            assert_near(mine, true.detach())


# ---- the rule ----


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_local_steps_and_an_average(optimizer: MakeOptimizer) -> None:
    """Every 3 steps, with unequal parts and a replica without samples in the fifth step."""
    data, model = local(3), MLP()
    oracle = LocalReplicas(copy.deepcopy(model), Plan(axes=Axes(data=3), data=data), recipe(optimizer))
    by_hand = ByHand(model, 3, data, optimizer)
    for step, size in enumerate((6, 7, 8, 6, 2, 9), start=1):
        inputs, targets = batch_of(size, seed=step)
        oracle.step(inputs, targets)
        sizes = [size // 3 + (number < size % 3) for number in range(3)]
        by_hand.local_step(list(zip(inputs.split(sizes), targets.split(sizes), strict=True)))
        if step in (3, 6):
            by_hand.average()
        compare(oracle, by_hand)
        assert [one is None for one in oracle.returned] == [not size for size in sizes]
        assert oracle.num_targets == sizes and not math.isnan(oracle.losses[-1])


def test_diloco_after_a_switch() -> None:
    """Plain averages after the first two steps, then Nesterov's outer steps every two."""
    data, model = local(2, switch_step=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9), MLP()
    oracle = LocalReplicas(copy.deepcopy(model), Plan(axes=Axes(data=2), data=data), recipe(ADAMW))
    by_hand = ByHand(model, 2, data, ADAMW)
    for step in range(1, 9):
        inputs, targets = batch_of(8, seed=step)
        oracle.step(inputs, targets)
        by_hand.local_step(list(zip(inputs.split(4), targets.split(4), strict=True)))
        if step <= 2:
            by_hand.average()
        elif step % 2 == 0:
            by_hand.outer_step()
        compare(oracle, by_hand)


def test_the_formula_of_diloco() -> None:
    """m := beta m + D; theta := theta - alpha (D + beta m): two rounds on one number."""
    model = nn.Linear(1, 2, bias=False).double()
    data = local(1, outer="nesterov", outer_lr=0.5, outer_momentum=0.8)
    oracle = LocalReplicas(model, Plan(axes=Axes(data=2), data=data), recipe(PLAIN))
    theta, momentum = model.weight.detach().clone(), torch.zeros(2, 1, dtype=torch.float64)
    for seed in range(2):
        inputs = torch.randn(2, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        targets = torch.tensor([0, 1])
        changes = []
        for number in range(2):
            weight = theta.clone().requires_grad_()
            cross_entropy(inputs[number : number + 1] @ weight.T, targets[number : number + 1]).backward()
            changes.append(0.1 * weight.grad)  # type: ignore[operator]
        change = (changes[0] + changes[1]) / 2
        momentum = 0.8 * momentum + change
        theta = theta - 0.5 * (change + 0.8 * momentum)
        oracle.step(inputs, targets)
        for number in range(2):
            assert_near(weights_of(oracle, number)[0], theta)


# ---- what it must equal at its ends ----


def test_every_step_with_plain_sgd_is_synchronous_training() -> None:
    plan, model = Plan(axes=Axes(data=4), data=local(1)), MLP()
    oracle = LocalReplicas(copy.deepcopy(model), plan, recipe(PLAIN))
    alone = OneProcess(model, Plan(axes=Axes(data=4)), recipe(PLAIN))
    for seed in range(4):
        batch = batch_of(8, seed)
        assert abs(oracle.step(*batch) - alone.step(*batch)) < 1e-12
        for name, weight in oracle.final_weights.items():
            assert_near(weight, alone.final_weights[name])


def test_one_replica_is_the_inner_optimizer() -> None:
    model = MLP()
    data = local(2, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)
    oracle = LocalReplicas(copy.deepcopy(model), Plan(data=data, step=Step(clip_norm=0.5)), recipe(ADAMW))
    alone = OneProcess(model, Plan(step=Step(clip_norm=0.5)), recipe(ADAMW))
    for seed in range(4):
        batch = batch_of(6, seed)
        assert oracle.step(*batch) == pytest.approx(alone.step(*batch), rel=1e-12)
        for name, weight in oracle.final_weights.items():
            assert_near(weight, alone.final_weights[name])


# ---- what a replica is made of ----


def test_the_ranks_of_a_replica_share_its_batch() -> None:
    """Sharded over data, with replicas along `replicate`: microbatches are unions over the ranks of one replica."""
    plan = Plan(axes=Axes(replicate=2, data=2), data=local(2, shard="gradients"), step=Step(microbatches=2))
    oracle = LocalReplicas(MLP(), plan, recipe(PLAIN))
    inputs, targets = batch_of(7)  # parts of 2, 2, 2 and 1
    before = [weight.clone() for weight in weights_of(oracle, 0)]
    oracle.step(inputs, targets)
    assert oracle.num_targets == [4, 3]
    for number, rows in enumerate((slice(0, 4), slice(4, 7))):
        model = MLP()
        model.load_state_dict(dict(zip(dict(model.named_parameters()), before, strict=True)))
        cross_entropy(model(inputs[rows]), targets[rows]).backward()
        gradients = {k.name: t for k, t in oracle.tensors() if k.what == "gradient" and k.replica == number}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert_near(gradients[name], parameter.grad)


def test_running_statistics_are_averaged_and_counts_are_not() -> None:
    plan = Plan(axes=Axes(data=2), data=local(2))
    oracle = LocalReplicas(small_convnet().double(), plan, recipe(PLAIN))
    found = []
    for seed in range(2):
        oracle.step(*image_batch(8, seed=seed))
        found.append({key: tensor.clone() for key, tensor in oracle.tensors() if key.what == "buffer"})
    apart, together = found
    names = {key.name for key in apart}
    assert any("running_var" in name for name in names)
    for name in names:
        mine, other = Key("buffer", name, replica=0), Key("buffer", name, replica=1)
        assert torch.equal(together[mine], together[other])
        assert torch.equal(apart[mine], apart[other]) == ("num_batches_tracked" in name)


def test_the_average_takes_one_term_per_exchange() -> None:
    plan = Plan(axes=Axes(data=2), data=local(2), average=Average(decay=0.75, start=1))
    oracle = LocalReplicas(MLP(), plan, recipe(SGD))
    means: dict[str, Tensor] = {}
    for step in range(1, 7):
        if step == 3:  # the first step after `start` that begins with weights all replicas share
            means = {name: weight.clone() for name, weight in oracle.final_weights.items()}
        oracle.step(*batch_of(6, seed=step))
        if means and step % 2 == 0:
            means = {name: 0.75 * mean + 0.25 * oracle.final_weights[name] for name, mean in means.items()}
        found = {key.name: tensor for key, tensor in oracle.tensors() if key.what == "average" and key.replica == 1}
        assert found.keys() == means.keys()
        for name, mean in means.items():
            assert_near(found[name], mean)


def test_a_skipped_update_and_what_was_before_an_exchange() -> None:
    oracle = LocalReplicas(MLP(), Plan(axes=Axes(data=2), data=local(2)), recipe(SGD))
    start = [weight.clone() for weight in weights_of(oracle, 0)]
    oracle.step(*batch_of(6), updates=[False, True])
    key = Key("weight", "first.weight", replica=1)
    assert all(map(torch.equal, weights_of(oracle, 0), start)) and oracle.at_exchange(key).keys() == {"mean"}
    assert not torch.equal(weights_of(oracle, 1)[0], start[0])
    own = weights_of(oracle, 1)[0].clone()
    oracle.step(*batch_of(6), updates=[False, False])
    found = oracle.at_exchange(key)
    assert torch.equal(found["own"], own) and torch.equal(found["anchor"], start[0])
    assert_near(weights_of(oracle, 0)[0], (start[0] + own) / 2)
    assert not oracle.at_exchange(Key("gradient", "first.weight"))


def test_the_rule_is_chosen_by_the_plan() -> None:
    plan = Plan(axes=Axes(data=2), data=local(2))
    assert rule_of(plan) is LocalReplicas
    assert rule_of(dataclasses.replace(plan, data=Data())) is OneProcess
