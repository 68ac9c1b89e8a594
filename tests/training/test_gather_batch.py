"""`weft.gather_batch`: contrastive losses over the samples of all data ranks, equal to one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import verify
from oracle import SGD, Batch, data_plan, make_trainer, pipeline_plan, sequence_plan, small_gpt, tensor_plan
from ranks import ranks
from torch import Tensor, nn

import weft
from weft.errors import DataError, ModelError, PlanError
from weft.plan.plan import Axes, Plan


class Towers(nn.Module):
    """Two encoders and a scale, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(image), self.text(text), self.scale


def whole_batch(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Every rank computes the loss of the whole batch."""
    image, text = (F.normalize(weft.gather_batch(one), dim=-1) for one in output[:2])
    logits = output[2].exp() * image @ text.T
    places = torch.arange(len(logits))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def own_rows(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Every rank compares its own samples with all; targets are places in the whole batch."""
    image, text, scale = output
    there = F.normalize(weft.gather_batch(text), dim=-1)
    return F.cross_entropy(scale.exp() * F.normalize(image, dim=-1) @ there.T, targets)


def sums(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    return own_rows(output, targets) * len(targets), len(targets)


LOSSES = (whole_batch, own_rows, sums)


def pairs(num_samples: int, seed: int = 0) -> Batch:
    drawn = torch.randn(2, num_samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn[0], drawn[1]), torch.arange(num_samples)


def part_of(num_samples: int, sizes: tuple[int, int], rank: int) -> Batch:
    """A rank's part of a batch."""
    (image, text), targets = pairs(num_samples)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return (image[rows], text[rows]), targets[rows]


def check(plan: Plan) -> None:
    batches = [pairs(9), pairs(6, seed=1)]
    for loss in LOSSES:
        verify(Towers(), plan, loss=loss, optimizer=SGD, batches=batches, device="cpu").require()


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_two_data_ranks(shard: str) -> None:
    check(data_plan(2, shard=shard))


@pytest.mark.long
@ranks(4)
def test_four_ranks() -> None:
    hybrid = data_plan(2, replicate=2, shard="parameters")
    for plan in (data_plan(4), tensor_plan(2, data=2), hybrid, dataclasses.replace(hybrid, axes=_other_order())):
        check(plan)


def _other_order() -> Axes:
    """Data outside of replicas: the order of ranks is not that of their samples."""
    axes = Axes(data=2, replicate=2)
    order = list(axes.order)
    i, j = order.index("replicate"), order.index("data")
    order[i], order[j] = order[j], order[i]
    return dataclasses.replace(axes, order=tuple(order))


@ranks(4)
def test_behind_a_pipeline() -> None:
    def pooled(logits: Tensor, targets: Tensor) -> Tensor:
        features = F.normalize(weft.gather_batch(logits.mean(1)), dim=-1)
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))

    tokens = torch.randint(17, (5, 8), generator=torch.Generator().manual_seed(0))
    batches = [(tokens, torch.arange(5))] * 2
    plan = pipeline_plan(2, data=2)
    verify(small_gpt(), plan, loss=pooled, optimizer=SGD, batches=batches, device="cpu").require()


def test_one_process_has_all_samples() -> None:
    image = torch.randn(3, 2)
    assert weft.gather_batch(image) is image
    trainer = make_trainer(Towers().double(), data_plan(1), loss=whole_batch)
    assert float(trainer.step(*pairs(4))) > 0


def test_microbatches_are_refused() -> None:
    trainer = make_trainer(Towers().double(), data_plan(1, microbatches=2), loss=whole_batch)
    with pytest.raises(PlanError, match=r"microbatches = 2 computes a part of them.*microbatches = 1"):
        trainer.step(*pairs(4))


@ranks(2)
def test_refusals_on_all_ranks() -> None:
    trainer = make_trainer(Towers().double(), data_plan(2, microbatches=2), loss=whole_batch)
    rank = trainer.data_rank
    with pytest.raises(PlanError, match="microbatches = 2"):
        trainer.step(*part_of(6, (3, 3), rank))
    trainer = make_trainer(Towers().double(), data_plan(2), loss=whole_batch)
    trainer.step(*part_of(6, (4, 2), rank))
    with pytest.raises(DataError, match="data rank 1 has no samples in this batch of 6"):
        trainer.step(*part_of(6, (6, 0), rank))
    trainer = make_trainer(Towers().double(), data_plan(2), loss=whole_batch)
    with pytest.raises((DataError, ModelError), match="data rank 0 has no samples"):  # also in the first step
        trainer.step(*part_of(6, (0, 6), rank))

    class Gathering(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return weft.gather_batch(super().forward(inputs))

    trainer = make_trainer(Gathering(4, 3), data_plan(2), loss="cross-entropy")
    with pytest.raises(ModelError, match="was called by the model"):
        trainer.step(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    trainer = make_trainer(small_gpt(), sequence_plan(ring=2), loss=lambda o, t: weft.gather_batch(o).mean())
    with pytest.raises(PlanError, match="ring = 2 .* each rank has only a part of every sample"):
        trainer.step(tokens, tokens)
    images = torch.randn(2, 3, 8, 8)  # split by rows, where the loss is that of one process and is not tried
    rows = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    trainer = make_trainer(rows, sequence_plan(ring=2), loss=lambda o, t: weft.gather_batch(o).mean(), example=images)
    with pytest.raises(PlanError, match="ring = 2 .* each rank has only a part of every sample"):
        trainer.step(images, torch.zeros(2, dtype=torch.int64))


@ranks(2)
def test_a_refusal_in_the_loss_is_the_same_on_ranks_that_have_no_loss() -> None:
    """Only the last stage calls the loss; the first is told what to do, not that a rank failed."""
    tokens, plan = torch.zeros(4, 8, dtype=torch.int64), pipeline_plan(2, microbatches=2)
    trainer = make_trainer(small_gpt(), plan, loss=lambda o, t: weft.gather_batch(o).mean(), example=tokens[:2])
    with pytest.raises((PlanError, ModelError), match=r"^the loss calls weft.gather_batch.*microbatches = 2"):
        trainer.step(tokens, tokens)


@ranks(2)
def test_places_in_the_batch_are_refused_on_all_stages_alike() -> None:
    """Only the last stage calls the loss, and every stage has the refusal."""

    def places(output: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output[:, 0] @ output[:, 0].mT, torch.arange(4) + 0 * targets[:, 0])

    inputs = torch.zeros(4, 8, dtype=torch.int64)
    trainer = make_trainer(small_gpt(), pipeline_plan(2, microbatches=2), loss=places, example=inputs[:2])
    with pytest.raises(ModelError, match="the loss failed on rank 1 with its part of the batch"):
        trainer.step(inputs, inputs)


@ranks(2)
def test_evaluation() -> None:
    trainer = make_trainer(Towers().double(), data_plan(2), loss=whole_batch)
    rank = dist.get_rank()
    for _ in range(2):  # before anything is known of the loss, and after
        with torch.no_grad():
            expected = float(whole_batch(trainer.model(*pairs(5)[0]), pairs(5)[1]))
        assert trainer.evaluate([part_of(5, (3, 2), rank)]) == pytest.approx(expected, rel=1e-12)
    part = part_of(5, (3, 2), rank)
    with pytest.raises(DataError, match="data rank 1 has no samples"):
        trainer.evaluate([part] * (2 - rank))
