"""This rank's gradients, weights and buffers against those of one process, which rank 0 broadcasts bucket by bucket.

Where replicas differ, a rank's tensors are compared with those of its own replica.
Only errors are kept: a right plan, the usual case, must not pay for what only a wrong one needs (`examine.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.checkpoint.local_parts import Held, held_parameters
from weft.comm.broadcast_many import float64_of_first
from weft.comm.collectives import broadcast
from weft.comm.objects import gather_values
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.tensor.shares import local_part
from weft.sync.served import ServedSync
from weft.training.data.trees import num_samples, split_tree
from weft.training.step.pipeline_stream import PipelineStream
from weft.training.trainer import Trainer
from weft.verification.one_process import Key
from weft.verification.oracles import Oracle
from weft.verification.served_batches import is_of_elements
from weft.verification.verdict import Difference

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative error by dtype. In float32 only losses are held to it; rounding may amplify in single weights."""

_SMALLEST_SCALE = {"gradient": 64 * torch.finfo(torch.float64).eps / TOLERANCES[torch.float64]}
"""Scale of the errors of a nearly zero tensor, relative to the model's largest of its kind; 1e-6 for other kinds. A
gradient that is nearly zero by the maths (of a scale in front of a norm) is a sum of terms that cancel, as large as the
model's largest gradient, so 64 units in the last place of that are rounding, whatever the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A tensor of this rank that has a counterpart in one process."""

    key: Key
    tensor: torch.Tensor | None
    layout: Layout
    is_copy: bool = False
    """It is the model's copy of a weight that the optimizer updates elsewhere."""


def local_tensors(trainer: Trainer, *, is_drained: bool) -> Iterator[LocalTensor]:
    """Gradients and weights as the optimizer has them, weights as the model uses them, averages, buffers.

    While microbatches are in flight, gradients and buffers may be of any step, and are left out.
    """
    version = trainer.pipeline_step.versions.newest if isinstance(trainer.pipeline_step, PipelineStream) else 0
    place = {"version": version, "replica": trainer.mesh.replica}
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    factor = factor_of_sent(trainer)
    for name, one in held.items():
        if is_drained and factor is not None:
            gradient = one.piece.grad if one.piece is not None else None
            if gradient is not None and factor != 1.0:
                gradient = gradient * factor
            yield LocalTensor(key=Key("gradient", name, **place), tensor=gradient, layout=one.layout)
        yield LocalTensor(key=Key("weight", name, **place), tensor=one.tensor, layout=one.layout)
    if trainer.sync.flats and trainer.plan.data.shard != "parameters":
        for name, parameter in trainer.named_model.named_parameters():
            layout = dataclasses.replace(trainer.layouts[name], flat_range=None)
            yield LocalTensor(key=Key("weight", name, **place), tensor=parameter.detach(), layout=layout, is_copy=True)
    if isinstance(trainer.sync, ServedSync):
        yield from _state_of_servers(trainer, trainer.sync, held)
    if trainer.average is not None and trainer.average.has_begun:
        for name, mean in trainer.average.means.items():
            yield LocalTensor(key=Key("average", name, **place), tensor=mean, layout=held[name].layout)
    if is_drained and trainer.plan.data.buffers == "synchronise":
        for name, buffer in trainer.named_model.named_buffers():
            yield LocalTensor(key=Key("buffer", name, **place), tensor=buffer.double(), layout=trainer.layouts[name])


def factor_of_sent(trainer: Trainer) -> float | None:
    """What gradients are multiplied by to be means: over a worker's own targets, where it sends them to servers, who
    make just that of them. None: it had no target. 1: they are means over the whole batch."""
    if not isinstance(trainer.sync, ServedSync) or (said := trainer.sync.said) is None:
        return 1.0
    return said.scale / said.count if said.count else None


def _state_of_servers(trainer: Trainer, sync: ServedSync, held: Mapping[str, Held]) -> Iterator[LocalTensor]:
    """The optimizer's state, which servers keep, where all of it belongs to the weights that this worker has."""
    if not sync.shares_batch and trainer.plan.axes.data != 1:
        return
    sync.fetch_state(trainer.optimizer)
    for name, one in held.items():
        if one.piece is None:
            continue
        for kind, state in trainer.optimizer.state.get(one.piece, {}).items():
            if is_of_elements(state, one.piece):
                yield LocalTensor(key=Key("state", f"{name} {kind}"), tensor=state, layout=one.layout)
    trainer.optimizer.state.clear()


