"""Training with parameter servers against one process that sees whole batches: weights and losses in float64."""

from __future__ import annotations

import copy
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import MLP, SGD, batch_of, cut, cut_evenly, make_trainer, small_gpt, token_batch, train_alone
from ranks import gathered, ranks
from served_training import served, server_plan
from torch import Tensor, nn

import weft
from weft.errors import DataError
from weft.plan.plan import Axes, Codec, Plan, Precision
from weft.training.data.datasets import TensorSamples
from weft.training.trainer import Trainer

Batch = tuple[Tensor, Tensor]
ALL_ENTRIES = Codec(name="topk", density=1.0, dense_below=1)
"""Loses nothing."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def train(trainer: Trainer, steps: Sequence[Sequence[Batch]]) -> list[tuple[float, dict[str, Tensor]]]:
    """`steps[step][worker]` is a worker's part of a batch."""
    return [(float(trainer.step(*parts[trainer.data_rank])), weights_of(trainer.named_model)) for parts in steps]


def assert_equals_one_process(
    found: Sequence[tuple[float, dict[str, Tensor]]],
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    **settings: Any,
) -> None:
    whole = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]
    for (loss, weights), expected in zip(found, train_alone(model, whole, **settings), strict=True):
        assert loss == pytest.approx(expected.loss, rel=1e-10)
        for name, one in weights.items():
            torch.testing.assert_close(one, expected.weights[name], rtol=1e-10, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("microbatches", "clip_norm", "sizes"), [(1, 0.0, [4, 4]), (2, 0.05, [5, 1]), (1, 0.05, [6, 0])]
)
def test_workers_equal_one_process(shards: int, microbatches: int, clip_norm: float, sizes: list[int]) -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    steps = [cut(batch_of(sum(sizes), seed), sizes) for seed in range(4)]
    plan = server_plan(2, microbatches=microbatches, clip_norm=clip_norm, shards=shards)
    with served(model, plan) as trainer:
        found = train(trainer, steps)
        assert trainer.data_size == 2
    assert_equals_one_process(found, alone, steps, clip_norm=clip_norm)


@ranks(4)
def test_a_language_model_of_four_workers_with_adamw_and_a_schedule() -> None:
    torch.manual_seed(dist.get_rank())  # the first worker's first values count
    model = small_gpt().double()
    steps = [cut_evenly(token_batch(8 - step % 3, seed=step), 4) for step in range(4)]

    def schedule(step: int) -> float:
        return 1.0 / (1 + step)

    plan = server_plan(4, bucket_bytes=4096, shards=3)
    first = gathered(weights_of(model))[0]
    make: Callable[[Any], torch.optim.Optimizer] = lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1)  # noqa: E731
    with served(model, plan, optimizer=make, schedule=schedule) as trainer:
        found = train(trainer, steps)
    alone = small_gpt().double()
    alone.load_state_dict(first, strict=False)  # the head is the embedding
    assert_equals_one_process(found, alone, steps, optimizer=lambda one: make(one.parameters()), schedule=schedule)


