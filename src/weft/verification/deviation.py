"""The deviation of a lossy plan from what it replaces: reported, and a failure only where no rounding explains it.

A plan of 16-bit numbers is run once more as it stands, against one process in float32. A rule of its own, such as
delayed weights or local steps, is compared with plain training in one process: the effect of the rule, not of its
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values
from weft.mesh import Mesh
from weft.parallel.tensor.shares import local_part
from weft.training.data.trees import map_tensors
from weft.training.trainer import Trainer
from weft.verification.compare import broadcast_tensors, from_first, local_tensors, loss_error, not_nan, step_on_part
from weft.verification.one_process import OneProcess
from weft.verification.oracles import Oracle
from weft.verification.replicas import LocalReplicas
from weft.verification.verdict import LARGEST_LOSS_DEVIATION, Deviation

Batch = tuple[Any, Any]


def measure_rounding(
    trainer: Trainer, reference: OneProcess | LocalReplicas | None, batches: Sequence[Batch]
) -> Deviation:
    """A plan as it stands against one process in float32, which rank 0 has; collective."""
    mesh, device = trainer.mesh, trainer.mesh.world.device
    loss, gradient = 0.0, 0.0
    start = {} if reference is None else {name: one.clone() for name, one in reference.final_weights.items()}
    for batch in batches:
        skipped = trainer.num_skipped
        mine = step_on_part(trainer, batch)
        is_updated = trainer.num_skipped == skipped
        whole = map_tensors(lambda tensor: tensor.to(device), batch)
        updated = dict(gather_values([mesh.replica, is_updated], mesh.everyone("control")))
        true = [math.nan] * mesh.num_replicas
        if reference is not None:
            reference.step(*whole, updates=[updated[replica] for replica in range(mesh.num_replicas)])
            true = [math.nan if one is None else one for one in reference.returned]
        true = from_first(true, mesh)
        if not (math.isnan(true[mesh.replica]) and math.isnan(mine)):  # a replica without targets has no loss
            loss = max(loss, loss_error(mine, true[mesh.replica]))
        if all(updated.values()):
            gradient = max(gradient, not_nan(_gradient_deviation(trainer, reference)))
    movement = None if trainer.plan.codec.name == "none" else not_nan(_movement_deviation(trainer, reference, start))
    # Replicas that differ have losses, and loss scales, of their own.
    worst = torch.tensor([loss, gradient, trainer.num_skipped], dtype=torch.float64)
    all_reduce(worst, mesh.everyone("control"), op="max")
    loss, gradient, num_skipped = worst.tolist()
    return Deviation(
        against="one process in float32" if mesh.num_replicas == 1 else f"{LocalReplicas.rule}, in float32",
        loss=loss,
        gradient=gradient,
        movement=movement,
        limit=LARGEST_LOSS_DEVIATION,
        num_skipped=int(num_skipped),
        num_steps=len(batches),
    )


@torch.no_grad()
def measure_rule(
    oracle: Oracle | None, plain: OneProcess | None, batches: Sequence[Batch], mesh: Mesh, *, against: str
) -> Deviation:
    """A rule of its own in one process against plain training there; rank 0 has both; collective."""
    loss, movement = 0.0, 0.0
    if oracle is not None and plain is not None:
        start = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
        for batch, theirs in zip(batches, oracle.losses, strict=True):
            whole = map_tensors(lambda tensor: tensor.to(mesh.world.device), batch)
            with torch.enable_grad():
                true = plain.step(*whole)
            loss = max(loss, loss_error(theirs, true))
        off, moved = 0.0, 0.0
        ends = oracle.final_weights
        for name, weight in plain.model.named_parameters():
            off += float((ends[name] - weight).square().sum())
            moved += float((weight - start[name]).square().sum())
        movement = (off / max(moved, 1e-300)) ** 0.5
    loss, movement = from_first([loss, movement], mesh)
    return Deviation(against=against, loss=loss, movement=movement)


@torch.no_grad()
def _movement_deviation(
    trainer: Trainer, reference: OneProcess | LocalReplicas | None, start: dict[str, torch.Tensor]
) -> float:
    """Distance of all ranks' weights from the reference's, relative to the distance that those moved; collective."""
    mesh = trainer.mesh
    moved = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
    ends = {key: t for key, t in reference.tensors() if key.what == "weight"} if reference else {}
    begins = {key._replace(what="start"): start[key.name] for key in ends}
    held = {local.key: local for local in local_tensors(trainer, is_drained=True) if not local.is_copy}
    known = dict(broadcast_tensors({**ends, **begins}, mesh))
    for key, local in held.items():
        if key.what == "weight" and local.tensor is not None:
            whole = (known[key], known[key._replace(what="start")])
            true, begin = (local_part(one, local.layout, mesh.grid, mesh.world.rank) for one in whole)
            moved += torch.stack([(local.tensor.to(true) - true).square().sum(), (true - begin).square().sum()])
    moved = moved.cpu()
    all_reduce(moved, mesh.everyone("control"))
    return float((moved[0] / moved[1].clamp(min=1e-300)).sqrt())


@torch.no_grad()
def _gradient_deviation(trainer: Trainer, reference: OneProcess | LocalReplicas | None) -> float:
    """Relative deviation of all ranks' gradients together; a replicated gradient counts once per replica."""
    mesh = trainer.mesh
    sent = {key: t for key, t in reference.tensors() if key.what == "gradient"} if reference else {}
    held = {local.key: local for local in local_tensors(trainer, is_drained=True)}
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
    for key, true in broadcast_tensors(sent, mesh):
        local = held.get(key)
        if local is not None:
            part = local_part(true, local.layout, mesh.grid, mesh.world.rank)
            mine = torch.zeros_like(part) if local.tensor is None else local.tensor.to(part)
            squares += torch.stack([(mine - part).square().sum(), part.square().sum()])
    squares = squares.cpu()
    all_reduce(squares, mesh.everyone("control"))
    return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())
