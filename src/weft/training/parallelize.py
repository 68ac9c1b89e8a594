"""`parallelize`: from a model and a plan to a trainer, the one call that changes an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from weft.checkpoint.pretrained import load_weights
from weft.errors import ModelError
from weft.mesh import Mesh, join_world, make_mesh
from weft.models.balance_loss import balance_problems
from weft.parallel.apply import apply_plan
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.state.materialise import agreed_seed
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.check import check, require
from weft.plan.model_refusals import COMPILED_AS_A_WHOLE
from weft.plan.plan import Plan
from weft.training.meta_trainer import MetaTrainer, refuse_memory
from weft.training.setup.probe_optimizer import OptimizerFactory, class_name, is_elementwise
from weft.training.step.loss import LossFunction, resolve_loss
from weft.training.step.parallel_model import ParallelModel
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
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
) -> Trainer:
    """Train a model as a plan says.

    The model stays an ordinary module and is changed in place (`parallel/apply.py` lists how). It may be on the meta
    device, without memory: then it gets its first values here, and with `[data] shard = "parameters"` no rank ever
    holds the whole of it.

    loss        "cross-entropy", or loss(output, targets) -> scalar mean, or (sum, count)
    optimizer   called with the parameters: functools.partial(torch.optim.AdamW, lr=3e-4)
    schedule    step -> factor of the learning rate
    groups      (name, global shape) -> settings of the optimizer for this parameter, such as {"weight_decay": 0.0}
    global_batch  given, a plan that cannot divide it is refused here
    example     inputs of one microbatch, by which the model is cut for `[axes] pipeline`, its layers for `[axes]
                tensor` unless it declares how, and by which the split model is compared with the whole one, also for
                `[axes] ring` and `ulysses`. Where the plan has no cuts, blocks are timed, and alike ones may be cut
                differently next time: to resume to the bit, give cuts
    weights     a folder of *.safetensors, as Hugging Face stores them: each rank reads its part of them straight into
                the split model, which is best built on the meta device, where no random values are drawn for it then
    device      where this rank computes. "meta", alone or on torch's "fake" process group: nothing is run or read
                (weights neither), and the trainer shows what this rank of a large world would hold
    mesh        another trainer's mesh, of a plan with the same axes and transport: its process groups are used, and
                are still there when this trainer is closed
    """
    world = join_world(device)
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    _refuse_model(named_model)
    if world.is_fake:
        refuse_memory(named_model)
    gets_parts = plan.data.shard != "nothing" or plan.axes.tensor > 1
    problems = check(
        plan,
        num_ranks=world.size,
        optimizer=class_name(optimizer, world.device),
        elementwise=is_elementwise(optimizer, world.device) if gets_parts else None,
        global_batch=global_batch,
        local_batch_statistics=has_batch_norms(named_model),
    )
    require(problems)
    resolved_loss = resolve_loss(loss, compiled=plan.compile.blocks)
    problems = list(balance_problems(named_model, plan, own_loss=not resolved_loss.counts_targets))
    if problems:
        raise ModelError(problems)
    if model is not named_model and plan.axes.pipeline * plan.axes.tensor * plan.axes.sequence > 1:
        raise ModelError(COMPILED_AS_A_WHOLE.message())
    mesh = make_mesh(plan, world, batch_norms=has_batch_norms(named_model), sharing=mesh)
    try:
        with agreed_seed(named_model, mesh):
            parts = ParallelModel(
                model=named_model,
                mesh=mesh,
                example=example,
                keep_output=resolved_loss.counts_targets,
                initialise=weights is None,
            )
            apply_plan(parts)
        made = optimizer(_optimizer_arguments(parts.sync.pieces, groups))
        if world.is_fake:
            return cast(Trainer, MetaTrainer(parts, made))
        trainer = Trainer(model, parts, loss=resolved_loss, optimizer=made, schedule=schedule)
        if weights is not None:
            load_weights(trainer, Path(weights))
        return trainer
    except BaseException:
        mesh.close(failed=True)
        raise


def _optimizer_arguments(pieces: Sequence[Piece], groups: ParameterGroups | None) -> list[dict[str, Any]]:
    """Parameter groups: parameters with equal settings together, in the order of first appearance."""
    made: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
    for piece in pieces:
        settings = groups(piece.name, piece.layout.global_shape) if groups else {}
        together = next((tensors for others, tensors in made if others == settings), None)
        if together is None:
            made.append((settings, together := []))
        together.append(piece.tensor)
    # A stage may have nothing to train; torch refuses an empty list, but not an empty group.
    return [{"params": tensors, **settings} for settings, tensors in made] or [{"params": []}]


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
