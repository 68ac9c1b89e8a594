"""The update under sharding: groups by global shape, schedule, clipping, skipped steps, replicas that differ."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    ADAMW,
    cut_evenly,
    data_plan,
    make_trainer,
    small_gpt,
    token_batch,
    train_alone,
)
from ranks import ranks
from torch import Tensor, nn
from whole_tensors import whole_tensors

from weft.checkpoint.local_parts import held_parameters
from weft.errors import DivergenceError
from weft.plan.plan import Plan, Precision
from weft.training.trainer import Trainer

STAGES = ("optimizer", "gradients", "parameters")


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter as one process would have it; collective."""
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    return {name: tensor.clone() for name, tensor in whole_tensors(held, trainer.mesh, lambda _, one: one.tensor)}


def step(trainer: Trainer, number: int) -> float:
    return float(trainer.step(*cut_evenly(token_batch(8, seed=number), trainer.data_size)[trainer.data_rank]))


# ---- groups, schedule, clipping ----


def decay_matrices(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What everybody does; a flat piece has one dim whatever the parameter has, so the global shape must decide."""
    settings: dict[str, Any] = {"weight_decay": 0.5 if len(shape) > 1 else 0.0}
    return settings | ({"lr": 3e-3} if name.startswith("embedding") else {})


def halve(number: int) -> float:
    return 0.5**number


def decaying_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return ADAMW([{"params": [p], **decay_matrices(name, tuple(p.shape))} for name, p in model.named_parameters()])


def check_groups(plan: Plan) -> None:
    model = small_gpt(bias=True, norm="layer").double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, plan, optimizer=ADAMW, groups=decay_matrices, schedule=halve)
    seen = train_alone(
        alone, [token_batch(8, seed=n) for n in range(4)], optimizer=decaying_adamw, clip_norm=0.3, schedule=halve
    )
    for number, expected in enumerate(seen):
        norm = torch.cat([g.flatten() for g in expected.gradients.values() if g is not None]).norm()
        assert step(trainer, number) == pytest.approx(expected.loss, rel=1e-12)
        assert trainer.grad_norm is not None and float(trainer.grad_norm) > 0.3
        assert float(norm) == pytest.approx(0.3, rel=1e-4), "the reference's gradients are those after clipping"
    for name, weight in whole_weights(trainer).items():
        torch.testing.assert_close(weight, seen[-1].weights[name], rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_groups_schedule_and_clipping_are_those_of_one_process(shard: str) -> None:
    check_groups(data_plan(2, shard=shard, microbatches=2, clip_norm=0.3, bucket_bytes=2000))


@ranks(4)
def test_also_two_by_two() -> None:
    check_groups(data_plan(2, replicate=2, shard="parameters", microbatches=2, clip_norm=0.3))


@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_the_norm_is_that_of_all_parts_together(shard: str) -> None:
    model = small_gpt().double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, shard=shard, clip_norm=1e-3))
    step(trainer, 0)
    inputs, targets = token_batch(8, seed=0)
    F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten()).backward()
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    assert float(trainer.grad_norm) == pytest.approx(float(expected), rel=1e-12)  # type: ignore[arg-type]


# ---- a gradient that is not finite ----


class Poison:
    """Cross-entropy that one rank can be told to spoil."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * self.factor, targets.numel()


def kept_state(trainer: Trainer) -> list[Tensor]:
    """Masters, what the model computes with, and moments, copied."""
    pieces = [piece.tensor for piece in trainer.sync.pieces]
    moments = [value for p in pieces for value in trainer.optimizer.state[p].values()]
    parts = [flat.mine for flat in trainer.sync.flats]
    whole = [] if trainer.plan.data.shard == "parameters" else trainer.named_model.parameters()
    return [tensor.detach().clone() for tensor in (*pieces, *moments, *parts, *whole)]


def check_skip(plan: Plan, poison: float) -> None:
    def make() -> tuple[Trainer, Poison]:
        torch.manual_seed(1)
        loss = Poison()
        return make_trainer(small_gpt(), plan, optimizer=ADAMW, loss=loss), loss

    (spoilt, loss), (other, _) = make(), make()
    assert step(spoilt, 0) == step(other, 0)
    before = kept_state(spoilt)
    loss.factor = poison if spoilt.mesh.world.rank == 1 else 1.0
    step(spoilt, 1)
    assert all(torch.equal(now, then) for now, then in zip(kept_state(spoilt), before, strict=True))
    assert (spoilt.num_skipped, spoilt.steps_done, other.num_skipped) == (1, 2, 0)
    assert spoilt.grad_norm is not None and not math.isfinite(float(spoilt.grad_norm))
    loss.factor = 1.0
    for number in (2, 3):
        assert step(spoilt, number) == step(other, number)
    assert spoilt.num_skipped == 1


BF16 = Precision(compute="bf16")


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize(("precision", "poison"), [(Precision(), math.inf), (BF16, math.nan)], ids=["clipped", "bf16"])
@pytest.mark.parametrize("shard", ["nothing", *STAGES])
def test_one_bad_gradient_skips_the_step_on_all_ranks(shard: str, precision: Precision, poison: float) -> None:
    plan = data_plan(2, shard=shard, microbatches=2, clip_norm=0.0 if precision == BF16 else 0.1)
    check_skip(dataclasses.replace(plan, precision=precision), poison)


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("shard", STAGES)
def test_one_bad_gradient_skips_the_step_on_all_replicas(shard: str) -> None:
    check_skip(data_plan(2, shard=shard, replicate=2, clip_norm=0.1), math.nan)


# ---- replicas that differ ----


def flip(tensor: Tensor) -> None:
    """Change the last bit of the last number."""
    words = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    words[-1] ^= 1


def largest(trainer: Trainer) -> Any:
    """Of a piece that this rank has something of: blocks.1.mlp.up.weight has 384 elements."""
    return next(piece for piece in trainer.sync.pieces if piece.tensor.numel() and "blocks.1.mlp" in piece.name)


def frozen_part(trainer: Trainer) -> Tensor:
    return next(flat.mine for flat in trainer.sync.flats if not flat.trainable)


PLACES: dict[str, Callable[[Trainer], Tensor]] = {
    r"weight blocks\.1\.mlp": lambda trainer: largest(trainer).tensor,
    r"optimizer state blocks\.1\.mlp.*exp_avg": lambda trainer: trainer.optimizer.state[largest(trainer).tensor][
        "exp_avg"
    ],
    r"weight blocks\.0\.": frozen_part,
}


def diverging(plan: Plan) -> Trainer:
    model = small_gpt()
    model.blocks[0].requires_grad_(False)
    trainer = make_trainer(model, plan, optimizer=ADAMW)
    step(trainer, 0)
    trainer.check_divergence()
    return trainer


@pytest.mark.sampled(3)
@ranks(4)
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("what", PLACES)
def test_a_replica_of_a_part_that_differs_is_named(what: str, precision: Precision) -> None:
    """Ranks 1 and 3 keep the same part."""
    plan = data_plan(2, replicate=2, shard="parameters", check_every=0)
    trainer = diverging(dataclasses.replace(plan, precision=precision))
    if trainer.mesh.world.rank == 3:
        flip(PLACES[what](trainer))
    if trainer.mesh.world.rank in (1, 3):
        with pytest.raises(DivergenceError, match=rf"{what}.* on rank 3 differs from rank 1"):
            trainer.check_divergence()
    else:
        trainer.check_divergence()


@ranks(2)
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("name", ["blocks.1.mlp.up.weight", "blocks.0.mlp.up.weight"])
@pytest.mark.parametrize("shard", STAGES[:2])
def test_a_whole_parameter_that_differs_is_named(shard: str, name: str, precision: Precision) -> None:
    trainer = diverging(dataclasses.replace(data_plan(2, shard=shard, check_every=0), precision=precision))
    if trainer.data_rank == 1:
        flip(trainer.model.get_parameter(name))
    with pytest.raises(DivergenceError, match=rf"weight {name} on rank 1 differs from rank 0"):
        trainer.check_divergence()


@ranks(2)
def test_the_check_comes_by_itself() -> None:
    trainer = diverging(data_plan(2, shard="gradients", check_every=2))
    if trainer.data_rank == 0:
        flip(trainer.model.get_parameter("blocks.0.mlp.up.weight"))
    with pytest.raises(DivergenceError, match=r"after step 2 .*blocks\.0\.mlp\.up\.weight"):
        step(trainer, 1)
