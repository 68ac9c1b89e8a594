"""A model cut into stages, of which this rank holds some: what is needed to run them on any batch.

The model is followed once for every shape of batch (`parallel/tracing/dataflow.py`): training, evaluation and
generation each bring their own, and all ranks, seeing the same inputs, come to the same answer without a message. That
is how shapes are agreed on once and not at every step.
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
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.pipeline.run_stage import Passage, install_gates, keep_only
from weft.parallel.pipeline.stages import Stages, owners, share_out, stage_of_blocks
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.tracing.dataflow import Flow, find_units, follow, make_meta_copy
from weft.parallel.zero.grouping import cast_between_layers, compute_dtypes
from weft.plan.model_refusals import BLOCKS_NEEDED, STATISTICS_ON_SEVERAL_STAGES
from weft.plan.plan import Plan

_MOST_ROUTES = 1024
"""Shapes of batches that are remembered; ranks see the same ones, and forget them in the same step."""

CallModel = Callable[[Callable[..., Any], Any], Any]
"""Calls a model, or something that looks like one, with a batch's inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of batches of one shape through the stages."""

    flow: Flow
    stages: Stages


@dataclass(slots=True, kw_only=True)
class Outline:
    """A whole model as it is before it is cut: its units, and what flows through them for one example."""

    model: nn.Module
    meta_copy: nn.Module
    blueprint: Blueprint
    units: tuple[str, ...]
    call: CallModel
    device: torch.device
    flow: Flow


def outline(
    model: nn.Module, blueprint: Blueprint, plan: Plan, example: Any, *, call: CallModel, device: torch.device
) -> Outline:
    """Follow an example through a model. Neither is changed."""
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
        model=model, meta_copy=meta_copy, blueprint=blueprint, units=units, call=call, device=device, flow=flow
    )


@dataclass(slots=True, kw_only=True)
class CutModel:
    """The stages of a model that this rank holds."""

    model: nn.Module
    """The user's own, without what other ranks hold."""
    blueprint: Blueprint
    """With the blocks of this rank only."""
    my_stages: tuple[int, ...]
    num_stages: int
    holders: Mapping[str, tuple[int, ...]]
    """Of parameters that several ranks hold: their places along the pipeline axis."""
    stages_of: Mapping[str, frozenset[int]]
    """The stages that use each parameter."""
    stage_of_unit: Mapping[str, frozenset[int]]
    """The stages on which each unit is called."""
    passage: Passage
    _outline: Outline
    _block_stages: Mapping[str, int]
    _routes: dict[Any, Route] = field(default_factory=dict)

    def route(self, inputs: Any) -> Route:
        """The way of a batch; followed when its shape is new."""
        key = (signature(inputs), self.model.training)
        if key not in self._routes:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            meta_copy, call = self._outline.meta_copy, self._outline.call
            meta_copy.train(self.model.training)
            flow = follow(meta_copy, self._outline.units, lambda copied: call(copied, inputs), self._outline.device)
            self._routes[key] = self._check(
                Route(flow=flow, stages=share_out(flow, self._block_stages, self.num_stages))
            )
        return self._routes[key]

    @property
    def whole(self) -> nn.Module:
        """The whole model, without memory."""
        return self._outline.meta_copy

    def open_gates(self) -> None:
        """Let units compute when their stage is run; after everything else has been done to the model."""
        install_gates(self.model, self._is_here(), self.passage)

    def _is_here(self) -> dict[str, bool]:
        return {unit: not on.isdisjoint(self.my_stages) for unit, on in self.stage_of_unit.items()}

    def _check(self, route: Route) -> Route:
        """A batch of another shape must find what it needs where the first one did."""
        for stage in self.my_stages:
            strangers = [c.unit for c in route.stages.calls[stage] if stage not in self.stage_of_unit[c.unit]]
            if strangers:
                raise ModelError(
                    f'a batch of this shape calls "{strangers[0]}" on stage {stage}, where the example that the model '
                    "was cut by did not; give parallelize an example whose way through the model is the usual one"
                )
        return route


def cut(whole: Outline, cuts: Sequence[int], *, rank: int, num_ranks: int) -> CutModel:
    """Cut a model before these blocks and keep the stages of one rank along the pipeline axis, in place."""
    num_stages = len(cuts) + 1
    blocks = whole.blueprint.blocks
    block_stages = stage_of_blocks(blocks, cuts)
    stages = share_out(whole.flow, block_stages, num_stages)
    stage_of_unit = owners(stages, whole.units, block_stages)
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
        passage=Passage(),
        _outline=whole,
        _block_stages=block_stages,
    )
    mine = frozenset(name for name, ranks in held_by.items() if rank in ranks)
    keep_only(whole.model, whole.meta_copy, cut_model._is_here(), mine, cut_model.passage, whole.device)
    return cut_model


def _stages_of_parameters(
    whole: Outline, stages: Stages, stage_of_unit: Mapping[str, frozenset[int]]
) -> dict[str, frozenset[int]]:
    """Of every parameter, under the first of its names: the stages that use it; an unused one is on the first."""
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
    """Each stage would move running statistics of its own, by its own calls only."""
    problems = [
        STATISTICS_ON_SEVERAL_STAGES.message(name=unit, stages=", ".join(map(str, sorted(on))))
        for unit, on in stage_of_unit.items()
        if len(on) > 1 and has_batch_norms(model.get_submodule(unit))
    ]
    if problems:
        raise ModelError(problems)


def signature(inputs: Any) -> Any:
    """What batches of one way have in common: shapes and dtypes, and whatever is not a tensor."""
    if isinstance(inputs, torch.Tensor):  # nearly always, and asked for every microbatch
        return inputs.shape, inputs.dtype
    leaves, tree = tree_flatten(dict(inputs) if isinstance(inputs, dict) else inputs)
    described = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves
    )
    return described, str(tree)


def tied_groups(made: CutModel, mesh: Mesh) -> dict[str, Group]:
    """Of every parameter of this rank that other stages hold too: the ranks that do; collective."""
    # Asking for a group is collective: every rank asks for all of them, in one order.
    asked = {name: mesh.group(f"pipeline:{','.join(map(str, on))}", "tied") for name, on in made.holders.items()}
    return {name: group for name, group in asked.items() if group.ranks}
