"""How far a lossy plan is from what it stands in for: reported, and only failed where no rounding explains it.

A plan of 16-bit numbers is run once more as it stands, beside one process in float32. A rule of its own, such as late
weights, is beside plain training in one process: what the delay changes, not how it is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.objects import gather_values
from weft.layout import part_of
from weft.mesh import Mesh
from weft.parallel.tensor.shares import local_part
from weft.training.data.trees import map_tensors, num_samples, split_tree
from weft.training.trainer import Trainer
from weft.verification.compare import own_tensors, receive
from weft.verification.one_process import Key, OneProcess
from weft.verification.oracles import Oracle
from weft.verification.verdict import LARGEST_LOSS_DEVIATION, Deviation

Batch = tuple[Any, Any]


def rounding(trainer: Trainer, reference: OneProcess | None, batches: Sequence[Batch]) -> Deviation:
    """A plan as it stands against one process in float32, which rank 0 has; collective."""
    device = trainer.mesh.world.device
    loss, gradient = 0.0, 0.0
    for inputs, targets in batches:
        start, stop = part_of(num_samples(inputs), trainer.data_rank, trainer.data_size)
        skipped = trainer.num_skipped
        mine = float(trainer.step(split_tree(inputs, start, stop), split_tree(targets, start, stop)))
        is_updated = trainer.num_skipped == skipped
        whole = map_tensors(lambda tensor: tensor.to(device), (inputs, targets))
        true = _from_first(reference.step(*whole, update=is_updated) if reference else 0.0, trainer.mesh)
        loss = _larger(loss, abs(mine - true) / max(abs(true), 1e-30))
        if is_updated:
            gradient = _larger(gradient, _gradient_deviation(trainer, reference))
    return Deviation(
        against="one process in float32",
        loss=loss,
        gradient=gradient,
        limit=LARGEST_LOSS_DEVIATION,
        num_skipped=trainer.num_skipped,
        num_steps=len(batches),
    )


@torch.no_grad()
def of_rule(oracle: Oracle | None, plain: OneProcess | None, batches: Sequence[Batch], mesh: Mesh) -> Deviation:
    """What a rule of its own gave in one process, against plain training there; rank 0 has both; collective."""
    loss, movement = 0.0, 0.0
    if oracle is not None and plain is not None:
        start = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
        for (inputs, targets), theirs in zip(batches, oracle.losses, strict=True):
            whole = map_tensors(lambda tensor: tensor.to(mesh.world.device), (inputs, targets))
            with torch.enable_grad():
                true = plain.step(*whole)
            loss = _larger(loss, abs(theirs - true) / max(abs(true), 1e-30))
        off, way = 0.0, 0.0
        ends = {key.name: tensor for key, tensor in oracle.tensors(is_settled=True) if key.what == "weight"}
        for name, weight in plain.model.named_parameters():
            off += float((ends[name] - weight).square().sum())
            way += float((weight - start[name]).square().sum())
        movement = (off / max(way, 1e-300)) ** 0.5
    loss, movement = (_from_first(value, mesh) for value in (loss, movement))
    return Deviation(against="one process without delays", loss=loss, movement=movement)


def _larger(one: float, other: float) -> float:
    # NaN compares false with everything, and would pass for small.
    return max(one, float("inf") if other != other else other)


def _from_first(value: float, mesh: Mesh) -> float:
    """Rank 0's number, on every rank."""
    sent = torch.tensor([value], dtype=torch.float64, device=mesh.world.device)
    broadcast(sent, mesh.everyone("control"))
    return float(sent)


@torch.no_grad()
def _gradient_deviation(trainer: Trainer, reference: OneProcess | None) -> float:
    """Of all gradients that ranks hold, together; what several hold counts as often."""
    mesh, group = trainer.mesh, trainer.mesh.everyone("control")
    wanted = {key: t for key, t in reference.tensors() if key.what == "gradient"} if reference else {}
    owned = {own.key: own for own in own_tensors(trainer, is_settled=True) if own.key.what == "gradient"}
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
    for name, shape in gather_values([[k.name, list(t.shape)] for k, t in wanted.items()], group, mesh.world.device)[0]:
        key = Key("gradient", name)
        true = receive(wanted.get(key), tuple(shape), group, mesh.world.device)
        own = owned.get(key)
        if own is not None:
            part = local_part(true, own.layout, mesh.grid, mesh.world.rank)
            mine = torch.zeros_like(part) if own.tensor is None else own.tensor.to(part)
            squares += torch.stack([(mine - part).square().sum(), part.square().sum()])
    all_reduce(squares, group)
    return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())
