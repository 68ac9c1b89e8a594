"""`parallelize`: from a model and a plan to a trainer, the one call that changes an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from weft.blueprint import find_blueprint
from weft.errors import ModelError
from weft.mesh import Mesh, join_world, make_mesh
from weft.parallel.apply import apply_plan
from weft.parallel.batchnorm import has_batch_norms
from weft.parallel.cut import CutModel
from weft.parallel.flats import Piece
from weft.plan.check import require
from weft.plan.exchanges import FLUSH_FREE
from weft.plan.plan import Plan
from weft.sync.base import Apart
from weft.sync.make import find_layouts, place
from weft.training.cutting import cut_model
from weft.training.elementwise import OptimizerFactory, class_name, is_elementwise
from weft.training.loss import LossFunction, resolve_loss
from weft.training.trainer import Trainer

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
    example: Any = None,
    device: torch.device | str | None = None,
) -> Trainer:
    """Train a model as a plan says.

    The model stays an ordinary module and is changed in place: moved to this rank's device, made equal on all ranks,
    given hooks that exchange gradients. It may be on the meta device, without memory: then it gets its values here, and
    with `[data] shard = "parameters"` no rank ever holds the whole of it.

    loss        "cross-entropy", or loss(output, targets) -> scalar mean, or (sum, count)
    optimizer   called with the parameters: functools.partial(torch.optim.AdamW, lr=3e-4)
    schedule    step -> factor of the learning rate
    groups      (name, global shape) -> settings of the optimizer for this parameter, such as {"weight_decay": 0.0}
    global_batch  given, a plan that cannot divide it is refused here
    example     inputs of one micro-batch, by which the model is cut for `[axes] pipeline`. Where the plan has no cuts,
                blocks are timed, and alike ones may be cut differently next time: to resume to the bit, give cuts
    """
    world = join_world(device)
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    _refuse_model(named_model)
    had_batch_norms = has_batch_norms(named_model)
    require(
        plan,
        num_ranks=world.size,
        optimizer=class_name(optimizer, world.device),
        elementwise=None if plan.data.shard == "nothing" else is_elementwise(optimizer, world.device),
        global_batch=global_batch,
        local_batch_statistics=had_batch_norms,
    )
    resolved_loss = resolve_loss(loss, compiled=plan.compile.blocks)
    mesh = make_mesh(plan, world)
    blueprint = find_blueprint(named_model)
    cut: CutModel | None = None
    if plan.axes.pipeline > 1:
        if model is not named_model:
            raise ModelError(
                "a model compiled as a whole cannot be cut; give the model itself and set [compile] blocks = true"
            )
        cut, mesh.plan = cut_model(named_model, mesh, blueprint, example)
        blueprint = cut.blueprint
    sync = place(named_model, mesh, blueprint, **_in_pipeline(cut, mesh))
    apply_plan(named_model, mesh, blueprint)
    if cut is not None:
        cut.open_gates()
    layouts = find_layouts(named_model, sync)
    made = optimizer(_optimizer_arguments(sync.pieces, groups))
    return Trainer(
        model=model,
        mesh=mesh,
        blueprint=blueprint,
        layouts=layouts,
        loss=resolved_loss,
        optimizer=made,
        sync=sync,
        schedule=schedule,
        empty_forward=mesh.data_size > 1 and plan.data.buffers == "synchronise" and had_batch_norms,
        cut=cut,
    )


def _in_pipeline(cut: CutModel | None, mesh: Mesh) -> dict[str, Any]:
    """What the placing of parameters must know of a pipeline."""
    if cut is None:
        return {}
    rank = mesh.index("pipeline")
    held = frozenset(name for name, ranks in cut.holders.items() if rank in ranks)
    if mesh.plan.pipeline.schedule in FLUSH_FREE:  # all gradients are made on weight versions
        held = frozenset(name for name, _ in cut.model.named_parameters())
    uncounted = frozenset(name for name, ranks in cut.holders.items() if rank in ranks[1:])
    return {
        "apart": Apart(held=held, uncounted=uncounted),
        "stage_of": {block: min(cut.stage_of_unit[block]) for block in cut.blueprint.blocks},
    }


def _optimizer_arguments(pieces: Sequence[Piece], groups: ParameterGroups | None) -> list[dict[str, Any]]:
    """Parameter groups: parameters with equal settings together, in the order of first appearance."""
    made: list[dict[str, Any]] = []
    settings_of: list[dict[str, Any]] = []
    if not pieces:  # a stage with nothing to train; torch refuses an empty list, but not an empty group
        return [{"params": []}]
    for piece in pieces:
        settings = groups(piece.name, piece.layout.global_shape) if groups else {}
        if settings not in settings_of:
            settings_of.append(settings)
            made.append({"params": [], **settings})
        made[settings_of.index(settings)]["params"].append(piece.tensor)
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
