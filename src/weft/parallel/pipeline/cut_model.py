"""A model cut into stages, of which this rank holds some.

The dataflow is traced once per shape of batch (`parallel/tracing/dataflow.py`): training, evaluation and generation
have their own. All ranks see the same inputs and find the same stages and message shapes, so none are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from weft.blueprint import Blueprint
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradient
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.pipeline.run_stage import StageRunner, keep_only, wrap_units
from weft.parallel.pipeline.stages import Stages, assign_stages, stage_of_blocks, stages_of_units
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.tracing.dataflow import Flow, find_units, follow
from weft.parallel.tracing.meta_copy import make_meta_copy
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.grouping import cast_between_layers, compute_dtypes
from weft.plan.model_refusals import BLOCKS_NEEDED, STATISTICS_ON_SEVERAL_STAGES
from weft.plan.plan import Plan

_MOST_SHAPES = 1024
"""Shapes of batches whose stages are cached; all ranks see the same shapes and clear the cache in the same step."""

CallModel = Callable[[Callable[..., Any], Any], Any]
"""Calls a model, or its meta copy, with a batch's inputs."""


@dataclass(slots=True, kw_only=True)
class Outline:
    """A model before it is cut: its units and its dataflow for one example."""

    model: nn.Module
    meta_copy: nn.Module
    blueprint: Blueprint
    units: tuple[str, ...]
    call: CallModel
    device: torch.device
    flow: Flow
    signature: Any
    """The example's shapes and dtypes."""


def outline(
    model: nn.Module, blueprint: Blueprint, plan: Plan, example: Any, *, call: CallModel, device: torch.device
) -> Outline:
    """Trace an example through a model; neither is changed."""
    if not blueprint.blocks:
        asked = f"[axes] pipeline = {plan.axes.pipeline}"
        raise ModelError(BLOCKS_NEEDED.message(asked=asked, instead="[axes] pipeline = 1"))
    units = find_units(model, blueprint)
    meta_copy = make_meta_copy(model, units, device, compute_dtypes(model, plan))
    if plan.precision.compute != "model":
        cast_between_layers(meta_copy)
    flow = follow(meta_copy, units, lambda copied: call(copied, example), device)
    uncalled = [block for block in blueprint.blocks if not any(made.unit == block for made in flow.calls)]
    if len(uncalled) == len(blueprint.blocks):
        raise ModelError(
            f'the model has a list of blocks ("{blueprint.blocks[0]}", ...) but its forward pass calls none of them; '
            "give it a weft_blueprint() that names the blocks it calls, or set [axes] pipeline = 1"
        )
    return Outline(
        model=model,
        meta_copy=meta_copy,
        blueprint=blueprint,
        units=units,
        call=call,
        device=device,
        flow=flow,
        signature=_signature(example),
    )


@dataclass(slots=True, kw_only=True)
class CutModel:
    """The stages of a model that this rank holds."""

    model: nn.Module
    """The user's model, with placeholders for what other ranks hold."""
    blueprint: Blueprint
    """The model's blueprint with the blocks of this rank only."""
    my_stages: tuple[int, ...]
    num_stages: int
    holders: Mapping[str, tuple[int, ...]]
    """Ranks along the pipeline axis that hold each shared parameter, by its name."""
    stages_of: Mapping[str, frozenset[int]]
    """The stages that use each parameter."""
    stage_of_unit: Mapping[str, frozenset[int]]
    """The stages on which each unit is called."""
    runner: StageRunner
    example_stages: Stages
    """The stages that the example passes through."""
    _outline: Outline
    _block_stages: Mapping[str, int]
    _stages: dict[Any, Stages] = field(default_factory=dict)

    def stages_for(self, inputs: Any) -> Stages:
        """The stages that a batch passes through; the model is traced when the batch's shape is new."""
        key = (_signature(inputs), self.model.training)
        if key not in self._stages:
            if len(self._stages) >= _MOST_SHAPES:
                self._stages.clear()
            meta_copy, call = self._outline.meta_copy, self._outline.call
            meta_copy.train(self.model.training)
            flow = follow(meta_copy, self._outline.units, lambda copied: call(copied, inputs), self._outline.device)
            self._stages[key] = self._check(assign_stages(flow, self._block_stages, self.num_stages))
        return self._stages[key]

    @property
    def kept_by_units(self) -> tuple[str, ...]:
        """Attributes in which blocks keep what they computed: a rank has those of its own blocks only."""
        return self._outline.flow.kept_by_units

    @property
    def whole(self) -> nn.Module:
        """The whole model on the meta device."""
        return self._outline.meta_copy

    def wrap_units(self) -> None:
        """Let units compute only when their stage runs; after everything else has been done to the model."""
        wrap_units(self.model, self._is_here(), self.runner)
        why = "refuses to save one rank's stages as if they were the model"
        add_hook(self.model, "state_dict_pre", _refuse_state_dict, by="pipeline", why=why)

    def _is_here(self) -> dict[str, bool]:
        return {unit: not on.isdisjoint(self.my_stages) for unit, on in self.stage_of_unit.items()}

    def _check(self, stages: Stages) -> Stages:
        """Refuse a batch that calls units on other stages than the example did."""
        for stage in self.my_stages:
            foreign = [c.unit for c in stages.calls[stage] if stage not in self.stage_of_unit[c.unit]]
            if foreign:
                raise ModelError(
                    f'a batch of this shape calls "{foreign[0]}" on stage {stage}, where the example that the model '
                    "was cut by did not; give parallelize an example whose way through the model is the usual one"
                )
        return stages


