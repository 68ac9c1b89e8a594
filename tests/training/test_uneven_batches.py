"""Batches of any size, spread over ranks in any way, of any shape, with any loss: the mean over all is exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import (
    MLP,
    assert_same,
    batch_of,
    batches_of,
    check_against_one_process,
    cross_entropy,
    cut,
    cut_evenly,
    data_plan,
    make_trainer,
    small_gpt,
    token_batch,
    train_alone,
    train_parallel,
)
from ranks import ranks
from torch import Tensor, nn

from weft.errors import DataError
from weft.training.data.trees import map_tensors

# ---- how samples are spread over ranks ----


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 4), (4, 4), (4, 4)],
        [(5, 3), (1, 7), (4, 4)],
        [(4, 4), (3, 0), (0, 3)],  # a rank without samples, after steps with all
        [(4, 0), (4, 4), (4, 4)],  # a rank without samples in the very first step
        [(0, 4), (4, 4), (4, 4)],  # and rank 0, which decides the order of buckets
        [(0, 4), (0, 4), (1, 4), (5, 5)],
        [(8, 8), (8, 8), (1, 0), (8, 8)],  # a short last batch after full ones, and full ones again
    ],
)
def test_any_spread_of_samples(sizes: list[tuple[int, int]], microbatches: int) -> None:
    steps = batches_of(*(sum(parts) for parts in sizes))
    check_against_one_process(MLP(), data_plan(2, microbatches=microbatches), list(map(cut, steps, sizes)))


@ranks(4)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_any_spread_of_samples_over_four_ranks(microbatches: int) -> None:
    sizes = [(0, 0, 1, 0), (3, 2, 2, 2), (0, 5, 0, 1), (2, 2, 2, 2)]
    steps = batches_of(*(sum(parts) for parts in sizes))
    check_against_one_process(MLP(), data_plan(4, microbatches=microbatches), list(map(cut, steps, sizes)))


@ranks(2)
def test_an_empty_global_batch_is_refused_on_every_rank() -> None:
    trainer = make_trainer(MLP(), data_plan(2))
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(*batch_of(0))


def test_an_empty_batch_is_refused_by_one_process_too() -> None:
    trainer = make_trainer(MLP(), data_plan(1))
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(*batch_of(0))
    assert trainer.steps_done == 0


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", ["built-in", "mean", "sum and count"])
def test_ignored_targets_anywhere(loss: str, microbatches: int) -> None:
    """Unevenly spread, all on one rank, a whole microbatch of them, and all but one in the run."""
    steps = [token_batch(8, seed=seed) for seed in range(4)]
    steps[0][1][0, :5] = steps[0][1][5, 2:] = -100
    steps[1][1][4:] = -100
    steps[2][1][:2] = steps[2][1][6:] = -100
    steps[3][1].fill_(-100)[7, 3] = 4
    losses = {"built-in": "cross-entropy", "mean": mean_cross_entropy, "sum and count": cross_entropy}
    model = small_gpt().double()
    plan = data_plan(2, microbatches=microbatches)
    check_against_one_process(model, plan, [cut_evenly(step, 2) for step in steps], loss=losses[loss])


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@ranks(2)
def test_a_loss_that_counts_for_itself_decides_what_a_target_is() -> None:
    """To such a loss -100 is a number like any other: a part full of them counts."""
    steps = [(inputs, torch.full_like(targets, -100)) for inputs, targets in batches_of(6, 6, 3)]
    steps[0][1][:3] = steps[1][1][3:] = 1

    def distance(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return ((output.sum(1) - targets) ** 2).sum(), 2 * len(targets)

    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=distance)
    trainer = make_trainer(model, data_plan(2), loss=distance)
    assert_same(train_parallel(trainer, [cut_evenly(step, 2) for step in steps]), alone)


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mean_over_samples_where_targets_are_no_integers(microbatches: int) -> None:
    steps = [(inputs, torch.sin(inputs[:, :3])) for inputs, _ in batches_of(8, 5, 7)]
    parts = [cut(steps[0], (4, 4)), cut(steps[1], (1, 4)), cut(steps[2], (7, 0))]
    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=lambda output, y: (((output - y) ** 2).mean(1).sum(), len(y)))
    trainer = make_trainer(model, data_plan(2, microbatches=microbatches), loss=F.mse_loss)
    assert_same(train_parallel(trainer, parts), alone)


@ranks(2)
def test_a_loss_with_a_fractional_count() -> None:
    """Weighted samples: the sum of weights is the count, and is below one on a rank."""
    weights = torch.linspace(0.1, 0.7, 6, dtype=torch.float64)
    steps = [(inputs, (targets, weights[: len(targets)])) for inputs, targets in batches_of(6, 5)]

    def weighted(logits: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        classes, weights = targets
        return (F.cross_entropy(logits, classes, reduction="none") * weights).sum(), weights.sum()

    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=weighted)
    trainer = make_trainer(model, data_plan(2), loss=weighted)
    mine = [map_tensors(lambda tensor: tensor[:2] if trainer.data_rank == 0 else tensor[2:], step) for step in steps]
    assert_same(train_parallel(trainer, [[part, part] for part in mine]), alone)


@ranks(2)
@pytest.mark.parametrize("counts", [(20_000_001, 3), (4096, 4095), (4095, 0), (2**30 + 1, 2**30 + 1)], ids=str)
def test_a_count_is_exact_beyond_what_a_float32_can_hold(counts: tuple[int, int]) -> None:
    model = MLP().float()
    rank = dist.get_rank()

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return output.sum(), counts[rank] * len(targets) // 2

    trainer = make_trainer(model, data_plan(2), loss=loss)
    for _ in range(2):
        trainer.step(torch.randn(2, 4), torch.zeros(2))
        assert trainer.counts.shared == sum(counts)


# ---- what a batch looks like ----


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.left(a) + scale * self.right(b)


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["tuple", "dict", "wrapped"])
def test_inputs_of_several_tensors(kind: str, microbatches: int) -> None:
    a, targets = batch_of(7)
    b, _ = batch_of(7, seed=1)
    inputs: Any = {"a": a, "b": b, "scale": 0.5} if kind == "dict" else (a, b)
    model = TwoInputs()
    alone = train_alone(copy.deepcopy(model), [(inputs, targets)])
    trained = HuggingFaceLike(model) if kind == "wrapped" else model
    trainer = make_trainer(trained, data_plan(2, microbatches=microbatches))
    rows = slice(0, 4) if trainer.data_rank == 0 else slice(4, 7)
    mine = map_tensors(lambda tensor: tensor[rows], inputs)
    loss = trainer.step(mine, targets[rows])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, alone[0].gradients[name], rtol=1e-12, atol=1e-14)
    assert float(loss) == pytest.approx(alone[0].loss, rel=1e-12)


class HuggingFaceLike(nn.Module):
    """A model whose output is an object with `.logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Any:
        class Output:
            logits = self.model(*args)

        return Output
