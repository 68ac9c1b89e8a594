"""What a trainer does besides the exchange: clipping, groups, schedules, evaluation, generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import (
    MLP,
    SGD,
    assert_same,
    batches_of,
    call,
    check_against_one_process,
    cross_entropy,
    cut,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    small_convnet,
    small_gpt,
    train_alone,
    train_parallel,
)
from ranks import ranks
from torch import nn

# ---- what happens to a gradient after the exchange ----


@ranks(2)
@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_clipping_is_that_of_torch(clip_norm: float) -> None:
    """Also where the shared count must be corrected in the same pass."""
    steps = batches_of(8, 3, 8)
    parts = [cut(steps[0], (4, 4)), cut(steps[1], (3, 0)), cut(steps[2], (2, 6))]
    check_against_one_process(MLP(), data_plan(2, clip_norm=clip_norm), parts)


@ranks(2)
def test_the_norm_before_clipping_is_told() -> None:
    model = MLP()
    steps = batches_of(6, 3)
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, clip_norm=0.05))
    optimizer = SGD(alone.parameters())
    for step in steps:
        trainer.step(*cut_evenly(step, 2)[trainer.data_rank])
        optimizer.zero_grad()
        total, count = cross_entropy(call(alone, step[0]), step[1])
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        assert trainer.grad_norm is not None
        assert float(trainer.grad_norm) == pytest.approx(float(norm), rel=1e-12)


@ranks(2)
def test_parameter_groups_and_a_schedule() -> None:
    def groups(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        settings: dict[str, Any] = {"weight_decay": 0.3 if len(shape) > 1 else 0.0}
        return {**settings, "lr": 0.02} if name.startswith("last") else settings

    def schedule(step: int) -> float:
        return 1.0 / (1 + step)

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        named = [({**groups(n, tuple(p.shape)), "params": [p]}) for n, p in model.named_parameters()]
        return torch.optim.AdamW(named, lr=0.01)

    model = MLP()
    steps = batches_of(6, 6, 4, 6)
    alone = train_alone(copy.deepcopy(model), steps, optimizer=grouped, schedule=schedule)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    trainer = make_trainer(model, data_plan(2), optimizer=make, groups=groups, schedule=schedule)
    assert [(g["weight_decay"], g["lr"], len(g["params"])) for g in trainer.optimizer.param_groups] == [
        (0.3, 0.01, 2),
        (0.0, 0.01, 2),
        (0.3, 0.02, 1),
        (0.0, 0.02, 1),
    ]
    assert_same(train_parallel(trainer, [cut_evenly(step, 2) for step in steps]), alone)


# ---- evaluation ----


@ranks(2)
def test_evaluation_is_the_mean_over_all_ranks_and_wakes_nothing() -> None:
    model = small_convnet().double()
    trainer = make_trainer(model, data_plan(2, microbatches=2))
    model.stem_norm.eval()  # frozen by the user, and to stay so
    sizes = (5, 3, 0) if trainer.data_rank == 0 else (2,)
    mine = [image_batch(size, seed=10 * trainer.data_rank + number) for number, size in enumerate(sizes)]
    everything = [image_batch(5), image_batch(3, seed=1), image_batch(2, seed=10)]
    found = trainer.evaluate(mine)
    assert model.training and not model.stem_norm.training and model.blocks[0].norm1.training
    model.eval()
    with torch.no_grad():
        sums = [cross_entropy(model(images), classes) for images, classes in everything]
    assert found == pytest.approx(float(sum(s for s, _ in sums) / 10), rel=1e-12)
    assert torch.equal(model.stem_norm.running_mean, torch.zeros_like(model.stem_norm.running_mean))


@ranks(2)
def test_every_rank_generates_the_same_text() -> None:
    torch.manual_seed(dist.get_rank())
    model = small_gpt(dropout=0.5)
    trainer = make_trainer(model, data_plan(2))
    model.blocks[0].eval()
    text = trainer.generate([1, 2, 3], num_tokens=12, context=8, seed=5)
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, text)
    assert everybodys[0] == everybodys[1] and len(text) == 15
    assert model.training and not model.blocks[0].training
    greedy = trainer.generate([1], num_tokens=3, context=8, temperature=0)
    model.eval()
    assert greedy[1] == int(model(torch.tensor([[1]]))[0, -1].argmax())
