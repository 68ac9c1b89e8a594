"""`verify`: a plan against one process, on the user's own model: every loss, every gradient, every weight.

Rank 0 trains a second copy of the model by itself on the whole global batch (`reference.py`), all ranks train theirs
under the plan, and after every step each rank compares what it holds with the reference. In float64 a logic error
stands out by ten orders of magnitude from a different order of additions.

Dropout is switched off for it, and gradients that are nothing but rounding (a bias in front of BatchNorm has none, by
the maths) are set to zero on both sides before the update: Adam divides by their size, and would make two different
noises into two different weights. Number formats are the comparison's own, not the plan's nor the model's, which may
cast its norms to float32 (`unrounded.py`): that would hide what this is looking for. Lossy plans are not compared here:
they obey an algebra of their own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import VerifyError
from weft.layout import Layout, part_of
from weft.mesh import Mesh
from weft.parallel.materialise import is_on_meta
from weft.parallel.shares import local_part
from weft.plan.exchanges import FLUSH_FREE
from weft.plan.plan import Plan, Precision
from weft.training.elementwise import OptimizerFactory
from weft.training.held import held_parameters
from weft.training.loss import LossFunction, resolve_loss
from weft.training.parallelize import ParameterGroups, parallelize
from weft.training.reference import OneProcess
from weft.training.trainer import Trainer
from weft.training.trees import map_tensors, num_samples, split_tree
from weft.training.unrounded import unrounded

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest error by dtype. In float32 only losses are held to it; rounding may amplify in single weights."""

_NOISE = 1e-12
"""A gradient all of whose entries are below this part of the model's largest is rounding."""

_ZERO_GRADIENT = 1e-6
"""A tensor whose true values are all (nearly) zero is measured against this part of the model's largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one thing was from the reference, at worst."""

    what: str
    """loss, gradient, weight or buffer."""
    name: str
    error: float
    """The largest difference, relative to the largest entry of the reference tensor."""
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome, the same on every rank: the worst difference of each tensor, worst first."""

    num_steps: int
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return all(difference.error <= self.tolerance for difference in self.differences)

    def worst(self, what: str) -> Difference:
        return next(difference for difference in self.differences if difference.what == what)

    def require(self) -> Verification:
        """Raise VerifyError with every tensor that is off; returns itself where none is."""
        wrong = [difference for difference in self.differences if not difference.error <= self.tolerance]
        if wrong:
            raise VerifyError(
                [
                    f"{d.what} {d.name} is off by {d.error:.1e} on rank {d.rank} after step {d.step}, "
                    f"{self.tolerance:.0e} is allowed; this plan does not give one process's answer for this model"
                    for d in wrong[:10]
                ]
            )
        return self


def verify(
    model: nn.Module,
    plan: Plan,
    *,
    loss: str | LossFunction,
    optimizer: OptimizerFactory,
    batches: Sequence[tuple[Any, Any]],
    schedule: Callable[[int], float] | None = None,
    groups: ParameterGroups | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Verification:
    """Train copies of a model under a plan and in one process, and compare them after every step; collective.

    `batches` are whole global batches, the same on every rank; the rest is as for `parallelize`. The model given is not
    changed. The plan's `[precision]` is left out, because both sides compute in `dtype`.
    """
    if plan.axes.pipeline > 1 and plan.pipeline.schedule in FLUSH_FREE:
        raise VerifyError(
            f'[pipeline] schedule = "{plan.pipeline.schedule}" updates with late gradients, so it does not give one '
            'process\'s answer and there is nothing to compare; verify the same plan with "1f1b"'
        )
    batches = [map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch) for batch in batches]
    parallel = copy.deepcopy(model).to(dtype)
    _switch_dropout_off(parallel)
    plan = dataclasses.replace(plan, precision=Precision())
    with _unrounded(parallel, plan, batches[0][0], dtype):
        silenced = _Silenced(optimizer)
        trainer = parallelize(
            parallel,
            plan,
            loss=loss,
            device=device,
            optimizer=silenced,
            schedule=schedule,
            groups=groups,
            example=batches[0][0],
        )
        silenced.mesh = trainer.mesh
        world, group = trainer.mesh.world, trainer.mesh.everyone("control")
        reference = None
        if world.rank == 0:
            # Taken from rank 0's model, which is what parallelize gave every rank.
            alone = copy.deepcopy(model).to(device=world.device, dtype=dtype)
            _switch_dropout_off(alone)
            reference = OneProcess(
                alone, plan, loss=resolve_loss(loss), optimizer=_Silenced(optimizer), schedule=schedule, groups=groups
            )
        found: list[Difference] = []
        for number, (inputs, targets) in enumerate(batches, start=1):
            start, stop = part_of(num_samples(inputs), trainer.data_rank, trainer.data_size)
            mine = float(trainer.step(split_tree(inputs, start, stop), split_tree(targets, start, stop)))
            whole = map_tensors(lambda tensor: tensor.to(world.device), (inputs, targets))
            theirs = torch.tensor([reference.step(*whole) if reference else 0.0], dtype=dtype, device=world.device)
            broadcast(theirs, group)
            found.append(
                _difference("loss", "", number, world.rank, abs(mine - float(theirs)) / max(abs(float(theirs)), 1e-30))
            )
            if dtype == torch.float64:
                found += _compare_tensors(trainer, reference, number, group)
        return _merge(found, group, world.device, num_steps=len(batches), dtype=dtype)


def _unrounded(model: nn.Module, plan: Plan, inputs: Any, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Where a model casts to float32 by itself, keep it from that."""
    # torch's selective checkpoint counts operators, and does not bear another mode beside it.
    if dtype != torch.float64 or plan.recompute.policy == "selective" or is_on_meta(model):
        return nullcontext()
    place = next(model.parameters()).device
    # A copy, because a model may keep state of its own when it runs.
    return unrounded(copy.deepcopy(model), map_tensors(lambda tensor: tensor.to(place), split_tree(inputs, 0, 1)))