@torch.no_grad()
def compare_tensors(
    trainer: Trainer,
    oracle: Oracle | None,
    *,
    step: int,
    is_drained: bool,
    has_targets: bool = True,
    held: Iterable[LocalTensor] | None = None,
) -> list[Difference]:
    """The errors of all tensors of this rank; collective. `has_targets`: its replica has some in this step. `held`:
    what this rank had after that step, unless it has it now."""
    mesh, rank = trainer.mesh, trainer.mesh.world.rank
    unmatched: dict[Key, list[LocalTensor]] = {}
    for local in local_tensors(trainer, is_drained=is_drained) if held is None else held:
        unmatched.setdefault(local.key, []).append(local)
    reference = dict(oracle.tensors(is_drained=is_drained)) if oracle else {}
    expected: list[Key] = []
    largest: dict[str, float] = {}
    measured: list[tuple[Key, float, float]] = []
    for key, true in broadcast_tensors(reference, mesh):
        scale = float(true.abs().max()) if true.numel() else 0.0
        largest[key.what] = max(largest.get(key.what, 0.0), scale)
        if true.numel() and (key.what != "buffer" or trainer.plan.data.buffers == "synchronise"):
            expected.append(key)
        for local in unmatched.pop(key, ()):
            if local.tensor is None:
                measured.append((key, math.inf, 0.0))
            elif true.numel():
                off = (local.tensor.to(true.device) - local_part(true, local.layout, mesh.grid, rank)).abs()
                measured.append((key, float(off.max()) if off.numel() else 0.0, scale))
    if is_drained:  # before, a stage may hold any version
        # A tensor that no rank could compare is missing on all of them.
        mine = [[key.what, key.name, key.replica] for key, _, _ in measured]
        gathered = gather_values(mine, mesh.everyone("control"))
        compared = {tuple(one) for part in gathered for one in part}
        measured += [(key, math.inf, 0.0) for key in expected if (key.what, key.name, key.replica) not in compared]
    for key, unexpected in unmatched.items():  # a gradient where one process has none
        for local in unexpected:
            # Without targets nothing is updated, and holders of a weight may have added up nothing.
            is_nothing = local.tensor is None or not (has_targets or local.tensor.any())
            measured += [] if is_nothing else [(key, math.inf, 0.0)]
    return [
        difference(key, step, rank, relative_error(key.what, off, scale, largest.get(key.what, 0.0)))
        for key, off, scale in measured
    ]


def broadcast_tensors(sent: Mapping[Key, torch.Tensor], mesh: Mesh) -> Iterator[tuple[Key, torch.Tensor]]:
    """Rank 0's tensors on every rank, a few at a time, in float64; collective."""
    group, device = mesh.everyone("control"), mesh.world.device
    listed = gather_values([[*key, list(tensor.shape)] for key, tensor in sent.items()], group)[0]
    true = float64_of_first(list(sent.values()), [shape for *_, shape in listed], group)
    for (*key, _), tensor in zip(listed, true, strict=True):
        yield Key(*key), tensor.to(device)


def from_first(values: list[float], mesh: Mesh) -> list[float]:
    """Rank 0's numbers, on every rank; collective."""
    sent = torch.tensor(values, dtype=torch.float64)
    broadcast(sent, mesh.everyone("control"))
    return list(map(float, sent))


def loss_error(mine: float, true: float) -> float:
    return not_nan(abs(mine - true) / max(abs(true), 1e-30))


def step_on_part(trainer: Trainer, batch: tuple[Any, Any]) -> float:
    """The loss of one step of the trainer on its part of a global batch."""
    start, stop = trainer.batch_range(num_samples(batch[0]))
    inputs, targets = (split_tree(tree, start, stop) for tree in batch)
    return float(trainer.step(inputs, targets))


def relative_error(what: str, off: float, scale: float, largest: float) -> float:
    """The error of a tensor whose largest entry is `scale`, in a model whose largest of this kind is `largest`."""
    return off / max(scale, _SMALLEST_SCALE.get(what, 1e-6) * largest, 1e-300)


def not_nan(error: float) -> float:
    # NaN compares false with everything, and would pass for small.
    return math.inf if math.isnan(error) else error


def difference(key: Key, step: int, rank: int, error: float) -> Difference:
    return Difference(what=key.what, name=key.name, step=step, rank=rank, error=not_nan(error))
