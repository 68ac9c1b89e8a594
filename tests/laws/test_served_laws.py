"""The promises of parameter servers, each by name, in float64 to 1e-10 or to the bit.

Held elsewhere: what `verify` compares after every step, asynchronous runs by replay (tests/verification), random orders
and delays (tests/server/test_server.py, test_once.py), bytes (tests/server/test_bytes_and_memory.py).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import MLP, SGD, batch_of, cut, cut_evenly, data_plan, make_trainer, small_gpt, token_batch, train_alone
from ranks import ranks
from served_in_threads import servers_in_threads
from served_rules import some_codec
from served_training import leave_group, served, server_plan
from served_workers import make_settings, play
from torch import Tensor, nn

from weft.plan.plan import Axes
from weft.server.protocol.message import pack_message
from weft.server.server import ParameterServer
from weft.training.trainer import Trainer

Batch = tuple[Tensor, Tensor]
Trained = list[tuple[float, list[Tensor]]]
"""Loss and weights after every step."""
NESTEROV = dict(lr=0.1, momentum=0.9, nesterov=True)


def nesterov(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, **NESTEROV)  # type: ignore[arg-type]


def train(trainer: Trainer, steps: Sequence[Sequence[Batch]]) -> Trained:
    return [
        (
            float(trainer.step(*parts[trainer.data_rank])),
            [one.detach().clone() for one in trainer.named_model.parameters()],
        )
        for parts in steps
    ]


def joined(parts: Sequence[Batch]) -> Batch:
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def assert_equal(found: Trained, expected: Trained) -> None:
    for (loss, weights), (true_loss, true_weights) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-10)
        for one, other in zip(weights, true_weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(2, long=1)
@ranks(2)
@pytest.mark.parametrize(
    ("sizes", "microbatches", "clip_norm", "shards"), [([5, 1], 1, 0.0, 2), ([4, 4], 2, 0.05, 1), ([6, 0], 1, 0.05, 2)]
)
def test_sync_equals_all_reduce_equals_one_process(
    sizes: list[int], microbatches: int, clip_norm: float, shards: int
) -> None:
    """With batches of which one worker has less than the other, or nothing."""
    steps = [cut(batch_of(sum(sizes), seed), sizes) for seed in range(4)]
    torch.manual_seed(0)
    models = [copy.deepcopy(one) for one in [MLP()] * 3]
    plan = server_plan(2, microbatches=microbatches, clip_norm=clip_norm, shards=shards)
    with servers_in_threads(), served(models[0], plan) as trainer:
        by_servers = train(trainer, steps)
    with make_trainer(models[1], data_plan(2, microbatches=microbatches, clip_norm=clip_norm)) as trainer:
        by_all_reduce = train(trainer, steps)
    alone = train_alone(models[2], [joined(parts) for parts in steps], clip_norm=clip_norm)
    assert_equal(by_servers, by_all_reduce)
    assert_equal(by_servers, [(seen.loss, list(seen.weights.values())) for seen in alone])


@pytest.mark.sampled(1, long=3)
@ranks(2)
@pytest.mark.parametrize("name", ["dgc", "topk", "onebit", "sign", "qsgd", "terngrad"])
def test_sync_equals_all_reduce_through_a_codec(name: str) -> None:
    """Where servers hold whole tensors. PowerSGD is not among these: its factors are of one worker's gradient, and with
    all-reduce of the sum."""
    steps = [cut(batch_of(sum(sizes), seed), sizes) for seed, sizes in enumerate([[4, 4], [5, 1], [2, 6], [4, 4]])]
    torch.manual_seed(0)
    model = MLP()
    other, codec = copy.deepcopy(model), some_codec(name)
    plan = replace(server_plan(2, bucket_bytes=1 << 20), codec=codec)
    with servers_in_threads(), served(model, plan, optimizer=nesterov) as trainer:
        by_servers = train(trainer, steps)
    with make_trainer(other, replace(data_plan(2), codec=codec), optimizer=nesterov) as trainer:
        assert_equal(by_servers, train(trainer, steps))


@pytest.mark.sampled(long=2)
@pytest.mark.long
@ranks(4, fresh=True)
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "ring", "ulysses"])
def test_sync_equals_all_reduce_equals_one_process_inside_a_worker(axis: str) -> None:
    torch.manual_seed(0)
    models = [copy.deepcopy(one) for one in [small_gpt().double()] * 3]
    whole = [token_batch(size, seed=step) for step, size in enumerate((8, 5, 8))]
    steps = [cut_evenly(one, 2) for one in whole]
    plan = server_plan(2, bucket_bytes=4096, shards=2, microbatches=2, clip_norm=0.05)
    plan = replace(plan, axes=Axes(data=2, **{axis: 2}))
    example = {"example": token_batch(2)[0]}
    reduced = replace(data_plan(2, microbatches=2, clip_norm=0.05), axes=plan.axes)
    with make_trainer(models[1], reduced, **example) as trainer:
        by_all_reduce = [loss for loss, _ in train(trainer, steps)]
    leave_group()
    with servers_in_threads(), served(models[0], plan, **example) as trainer:
        by_servers = [loss for loss, _ in train(trainer, steps)]
    assert by_servers == pytest.approx(by_all_reduce, rel=1e-10)
    alone = [seen.loss for seen in train_alone(models[2], whole, clip_norm=0.05)]
    assert by_servers == pytest.approx(alone, rel=1e-10)


@ranks(2)
def test_bounded_with_staleness_0_equals_sync_to_the_bit() -> None:
    steps = [cut(batch_of(8, seed), [5, 3]) for seed in range(4)]
    torch.manual_seed(0)
    first, second = (copy.deepcopy(one) for one in [MLP()] * 2)
    found = []
    for model, mode in ((first, "sync"), (second, "bounded")):
        with servers_in_threads(), served(model, server_plan(2, mode=mode, shards=2, clip_norm=0.05)) as trainer:
            found.append(train(trainer, steps))
    assert [loss for loss, _ in found[0]] == [loss for loss, _ in found[1]]
    for (_, weights), (_, others) in zip(*found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.sampled(1, long=1)
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "bounded", "staleness": 3}])
def test_one_asynchronous_worker_equals_sequential_sgd(mode: dict[str, Any]) -> None:
    """Whatever is done for old gradients: there are none."""
    batches = [batch_of(size, seed) for seed, size in enumerate((4, 7, 1, 4))]
    torch.manual_seed(0)
    model = MLP()
    alone = copy.deepcopy(model)
    plan = server_plan(1, shards=2, compensation=0.9, lr_scaling="staleness", clip_norm=0.05, **mode)
    with servers_in_threads(), served(model, plan) as trainer:
        found = train(trainer, [[one] for one in batches])
    optimizer, expected = SGD(alone.parameters()), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(alone(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        expected.append((loss.item(), [one.detach().clone() for one in alone.parameters()]))
    assert_equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_compensation_0_equals_async_to_the_bit(seed: int) -> None:
    """Also by the way of a compensation: one that is smaller than any rounding changes nothing in the same order."""
    runs = []
    for compensation in (0.0, 1e-300, 0.5):
        settings = make_settings(num_workers=4, mode="async", compensation=compensation)
        runs.append(play(settings, 6, pick=random.Random(seed).randrange))
    plain, barely, compensated = (run.weights() for run in runs)
    assert max(runs[0].servers[0].store.staleness) > 1  # type: ignore[union-attr]
    assert all(torch.equal(one, barely[name]) for name, one in plain.items())
    assert not any(torch.equal(one, compensated[name]) for name, one in plain.items())


@pytest.mark.parametrize(
    "changes",
    [
        dict(mode="sync"),
        dict(mode="sync", backups=1),
        dict(mode="async", compensation=0.4),
        dict(mode="bounded", staleness=1, lr_scaling="staleness"),
    ],
)
def test_a_recorded_order_of_arrival_replays_to_identical_weights(changes: dict[str, Any]) -> None:
    settings = make_settings(num_workers=3, **changes)
    recorded = play(settings, 6, pick=random.Random(4).randrange)
    again = ParameterServer()
    for _, peer, message in recorded.log:
        again.receive(peer, pack_message(message), 0.0)
    (server,) = recorded.servers
    assert again.store is not None and server.store is not None
    assert again.version == server.version > 0
    assert all(torch.equal(a, b) for a, b in zip(again.store.parameters, server.store.parameters, strict=True))
