"""Delayed averaging on real ranks against the published rule, written by hand for several models in one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from oracle import batch_of, cut_evenly, make_trainer
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.plan.plan import Axes, Comm, Data, Plan
from weft.sync import make
from weft.sync.delayed import DelayedSync
from weft.sync.local import LocalSync
from weft.sync.streaming import StreamingSync
from weft.training.trainer import Trainer

NUM_STEPS = 26
Batches = list[tuple[Tensor, Tensor]]
Weights = list[Tensor]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches_of(num_steps: int = NUM_STEPS, size: int = 8) -> Batches:
    return [batch_of(size, seed) for seed in range(num_steps)]


def weights_of(model: nn.Module) -> Weights:
    return [one.detach().clone() for one in model.parameters()]


def gradients_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Weights:
    model.zero_grad()
    inputs, targets = batch
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def mean_of(tensors: Sequence[Weights]) -> Weights:
    return [torch.stack(one).mean(0) for one in zip(*tensors, strict=True)]


@torch.no_grad()
def published_rule(batches: Batches, *, delay: int, rate: float, num_replicas: int) -> list[list[Weights]]:
    """w := w - rate (g_i - g_{i-D} + mean g_{i-D}): the weights of all replicas after every step."""
    replicas = [model_of() for _ in range(num_replicas)]
    history: list[list[Weights]] = []
    seen = []
    for batch in batches:
        with torch.enable_grad():
            history.append(
                [gradients_of(one, part) for one, part in zip(replicas, cut_evenly(batch, num_replicas), strict=True)]
            )
        for number, replica in enumerate(replicas):
            for place, weight in enumerate(replica.parameters()):
                change = history[-1][number][place].clone()
                if len(history) > delay:
                    old = history[-1 - delay]
                    change += mean_of(old)[place] - old[number][place]
                weight -= rate * change
        seen.append([weights_of(one) for one in replicas])
    return seen


def step_of(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> None:
    trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])


def assert_weights(trainer: Trainer, expected: Weights) -> None:
    names = [name for name, _ in model_of().named_parameters()]
    for piece in trainer.sync.pieces:
        true = expected[names.index(piece.name)].flatten()
        first, last = piece.layout.flat_range or (0, true.numel())
        torch.testing.assert_close(piece.tensor.detach().flatten(), true[first:last], rtol=1e-11, atol=1e-13)


def plain_sgd(parameters: object, **_: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


@pytest.mark.sampled(4)
@ranks(4)
@pytest.mark.parametrize("bucket_bytes", [100, 25_000_000])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 5, 20])
def test_sgd_follows_the_published_rule_and_ends_as_its_mean(delay: int, sharded: bool, bucket_bytes: int) -> None:
    data = Data(sync="delayed", delay=delay, check_every=0)
    axes = Axes(replicate=2, data=2) if sharded else Axes(data=4)
    data = dataclasses.replace(data, shard="parameters") if sharded else data
    plan = Plan(axes=axes, data=data, comm=Comm(bucket_bytes=bucket_bytes))
    trainer = make_trainer(model_of(), plan, optimizer=plain_sgd)
    assert isinstance(trainer.sync, DelayedSync) == (delay > 0) and isinstance(trainer.sync, LocalSync)
    expected = published_rule(batches_of(), delay=delay, rate=0.1, num_replicas=trainer.mesh.num_replicas)
    for batch, seen in zip(batches_of(), expected, strict=True):
        step_of(trainer, batch)
        assert_weights(trainer, seen[trainer.mesh.replica])
    with trainer.sync.consensus():
        assert_weights(trainer, mean_of(expected[-1]))
    assert_weights(trainer, expected[-1][trainer.mesh.replica])
    trainer.sync.conclude()
    assert_weights(trainer, mean_of(expected[-1]))


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("delay", [1, 5, 20])
def test_the_mean_model_moves_by_the_mean_update_of_any_optimizer(delay: int, every: int) -> None:
    """Of what has been sent: with AdamW, whose updates are not linear in the gradient."""
    plan = Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=delay, every=every, check_every=0))
    trainer = make_trainer(model_of(), plan, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    total = [torch.zeros_like(one) for one in trainer.model.parameters()]
    before: list[Tensor] = []

    def keep(*_: object) -> None:
        before[:] = weights_of(trainer.model)

    def add(*_: object) -> None:
        for one, old, new in zip(total, before, weights_of(trainer.model), strict=True):
            one += new - old

    trainer.optimizer.register_step_pre_hook(keep)
    trainer.optimizer.register_step_post_hook(add)
    for batch in batches_of():
        step_of(trainer, batch)
    updates = mean_of(gathered(total))
    start = weights_of(model_of())
    expected = [old + change for old, change in zip(start, updates, strict=True)]
    with trainer.sync.consensus():
        assert_weights(trainer, expected)


@ranks(2)
def test_one_fragment_without_delay_and_mix_is_diloco_to_the_bit() -> None:
    """The mechanism of streaming against that of local steps, which such a plan takes."""
    data = Data(sync="local", every=3, outer="nesterov", outer_lr=0.7, outer_momentum=0.9, check_every=0)
    plan = Plan(axes=Axes(data=2), data=data)
    diloco = make_trainer(model_of(), plan, optimizer=plain_sgd)
    with (
        mock.patch.object(make, "merges_late", return_value=True),
        mock.patch.object(make, "uses_streaming", return_value=True),
    ):
        streaming = make_trainer(model_of(), plan, optimizer=plain_sgd)
    assert type(diloco.sync) is LocalSync and type(streaming.sync) is StreamingSync
    for batch in batches_of():
        step_of(diloco, batch)
        step_of(streaming, batch)
        assert all(map(torch.equal, weights_of(diloco.model), weights_of(streaming.model)))
    assert streaming.sync.num_exchanges == diloco.sync.num_exchanges == NUM_STEPS // 3