def cut(whole: Outline, cuts: Sequence[int], *, rank: int, num_ranks: int) -> CutModel:
    """Cut a model before these blocks and keep the stages of one rank along the pipeline axis, in place."""
    num_stages = len(cuts) + 1
    blocks = whole.blueprint.blocks
    block_stages = stage_of_blocks(blocks, cuts)
    stages = assign_stages(whole.flow, block_stages, num_stages)
    stage_of_unit = stages_of_units(stages, whole.units, block_stages)
    _refuse_shared_statistics(whole.model, stage_of_unit)
    stages_of = _stages_of_parameters(whole, stages, stage_of_unit)
    held_by = {name: tuple(sorted({stage % num_ranks for stage in on})) for name, on in stages_of.items()}
    my_stages = tuple(range(rank, num_stages, num_ranks))
    cut_model = CutModel(
        model=whole.model,
        blueprint=replace(whole.blueprint, blocks=tuple(b for b in blocks if block_stages[b] in my_stages)),
        my_stages=my_stages,
        num_stages=num_stages,
        holders={name: ranks for name, ranks in held_by.items() if len(ranks) > 1},
        stages_of=stages_of,
        stage_of_unit=stage_of_unit,
        runner=StageRunner(),
        example_stages=stages,
        _outline=whole,
        _block_stages=block_stages,
    )
    if len({module.training for module in whole.model.modules()}) == 1:  # as it will be traced for batches
        cut_model._stages[whole.signature, whole.model.training] = stages
    mine = frozenset(name for name, ranks in held_by.items() if rank in ranks)
    keep_only(whole.model, whole.meta_copy, cut_model._is_here(), mine, cut_model.runner, whole.device)
    return cut_model


def _stages_of_parameters(
    whole: Outline, stages: Stages, stage_of_unit: Mapping[str, frozenset[int]]
) -> dict[str, frozenset[int]]:
    """The stages that use each parameter, by the parameter's first name; an unused one is on the first stage."""
    first_name = {id(parameter): name for name, parameter in whole.model.named_parameters()}
    found: dict[str, set[int]] = {name: set() for name in first_name.values()}
    for unit, on in stage_of_unit.items():
        for parameter in whole.model.get_submodule(unit).parameters():
            found[first_name[id(parameter)]] |= on
    for stage, names in enumerate(stages.parameters):
        for name in names:
            found[name].add(stage)
    return {name: frozenset(on or {0}) for name, on in found.items()}


def _refuse_shared_statistics(model: nn.Module, stage_of_unit: Mapping[str, frozenset[int]]) -> None:
    """Refuse batch norms called on several stages, each of which would update its own running statistics."""
    problems = [
        STATISTICS_ON_SEVERAL_STAGES.message(name=unit, stages=", ".join(map(str, sorted(on))))
        for unit, on in stage_of_unit.items()
        if len(on) > 1 and has_batch_norms(model.get_submodule(unit))
    ]
    if problems:
        raise ModelError(problems)


def _refuse_state_dict(*_: object) -> None:
    raise ModelError(
        "with [axes] pipeline > 1 a rank has the parameters of its own stages only, so state_dict() would save a part "
        "of the model; call trainer.save(directory) on every rank, which writes the whole of it"
    )


def _signature(inputs: Any) -> Any:
    """The shapes and dtypes of tensors, and the values of everything else: batches equal in these share stages."""
    if isinstance(inputs, torch.Tensor):  # the usual case, once per microbatch
        return inputs.shape, inputs.dtype
    leaves, tree = tree_flatten(dict(inputs) if isinstance(inputs, dict) else inputs)
    described = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves
    )
    return described, str(tree)


def tied_groups(made: CutModel, mesh: Mesh) -> dict[str, Group]:
    """Each parameter of this rank that other stages hold too, with the group of ranks that do."""
    groups = {name: mesh.group(*_tied_key(ranks)) for name, ranks in made.holders.items()}
    return {name: group for name, group in groups.items() if group.ranks}


def tied_gradients(made: CutModel, mesh: Mesh) -> list[SharedGradient]:
    """The gradients that this rank sums with other stages', in an order that all of these have."""
    trained = {name for name, parameter in made.model.named_parameters() if parameter.requires_grad}
    groups = {name: group for name, group in tied_groups(made, mesh).items() if name in trained}
    in_order = sorted(groups, key=lambda name: (made.holders[name], name))
    return [SharedGradient(name=name, group=groups[name], kind="sum") for name in in_order]


def make_tied_groups(made: CutModel, mesh: Mesh) -> None:
    """Make the groups of ranks that hold one parameter together, once the model is cut; collective."""
    mesh.add_groups([_tied_key(ranks) for ranks in made.holders.values()])


def _tied_key(ranks: Sequence[int]) -> tuple[str, str]:
    return f"pipeline:{','.join(map(str, ranks))}", "tied"