@torch.no_grad()
def _compare_tensors(trainer: Trainer, reference: OneProcess | None, step: int, group: Group) -> list[Difference]:
    """Compare this rank's gradients, weights and buffers with the reference's, which rank 0 sends one by one."""
    world = trainer.mesh.world
    owned: dict[tuple[str, str], list[_Own]] = {}
    for own in _own_tensors(trainer):
        owned.setdefault((own.what, own.name), []).append(own)
    wanted = _reference_tensors(reference) if reference else {}
    listed = gather_values([[*key, list(t.shape)] for key, t in wanted.items()], group, world.device)[0]
    largest: dict[str, float] = {}
    measured = []
    for what, name, shape in listed:
        true = _receive(wanted.get((what, name)), tuple(shape), group, world.device)
        scale = float(true.abs().max()) if true.numel() else 0.0
        largest[what] = max(largest.get(what, 0.0), scale)
        for own in owned.pop((what, name), ()):
            if own.tensor is None:
                measured.append((what, name, float("inf"), 0.0))
            elif true.numel():
                mine = local_part(true, own.layout, trainer.mesh.grid, world.rank)
                off = (own.tensor.to(true.device) - mine).abs()
                measured.append((what, name, float(off.max()) if off.numel() else 0.0, scale))
    for (what, name), unexpected in owned.items():  # a gradient where one process has none
        measured += [(what, name, float("inf"), 0.0) for own in unexpected if own.tensor is not None]
    return [
        _difference(what, name, step, world.rank, off / max(scale, _ZERO_GRADIENT * largest.get(what, 0.0), 1e-300))
        for what, name, off, scale in measured
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """Something of this rank's that has a counterpart in one process."""

    what: str
    name: str
    tensor: torch.Tensor | None
    layout: Layout


def _own_tensors(trainer: Trainer) -> Iterator[_Own]:
    """Gradients and weights as the optimizer has them, weights as the model uses them, buffers."""
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    for name, one in held.items():
        gradient = one.piece.grad if one.piece is not None else None
        yield _Own(what="gradient", name=name, tensor=gradient, layout=one.layout)
        yield _Own(what="weight", name=name, tensor=one.tensor, layout=one.layout)
    if trainer.plan.data.shard != "parameters":
        for name, parameter in trainer.named_model.named_parameters():
            layout = dataclasses.replace(trainer.layouts[name], flat_range=None)
            yield _Own(what="weight", name=name, tensor=parameter.detach(), layout=layout)
    if trainer.plan.data.buffers == "synchronise":
        for name, buffer in trainer.named_model.named_buffers():
            yield _Own(what="buffer", name=name, tensor=buffer.double(), layout=trainer.layouts[name])


def _reference_tensors(reference: OneProcess) -> dict[tuple[str, str], torch.Tensor]:
    """What rank 0 sends. A gradient that is None is left out."""
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for name, parameter in reference.model.named_parameters():
        if parameter.grad is not None:
            tensors["gradient", name] = parameter.grad
        tensors["weight", name] = parameter.detach()
    for name, buffer in reference.model.named_buffers():
        tensors["buffer", name] = buffer.double()
    return tensors


def _receive(sent: torch.Tensor | None, shape: tuple[int, ...], group: Group, device: torch.device) -> torch.Tensor:
    """A tensor of rank 0's, in float64, which is what is compared; collective."""
    if sent is None:
        tensor = torch.empty(shape, dtype=torch.float64, device=device)
    else:
        tensor = sent.detach().to(torch.float64, copy=True).contiguous()
    broadcast(tensor, group)
    return tensor


def _merge(
    found: list[Difference], group: Group, device: torch.device, *, num_steps: int, dtype: torch.dtype
) -> Verification:
    worst: dict[tuple[str, str], Difference] = {}
    for part in gather_values([asdict(difference) for difference in found], group, device):
        for entry in part:
            difference = Difference(**entry)
            key = (difference.what, difference.name)
            if key not in worst or not difference.error <= worst[key].error:
                worst[key] = difference
    ordered = sorted(worst.values(), key=lambda difference: -difference.error)
    return Verification(num_steps=num_steps, tolerance=TOLERANCES[dtype], differences=tuple(ordered))


def _difference(what: str, name: str, step: int, rank: int, error: float) -> Difference:
    # NaN compares false with everything, and would pass for small.
    return Difference(what=what, name=name, step=step, rank=rank, error=float("inf") if error != error else error)


class _Silenced:
    """Makes the same optimizer, which sees zero where a gradient is rounding."""

    def __init__(self, optimizer: OptimizerFactory) -> None:
        self._optimizer = optimizer
        self.mesh: Mesh | None = None
        """Of ranks that share gradients out: a part may be all rounding where the whole is not."""

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        made = self._optimizer(parameters)
        made.register_step_pre_hook(self._silence)
        return made

    @torch.no_grad()
    def _silence(self, made: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        gradients = [p.grad for group in made.param_groups for p in group["params"] if p.grad is not None]
        sizes = torch.tensor([float(g.abs().max()) if g.numel() else 0.0 for g in gradients], dtype=torch.float64)
        largest = sizes.max().reshape(1) if gradients else torch.zeros(1, dtype=torch.float64)
        if self.mesh is not None:
            sizes, largest = sizes.to(self.mesh.world.device), largest.to(self.mesh.world.device)
            for group in (self.mesh.batch_group("control"), self.mesh.group("tensor", "control")):
                all_reduce(sizes, group, op="max")
            all_reduce(largest, self.mesh.everyone("control"), op="max")
        for gradient, is_noise in zip(gradients, (sizes < _NOISE * largest).tolist(), strict=True):
            if is_noise:
                gradient.zero_()


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
