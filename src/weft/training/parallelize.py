"""`parallelize`: from a model and a plan to a trainer, the one call that changes an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weft.blueprint import find_blueprint
from weft.errors import ModelError
from weft.layout import Layout
from weft.mesh import Mesh, join_world, make_mesh
from weft.parallel.apply import apply_plan
from weft.parallel.batchnorm import SynchronisedBatchNorm, has_batch_norms
from weft.plan.check import require
from weft.plan.plan import Plan
from weft.sync.allreduce import AllReduce
from weft.sync.base import Alone, Sync
from weft.training.loss import LossFunction, resolve_loss
from weft.training.trainer import Trainer

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
ParameterGroups = Callable[[str, tuple[int, ...]], dict[str, Any]]


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss: str | LossFunction,
    optimizer: OptimizerFactory,
    schedule: Callable[[int], float] | None = None,
    groups: ParameterGroups | None = None,
    global_batch: int | None = None,
    device: torch.device | str | None = None,
) -> Trainer:
    """Train a model as a plan says.

    The model stays an ordinary module and is changed in place: moved to this rank's device, made equal on all ranks,
    given hooks that exchange gradients.

    loss        "cross-entropy", or loss(output, targets) -> scalar mean, or (sum, count)
    optimizer   called with the parameters: functools.partial(torch.optim.AdamW, lr=3e-4)
    schedule    step -> factor of the learning rate
    groups      (name, global shape) -> settings of the optimizer for this parameter, such as {"weight_decay": 0.0}
    global_batch  given, a plan that cannot divide it is refused here
    """
    world = join_world(device)
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    _refuse_model(named_model)
    require(
        plan,
        num_ranks=world.size,
        global_batch=global_batch,
        local_batch_statistics=has_batch_norms(named_model),
        half_precision=any(p.dtype in (torch.float16, torch.bfloat16) for p in named_model.parameters()),
    )
    resolved_loss = resolve_loss(loss, compiled=plan.compile.blocks)
    mesh = make_mesh(plan, world)
    model.to(world.device)
    blueprint = find_blueprint(named_model)
    apply_plan(named_model, mesh, blueprint)
    layouts = {name: Layout(global_shape=tuple(p.shape)) for name, p in named_model.named_parameters()}
    made = optimizer(_optimizer_arguments(named_model, layouts, groups))
    require(plan, optimizer=type(made).__name__)
    return Trainer(
        model=model,
        mesh=mesh,
        blueprint=blueprint,
        layouts=layouts,
        loss=resolved_loss,
        optimizer=made,
        sync=_make_sync(named_model, mesh),
        schedule=schedule,
        empty_forward=any(isinstance(module, SynchronisedBatchNorm) for module in named_model.modules()),
    )


def _make_sync(model: nn.Module, mesh: Mesh) -> Sync:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if mesh.size("data") == 1:
        return Alone(trainable)
    return AllReduce(trainable, mesh.group("data", "gradients"), bucket_bytes=mesh.plan.comm.bucket_bytes)


def _optimizer_arguments(
    model: nn.Module, layouts: dict[str, Layout], groups: ParameterGroups | None
) -> list[dict[str, Any]]:
    """Parameter groups: parameters with equal settings together, in the order of first appearance."""
    made: list[dict[str, Any]] = []
    settings_of: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        settings = groups(name, layouts[name].global_shape) if groups else {}
        if settings not in settings_of:
            settings_of.append(settings)
            made.append({"params": [], **settings})
        made[settings_of.index(settings)]["params"].append(parameter)
    return made


def _refuse_model(model: nn.Module) -> None:
    problems = []
    if not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append("the model has no parameter to train: every one is frozen; set requires_grad on some")
    problems += [
        f'embedding "{name}" makes sparse gradients, which weft does not exchange; build it with sparse=False'
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    if problems:
        raise ModelError(problems)
