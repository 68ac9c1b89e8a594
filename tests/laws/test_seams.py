"""Future exchanges between replicas work with every method inside a replica.

Two stand-ins use only the contract of `sync/base.py`: replicas that train separately and average their weights every
second step, and replicas that exchange rounded gradients. Each must equal its own rule in plain torch while layers,
tokens, blocks or training state are sharded inside a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import (
    SGD,
    Batch,
    cross_entropy,
    cut_evenly,
    make_trainer,
    sequence_plan,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from torch import nn

from weft.checkpoint.local_parts import held_parameters
from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.mesh import Mesh
from weft.parallel import apply
from weft.parallel.tensor.shares import local_part
from weft.plan.plan import Plan
from weft.sync import make
from weft.sync.base import Sync, Totals

NUM_REPLICAS, NUM_STEPS, EVERY, GRAINS = 2, 4, 2, 64


def in_stages(plan: Plan) -> Plan:
    return replace(plan, axes=replace(plan.axes, pipeline=2))


PLANS = {
    "tensor 2, zero 1": tensor_plan(2, replicate=2, shard="optimizer", microbatches=2),
    "pipeline 2, zero 2": in_stages(tensor_plan(1, replicate=2, shard="gradients", microbatches=2)),
    "ring 2, zero 3": sequence_plan(ring=2, replicate=2, shard="parameters"),
    "data 2, zero 3": tensor_plan(1, data=2, replicate=2, shard="parameters", microbatches=2),
}


class Between:
    """A sync inside a replica, and this rank's exchange with its counterparts in the other replicas."""

    def __init__(self, inside: Sync, mesh: Mesh) -> None:
        self.inside = inside
        mesh.add_groups([("replicate", "between")])
        self.replicas = mesh.group("replicate", "between")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        totals = self.inside.finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)
        sums = torch.stack([totals.loss_sum.double(), totals.count.double()])
        all_reduce(sums, self.replicas)
        return Totals(loss_sum=sums[0], count=sums[1], norm=totals.norm)


class Averaging(Between):
    """Replicas that average their weights every few steps."""

    num_updates = 0

    def end_update(self) -> None:
        self.num_updates += 1
        if self.num_updates % EVERY == 0:
            for piece in self.inside.pieces:
                all_reduce(piece.tensor.data, self.replicas)
                piece.tensor.data /= self.replicas.size
        self.inside.publish()


class Rounding(Between):
    """Replicas that sum rounded gradients."""

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        totals = super().finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)
        for piece in self.inside.pieces:
            assert piece.tensor.grad is not None
            rounded(piece.tensor.grad)
            all_reduce(piece.tensor.grad, self.replicas)
        return totals


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(GRAINS).round_().div_(GRAINS)


def averaging_alone(models: list[nn.Module], step: int) -> None:
    if step % EVERY == 0:
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([parameter.detach() for parameter in same]).mean(0)
            for parameter in same:
                parameter.data.copy_(mean)


def rounding_alone(models: list[nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        total = sum(rounded(parameter.grad) for parameter in same)
        for parameter in same:
            parameter.grad = total.clone()


def train_replicas(batches: list[Batch], kind: type[Between]) -> list[nn.Module]:
    """Train every replica in plain torch on its part of each batch, by the rule of a stand-in."""
    torch.manual_seed(1)
    models: list[nn.Module] = [small_model() for _ in range(NUM_REPLICAS)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [SGD(model.parameters()) for model in models]
    for step, batch in enumerate(batches, start=1):
        count = batch[1].numel()
        for model, optimizer, (inputs, targets) in zip(
            models, optimizers, cut_evenly(batch, NUM_REPLICAS), strict=True
        ):
            optimizer.zero_grad()
            (cross_entropy(model(inputs), targets)[0] / count).backward()
        if kind is Rounding:
            rounding_alone(models)
        for optimizer in optimizers:
            optimizer.step()
        if kind is Averaging:
            averaging_alone(models, step)
    return models


def small_model() -> nn.Module:
    return small_gpt(num_layers=2, heads=4).double()


def only_inside(mesh: Mesh) -> tuple[Group, list[Group]]:
    return mesh.state_group("gradients"), []


@pytest.mark.sampled(1, long=3)
@ranks(4)
@pytest.mark.parametrize("kind", [Averaging, Rounding])
@pytest.mark.parametrize("name", PLANS)
def test_what_replicas_exchange_is_independent_of_what_is_inside(name: str, kind: type[Between]) -> None:
    batches = [token_batch(8, seed=seed) for seed in range(NUM_STEPS)]
    place: Callable[..., Sync] = apply.place
    torch.manual_seed(1)
    wrapped = mock.patch.object(apply, "place", lambda model, mesh, *a, **k: kind(place(model, mesh, *a, **k), mesh))
    with mock.patch.object(make, "reduction_groups", only_inside), wrapped:
        trainer = make_trainer(small_model(), PLANS[name], example=batches[0][0][:2])
    for batch in batches:
        trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
    mine = train_replicas(batches, kind)[trainer.mesh.index("replicate")]
    true = dict(mine.named_parameters())
    grid, rank = trainer.mesh.grid, trainer.mesh.world.rank
    for parameter_name, held in held_parameters(trainer.named_model, trainer.sync, trainer.layouts).items():
        part = local_part(true[parameter_name].detach(), held.layout, grid, rank)
        assert torch.allclose(held.tensor, part, rtol=0, atol=1e-12), parameter_name
