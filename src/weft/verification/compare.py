"""This rank's gradients, weights and buffers beside those of one process, which rank 0 sends one by one.

Nothing but the errors is kept: a right plan, the usual case, must not pay for what only a wrong one needs
(`examine.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.checkpoint.local_parts import held_parameters
from weft.comm.collectives import broadcast
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.layout import Layout
from weft.parallel.tensor.shares import local_part
from weft.training.step.pipeline_stream import PipelineStream
from weft.training.trainer import Trainer
from weft.verification.one_process import Key
from weft.verification.oracles import Oracle
from weft.verification.verdict import Difference

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative error by dtype. In float32 only losses are held to it; rounding may amplify in single weights."""

_ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Error that rounding alone may cause, relative to the largest value of the model. A gradient that is nearly zero by the
maths (of a scale in front of a norm) is the sum of terms as large as the model's largest gradient, which cancel: its
error is relative to the terms, not to the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Something of this rank's that has a counterpart in one process."""

    key: Key
    tensor: torch.Tensor | None
    layout: Layout
    is_copy: bool = False
    """The model's, where the optimizer updates another."""


def own_tensors(trainer: Trainer, *, is_settled: bool) -> Iterator[Own]:
    """Gradients and weights as the optimizer has them, weights as the model uses them, buffers.

    While steps are still under way, gradients and buffers may be of any of them.
    """
    version = trainer.pipeline_step.versions.newest if isinstance(trainer.pipeline_step, PipelineStream) else 0
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    for name, one in held.items():
        if is_settled:
            gradient = one.piece.grad if one.piece is not None else None
            yield Own(key=Key("gradient", name, version), tensor=gradient, layout=one.layout)
        yield Own(key=Key("weight", name, version), tensor=one.tensor, layout=one.layout)
    if trainer.sync.flats and trainer.plan.data.shard != "parameters":
        for name, parameter in trainer.named_model.named_parameters():
            layout = dataclasses.replace(trainer.layouts[name], flat_range=None)
            yield Own(key=Key("weight", name, version), tensor=parameter.detach(), layout=layout, is_copy=True)
    if is_settled and trainer.plan.data.buffers == "synchronise":
        for name, buffer in trainer.named_model.named_buffers():
            yield Own(key=Key("buffer", name, version), tensor=buffer.double(), layout=trainer.layouts[name])


@torch.no_grad()
def compare_tensors(trainer: Trainer, oracle: Oracle | None, *, step: int, is_settled: bool) -> list[Difference]:
    """How far everything of this rank's is from what one process has; collective."""
    mesh, group = trainer.mesh, trainer.mesh.everyone("control")
    owned: dict[Key, list[Own]] = {}
    for own in own_tensors(trainer, is_settled=is_settled):
        owned.setdefault(own.key, []).append(own)
    wanted = dict(oracle.tensors(is_settled=is_settled)) if oracle else {}
    listed = gather_values([[*key, list(t.shape)] for key, t in wanted.items()], group, mesh.world.device)[0]
    largest: dict[str, float] = {}
    measured = []
    for what, name, version, shape in listed:
        key = Key(what, name, version)
        true = receive(wanted.get(key), tuple(shape), group, mesh.world.device)
        scale = float(true.abs().max()) if true.numel() else 0.0
        largest[what] = max(largest.get(what, 0.0), scale)
        for own in owned.pop(key, ()):
            if own.tensor is None:
                measured.append((key, float("inf"), 0.0))
            elif true.numel():
                off = (own.tensor.to(true.device) - local_part(true, own.layout, mesh.grid, mesh.world.rank)).abs()
                measured.append((key, float(off.max()) if off.numel() else 0.0, scale))
    if is_settled:  # before, a stage may hold any version
        measured += [
            (key, float("inf"), 0.0) for key in _held_by_nobody(trainer, listed, {key for key, _, _ in measured})
        ]
    for key, unexpected in owned.items():  # a gradient where one process has none
        measured += [(key, float("inf"), 0.0) for own in unexpected if own.tensor is not None]
    return [
        difference(key, step, mesh.world.rank, relative_error(off, scale, largest.get(key.what, 0.0)))
        for key, off, scale in measured
    ]


def _held_by_nobody(trainer: Trainer, listed: list[Any], compared: set[Key]) -> list[Key]:
    """What one process has and no rank could compare, the same on every rank; collective."""
    mesh = trainer.mesh
    mine = [[key.what, key.name] for key in compared]
    held = {tuple(one) for part in gather_values(mine, mesh.everyone("control"), mesh.world.device) for one in part}
    wanted = {"gradient", "weight"} | ({"buffer"} if trainer.plan.data.buffers == "synchronise" else set())
    return [
        Key(what, name, version)
        for what, name, version, shape in listed
        if what in wanted and math.prod(shape) and (what, name) not in held
    ]


def receive(sent: torch.Tensor | None, shape: tuple[int, ...], group: Group, device: torch.device) -> torch.Tensor:
    """A tensor of rank 0's, in float64, which is what is compared; collective."""
    if sent is None:
        tensor = torch.empty(shape, dtype=torch.float64, device=device)
    else:
        tensor = sent.detach().to(device, torch.float64, copy=True).contiguous()
    broadcast(tensor, group)
    return tensor


def relative_error(off: float, scale: float, largest: float) -> float:
    """The error of a tensor whose largest entry is `scale`, in a model whose largest is `largest`."""
    return off / max(scale, _ROUNDING / TOLERANCES[torch.float64] * largest, 1e-300)


def difference(key: Key, step: int, rank: int, error: float) -> Difference:
    # NaN compares false with everything, and would pass for small.
    error = float("inf") if error != error else error
    return Difference(what=key.what, name=key.name, step=step, rank=rank, error=error)
