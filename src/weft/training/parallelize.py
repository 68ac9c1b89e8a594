"""`parallelize`: from a model and a plan to a trainer, the one call that changes an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.blueprint import Blueprint, find_blueprint
from weft.checkpoint.pretrained import load_weights
from weft.errors import ModelError
from weft.layout import Layout
from weft.mesh import Mesh, join_world, make_mesh
from weft.models.hugging_face_inputs import leave_out_caches
from weft.parallel.apply import apply_plan
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.state.materialise import agreed_seed, model_tensors
from weft.parallel.tensor.shares import Shares, counted_elements
from weft.parallel.tensor.tensor_parallel import TensorParallel
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.check import check, require
from weft.plan.model_refusals import COMPILED_AS_A_WHOLE
from weft.plan.partition.tensor import Region
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan
from weft.sync.base import Apart, Sync
from weft.sync.make import find_layouts, place
from weft.training.data.sample_split import SampleSplit
from weft.training.meta_trainer import MetaTrainer, refuse_memory
from weft.training.setup.choose_sample_split import choose_sample_split
from weft.training.setup.cut_stages import cut_model
from weft.training.setup.probe import probe_split
from weft.training.setup.probe_optimizer import OptimizerFactory, class_name, is_elementwise
from weft.training.setup.split_layers import split_regions
from weft.training.step.loss import LossFunction, resolve_loss
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
    example     inputs of one microbatch, by which the model is cut for `[axes] pipeline`, its layers for `[axes]
                tensor` unless it declares how, and by which the split model is compared with the whole one, also for
                `[axes] ring` and `ulysses`. Where the plan has no cuts, blocks are timed, and alike ones may be cut
                differently next time: to resume to the bit, give cuts
    weights     a folder of *.safetensors, as Hugging Face stores them: each rank reads its part of them straight into
                the split model, which is best built on the meta device, where no random values are drawn for it then
    device      where this rank computes. "meta", alone or on torch's "fake" process group: nothing is run or read
                (weights neither), and the trainer shows what this rank of a large world would hold
    """
    world = join_world(device)
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    _refuse_model(named_model)
    if world.is_fake:
        refuse_memory(named_model)
    leave_out_caches(named_model)
    had_batch_norms = has_batch_norms(named_model)
    problems = check(
        plan,
        num_ranks=world.size,
        optimizer=class_name(optimizer, world.device),
        elementwise=is_elementwise(optimizer, world.device) if _shares_out(plan) else None,
        global_batch=global_batch,
        local_batch_statistics=had_batch_norms,
    )
    require(problems)
    resolved_loss = resolve_loss(loss, compiled=plan.compile.blocks)
    mesh = make_mesh(plan, world)
    if model is not named_model and plan.axes.pipeline * plan.axes.tensor * plan.axes.sequence > 1:
        raise ModelError(COMPILED_AS_A_WHOLE.message())
    with agreed_seed(named_model, mesh):
        parts = _take_apart(named_model, mesh, example)
        sync = _put_together(
            named_model, mesh, parts, keep_output=resolved_loss.counts_targets, initialise=weights is None
        )
    make_trainer = MetaTrainer if world.is_fake else Trainer
    trainer = make_trainer(
        model=model,
        mesh=mesh,
        blueprint=parts.blueprint,
        layouts=find_layouts(parts.layouts, sync),
        loss=resolved_loss,
        optimizer=optimizer(_optimizer_arguments(sync.pieces, groups)),
        sync=sync,
        schedule=schedule,
        empty_forward=mesh.data_size > 1 and plan.data.buffers == "synchronise" and had_batch_norms,
        cut=parts.cut,
        tensor=parts.tensor,
        sample_split=parts.sample_split,
    )
    if weights is not None and not world.is_fake:
        load_weights(trainer, Path(weights))
    return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What of a model this rank has, before anything is exchanged."""

    blueprint: Blueprint
    layouts: Mapping[str, Layout]
    """Of every parameter and buffer: what the axes leave of it here."""
    cut: CutModel | None
    tensor: TensorParallel | None
    sample_split: SampleSplit | None

    @property
    def stage_of(self) -> dict[str, int] | None:
        """The stage of every block of this rank, in a pipeline."""
        if self.cut is None:
            return None
        return {block: min(self.cut.stage_of_unit[block]) for block in self.blueprint.blocks}


def _take_apart(model: nn.Module, mesh: Mesh, example: Any) -> _Parts:
    """Keep this rank's stages of a model, and its shares of their layers; collective."""
    plan, blueprint = mesh.plan, find_blueprint(model)
    regions: tuple[Region, ...] = ()
    make_cutter = choose_sample_split(mesh, blueprint, example)
    sample_split = None if make_cutter is None else make_cutter(model)
    if plan.axes.tensor > 1:
        regions = split_regions(model, mesh, blueprint, example)
    if plan.axes.tensor * plan.axes.sequence > 1:
        probe_split(model, mesh, blueprint, regions, example, sample_split, make_cutter)
    if sample_split is not None and example is not None:
        example = sample_split.cut_inputs(example)
    cut: CutModel | None = None
    if plan.axes.pipeline > 1:
        cut, mesh.plan = cut_model(model, mesh, blueprint, example)
        blueprint = cut.blueprint
    tensor = TensorParallel(model, mesh, blueprint, regions) if plan.axes.tensor > 1 else None
    shares = Shares() if tensor is None else tensor.shares
    layouts = {name: shares.layout(name, one.shape) for name, one in model_tensors(model)}
    if tensor is not None:
        tensor.cut()
    return _Parts(blueprint=blueprint, layouts=layouts, cut=cut, tensor=tensor, sample_split=sample_split)


def _put_together(model: nn.Module, mesh: Mesh, parts: _Parts, *, keep_output: bool, initialise: bool) -> Sync:
    """Put what this rank has where it belongs, and let it exchange; collective."""
    cut, tensor = parts.cut, parts.tensor
    sync = place(
        model,
        mesh,
        parts.blueprint,
        layouts=parts.layouts,
        cut=None if tensor is None else tensor.cut_one,
        apart=_apart(cut, tensor, parts.layouts, mesh),
        stage_of=parts.stage_of,
        initialise=initialise,
    )
    if tensor is not None:
        tensor.install(keep_output=keep_output)
    apply_plan(model, mesh, parts.blueprint)
    if parts.sample_split is not None:
        parts.sample_split.prepare(model)
    if tensor is not None:
        tensor.split_tokens(parts.stage_of)
    if cut is not None:
        cut.wrap_units()
    return sync


def _shares_out(plan: Plan) -> bool:
    """Whether the optimizer is given parts of tensors."""
    return plan.data.shard != "nothing" or plan.axes.tensor > 1


def _apart(cut: CutModel | None, tensor: TensorParallel | None, layouts: Mapping[str, Layout], mesh: Mesh) -> Apart:
    """What the placing of parameters must know of a pipeline and of the tensor axis."""
    held: frozenset[str] = frozenset()
    counted = {} if tensor is None else counted_elements(tensor.shares, layouts, mesh)
    if cut is not None:
        rank = mesh.index("pipeline")
        held = frozenset(name for name, ranks in cut.holders.items() if rank in ranks)
        if mesh.plan.pipeline.schedule in FLUSH_FREE:  # all gradients are made on weight versions
            held = frozenset(name for name, _ in cut.model.named_parameters())
        counted |= {name: () for name, ranks in cut.holders.items() if rank in ranks[1:]}
    return Apart(held=held, counted=counted)


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
