"""From a whole model to this rank's stages: chooses the cuts, and starts all ranks from the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.comm.broadcast_many import copy_from_first
from weft.comm.objects import value_of_first
from weft.errors import ModelError, PlanError
from weft.mesh import Mesh
from weft.models.hugging_face_inputs import encoder_decoders
from weft.parallel.pipeline.block_costs import Unit, time_units
from weft.parallel.pipeline.cut_model import CutModel, Outline, cut, make_tied_groups, outline, tied_groups
from weft.parallel.state.materialise import Materialiser, model_tensors
from weft.plan.model_refusals import PIPEDREAM_WITH_SHARED_WEIGHTS, VERSIONS_OF_MASTERS
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.pipeline.stage_cuts import FREE, BlockCost, balance, check_cuts, stage_problem
from weft.plan.plan import Plan
from weft.sync.make import needs_flats
from weft.training.data.trees import map_tensors
from weft.training.setup.probe_stages import probe_stages
from weft.training.step.precision import Caller


def cut_model(
    model: nn.Module, mesh: Mesh, blueprint: Blueprint, example: Any, *, whole_example: Any = None
) -> tuple[CutModel, Plan]:
    """Cut a model as a plan says, in place; collective. The plan that is returned has the cuts.

    `whole_example`: the example with whole samples, where `example` has this rank's part of each.
    """
    plan = mesh.plan
    # Also in a fake world, code between blocks may look at values of its own (positions, masks).
    device = torch.device("cpu") if mesh.world.is_fake else mesh.world.device
    if example is None:
        raise ModelError(
            f"[axes] pipeline = {plan.axes.pipeline} cuts the model by following a batch through it; give "
            "parallelize(..., example=inputs), the inputs of one microbatch"
        )
    if plan.pipeline.schedule in FLUSH_FREE and needs_flats(model, mesh):
        raise ModelError(VERSIONS_OF_MASTERS.message(plan))

    def call(called: Callable[..., Any], inputs: Any) -> Any:
        return Caller(called, plan, widens=False)(inputs)

    def with_values(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    example = map_tensors(with_values, example)
    try:
        whole = outline(model, blueprint, plan, example, call=call, device=device)
    except ModelError as error:
        blocks = blueprint.blocks[0].rpartition(".")[0] if blueprint.blocks else "none"
        causes = [
            f"{kind} is an encoder and a decoder: a pipeline cuts the layers of one ({blocks}), the other stays one "
            "piece, which it must be able to follow; set [axes] pipeline = 1"
            for kind in encoder_decoders(model)
        ]
        raise ModelError([*error.problems, *causes]) from error
    num_stages = plan.axes.pipeline * plan.pipeline.chunks
    problem = stage_problem(len(blueprint.blocks), pipeline=plan.axes.pipeline, chunks=plan.pipeline.chunks)
    if problem:
        raise PlanError(problem)
    if plan.pipeline.cuts:
        check_cuts(plan.pipeline.cuts, len(blueprint.blocks))
    else:
        cuts = _balanced(whole, mesh, num_stages)
        plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, cuts=cuts))
    tried = example if whole_example is None else map_tensors(with_values, whole_example)
    probe_stages(whole, mesh, plan, tried, is_traced=whole_example is None)
    _begin_alike(model, mesh)
    made = cut(whole, plan.pipeline.cuts, rank=mesh.index("pipeline"), num_ranks=plan.axes.pipeline)
    if plan.pipeline.schedule == "pipedream" and made.holders:
        shared = [(name, ", ".join(map(str, ranks))) for name, ranks in made.holders.items()]
        raise ModelError([PIPEDREAM_WITH_SHARED_WEIGHTS.message(name=name, ranks=ranks) for name, ranks in shared])
    make_tied_groups(made, mesh)
    _materialise_shared(made, mesh)
    return made, plan


def _balanced(whole: Outline, mesh: Mesh, num_stages: int) -> tuple[int, ...]:
    """Cuts by which stages take about the same time, as rank 0 measures it."""

    def find() -> list[int]:
        first, blocks, last = _find_costs(whole, mesh.world.device)
        in_flight = _in_flight(mesh.plan, num_stages)
        return list(balance(blocks, num_stages, first=first, last=last, in_flight=in_flight))

    return tuple(value_of_first(find, mesh.everyone("control")))


def _find_costs(whole: Outline, device: torch.device) -> tuple[BlockCost, list[BlockCost], BlockCost]:
    """Costs before the blocks, of each block, and after the blocks."""
    modules = dict(whole.meta_copy.named_modules(remove_duplicate=False))
    units = [Unit(call.unit, modules[call.unit], *call.arguments) for call in whole.flow.calls]
    by_block = {block: FREE for block in whole.blueprint.blocks}
    before = after = FREE
    seen_block = False
    for call, cost in zip(whole.flow.calls, time_units(units, device), strict=True):
        if call.unit in by_block:
            by_block[call.unit], seen_block = _sum(by_block[call.unit], cost), True
        elif seen_block:
            after = _sum(after, cost)
        else:
            before = _sum(before, cost)
    return before, list(by_block.values()), after


def _sum(one: BlockCost, other: BlockCost) -> BlockCost:
    return BlockCost(
        time_s=one.time_s + other.time_s,
        state_bytes=one.state_bytes + other.state_bytes,
        activation_bytes=one.activation_bytes + other.activation_bytes,
    )


def _in_flight(plan: Plan, num_stages: int) -> list[int]:
    """Most microbatches between their forward and backward pass, on each stage."""
    m, schedule = plan.step.microbatches, plan.pipeline.schedule
    if schedule in ("naive", "gpipe"):
        return [1 if schedule == "naive" else m] * num_stages
    return [num_stages - i if schedule in FLUSH_FREE else min(num_stages - i, m) for i in range(num_stages)]


def _begin_alike(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank rank 0's weights, before it drops those of other stages."""
    own = [tensor.detach() for _, tensor in model_tensors(model) if not tensor.is_meta]
    copy_from_first([tensor for tensor in own if tensor.device == mesh.world.device], mesh.axis_groups)
    for tensor in own:
        if tensor.device != mesh.world.device:  # one at a time: the whole model may not fit there
            there = tensor.to(mesh.world.device)
            copy_from_first([there], mesh.axis_groups)
            tensor.copy_(there)


def _materialise_shared(made: CutModel, mesh: Mesh) -> None:
    """Initialise parameters on the meta device that several stages hold, alike on all of them."""
    groups = tied_groups(made, mesh)
    own = dict(made.model.named_parameters())
    shared = [name for name in groups if own[name].is_meta]
    if shared:
        # The materialiser of all other tensors fills buffers too, and refuses those without first values.
        Materialiser(made.model, mesh.world.device, with_buffers=False).fill([own[name] for name in shared])
        filled = dict(made.model.named_parameters())
        for name in shared:
            copy_from_first([filled[name]], [groups[name]])