class Branches(nn.Module):
    """Each sample goes through one of three layers, so that workers use different ones, and one is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output = x[:, :3] * 0
        for number, layer in enumerate(self.layers):
            rows = (x[:, 0] == number).nonzero().flatten()
            if len(rows):
                output = output.index_add(0, rows, layer(x[rows]))
        return output


@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [50, 10_000])
def test_parameters_that_some_workers_use(bucket_bytes: int) -> None:
    model = Branches()
    alone = copy.deepcopy(model)
    steps = []
    for step, route in enumerate(["0000", "0110", "1100", "2210"]):
        inputs, targets = batch_of(4, step)
        inputs[:, 0] = torch.tensor([int(one) for one in route], dtype=torch.float64)
        steps.append(cut_evenly((inputs, targets), 2))

    def make(given: Any) -> torch.optim.Optimizer:  # decays weights, so a gradient of zero is not that of nobody
        return torch.optim.AdamW(given, lr=1e-2, weight_decay=0.5)

    with served(model, server_plan(2, bucket_bytes=bucket_bytes), optimizer=make) as trainer:
        found = train(trainer, steps)
    assert_equals_one_process(found, alone, steps, optimizer=lambda one: make(one.parameters()))


@ranks(2)
def test_data_of_all_workers_over_epochs() -> None:
    inputs, targets = batch_of(22, 0)
    dataset = TensorSamples(inputs, targets)
    model = MLP()
    alone = copy.deepcopy(model)
    with served(model, server_plan(2)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in weft.batches(dataset, trainer, global_batch=5, epochs=2)]
        held_out = trainer.evaluate(weft.batches(dataset, trainer, global_batch=5))
    expected = []
    optimizer = SGD(alone.parameters())
    for _ in range(2):
        for start in range(0, 22, 5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(alone(inputs[start : start + 5]), targets[start : start + 5])
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-10)
    whole = nn.functional.cross_entropy(alone(inputs), targets)
    assert held_out == pytest.approx(whole.item(), rel=1e-10)


@ranks(2)
def test_a_loss_that_is_not_finite_skips_the_update_of_all() -> None:
    inputs, targets = batch_of(4, 0)
    bad = inputs.clone()
    bad[0] = math.nan
    with served(MLP(), server_plan(2), skip_at_most=1) as trainer:
        before = weights_of(trainer.named_model)
        parts = cut_evenly((bad, targets), 2)[trainer.data_rank]
        assert math.isnan(trainer.step(*parts))
        after = weights_of(trainer.named_model)
        assert all(torch.equal(before[name], one) for name, one in after.items())
        assert trainer.num_skipped == 1
        trainer.step(*cut_evenly((inputs, targets), 2)[trainer.data_rank])
        assert not all(torch.equal(before[name], one) for name, one in weights_of(trainer.named_model).items())


@ranks(2)
def test_a_batch_in_which_no_worker_has_a_target() -> None:
    inputs, targets = batch_of(4, 0)
    with served(MLP(), server_plan(2)) as trainer:
        with pytest.raises(DataError, match="no rank has a target"):
            trainer.step(inputs, torch.full_like(targets, -100))


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
@pytest.mark.parametrize(
    "mode", [dict(mode="async"), dict(mode="bounded", staleness=2), dict(mode="bounded", staleness=0)]
)
def test_one_worker_without_bounds_is_one_process(mode: dict[str, Any], clip_norm: float) -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    steps = [[batch_of(4, seed)] for seed in range(4)]
    with served(model, server_plan(1, shards=2, clip_norm=clip_norm, **mode)) as trainer:
        found = train(trainer, steps)
    assert_equals_one_process(found, alone, steps, clip_norm=clip_norm)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_worker_in_16_bits_computes_with_what_servers_have(compute: str) -> None:
    """Servers have the weights in float32, of which the worker has copies."""
    torch.manual_seed(0)
    model = small_gpt()
    alone = copy.deepcopy(model)
    precision = Precision(compute=compute)
    steps = [token_batch(4, seed=seed) for seed in range(4)]
    with served(model, replace(server_plan(1, shards=2, bucket_bytes=4096), precision=precision)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in steps]
        held_out = trainer.evaluate([token_batch(4, seed=9)])
    unserved = make_trainer(alone, Plan(precision=precision))
    assert losses == pytest.approx([float(unserved.step(*batch)) for batch in steps], rel=1e-5)
    assert held_out == pytest.approx(unserved.evaluate([token_batch(4, seed=9)]), rel=1e-5)


@ranks(2)
def test_asynchronous_workers_train() -> None:
    model = MLP()
    with served(model, server_plan(2, mode="async")) as trainer:
        losses = [float(trainer.step(*batch_of(8, 0))) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


@ranks(4, fresh=True)
@pytest.mark.parametrize(
    ("axes", "codec"),
    [
        (dict(tensor=2), Codec()),
        (dict(pipeline=2), Codec()),
        (dict(ring=2), Codec()),
        pytest.param(dict(tensor=2), ALL_ENTRIES, marks=pytest.mark.long),
        pytest.param(dict(pipeline=2), ALL_ENTRIES, marks=pytest.mark.long),
        pytest.param(dict(ring=2), ALL_ENTRIES, marks=pytest.mark.long),
    ],
)
def test_workers_of_two_ranks(axes: dict[str, int], codec: Codec) -> None:
    """Each worker is a world of its own; each of its ranks compresses what it sends."""
    rank = dist.get_rank()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = gathered(probe.getsockname()[1])[0]
    dist.destroy_process_group()
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(0)
    model = small_gpt().double()
    whole = copy.deepcopy(model)
    plan = server_plan(2, bucket_bytes=4096, shards=2, microbatches=2, clip_norm=0.0)
    plan = replace(plan, axes=Axes(data=2, **axes), codec=codec)
    steps = [cut_evenly(token_batch(8, seed=step), 2) for step in range(3)]
    with served(model, plan, example=token_batch(2)[0]) as trainer:
        assert trainer.mesh.world.size == 2 and trainer.data_rank == rank // 2
        losses = [float(trainer.step(*parts[trainer.data_rank])) for parts in steps]
        held_out = trainer.evaluate([token_batch(4, seed=9)])
    batches = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]
    expected = [seen.loss for seen in train_alone(whole, batches)]
    assert losses == pytest.approx(expected, rel=1e-10)
    inputs, targets = token_batch(4, seed=9)
    loss = nn.functional.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
    assert held_out == pytest.approx(loss.item(), rel=1e-9)
