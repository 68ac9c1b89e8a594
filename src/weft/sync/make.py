"""From a plan to the sync that carries it out: one page of decisions.

one data rank, the model's own precision        `Alone`; also a stage of a pipeline with nothing to train
several, the model's own precision               `AllReduce`
anything sharded, cast, narrowed or offloaded    `ZeroSync`, with as many parts as ranks share one copy
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.comm.collectives import broadcast
from weft.comm.group import Group
from weft.errors import ModelError
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.state.materialise import Cut, Materialiser
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.gather import Gathering, Unit
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.parallel.zero.grouping import DTYPES, Members, cast_between_layers, flat_kinds, make_members
from weft.sync.allreduce import AllReduce
from weft.sync.base import Alone, Apart, Sync, whole_pieces
from weft.sync.zero import ZeroSync
from weft.sync.zero_gradients import GradientSettings

log = logging.getLogger("weft")

_HALF = (torch.float16, torch.bfloat16)


def needs_flats(model: nn.Module, mesh: Mesh) -> bool:
    """Whether parameters must move into flat buffers, instead of staying the model's own tensors."""
    plan = mesh.plan
    is_half = any(parameter.dtype in _HALF for parameter in model.parameters() if parameter.requires_grad)
    return (
        plan.data.shard != "nothing"
        or plan.precision.compute != "model"
        or (plan.precision.reduce, plan.precision.accumulate) != ("fp32", "fp32")
        or (plan.data.offload and mesh.world.device.type != "cpu")
        or (is_half and (mesh.data_size * mesh.sequence_size > 1 or plan.step.microbatches > 1))
    )


def place(
    model: nn.Module,
    mesh: Mesh,
    blueprint: Blueprint,
    *,
    layouts: Mapping[str, Layout] | None = None,
    cut: Cut | None = None,
    apart: Apart | None = None,
    stage_of: Mapping[str, int] | None = None,
    initialise: bool = True,
) -> Sync:
    """Put a model on this rank's device, its parameters where its plan wants them, equal on all ranks; collective.

    `layouts` say which part of the whole each parameter is, and `cut` makes that part of one that still has no memory.
    `apart` and `stage_of`, the stage of every block, are for pipelines. Without `initialise`, values come later.
    """
    apart = apart or Apart()
    if layouts is None:
        layouts = {name: Layout(global_shape=tuple(p.shape)) for name, p in model.named_parameters()}
    materialiser = Materialiser(model, mesh.world.device, cut, initialise=initialise)
    if needs_flats(model, mesh):
        return _place_sharded(model, mesh, blueprint, layouts, materialiser, apart, stage_of)
    materialiser.fill_all()
    model.to(mesh.world.device)
    copy_from_first([*model.parameters(), *model.buffers()], mesh.batch_group("control"))
    pieces, group = whole_pieces(model, layouts), mesh.state_group("gradients")
    if group.size == 1 or not pieces:
        return Alone(pieces, group, apart)
    return AllReduce(pieces, group, bucket_bytes=mesh.plan.comm.bucket_bytes, apart=apart)


@torch.no_grad()
def copy_from_first(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Every rank starts from the first one's values, whatever its own random state was."""
    for tensor in tensors:
        flat = tensor.detach().contiguous()
        broadcast(flat, group)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


def find_layouts(layouts: Mapping[str, Layout], sync: Sync) -> dict[str, Layout]:
    """Of every tensor by name: this rank's place in it, where `layouts` say what is left by the axes."""
    held = {name: flat.layout(member) for flat in sync.flats for member, name in enumerate(flat.names)}
    return {**layouts, **held}


def _place_sharded(
    model: nn.Module,
    mesh: Mesh,
    blueprint: Blueprint,
    layouts: Mapping[str, Layout],
    materialiser: Materialiser,
    apart: Apart,
    stage_of: Mapping[str, int] | None,
) -> ZeroSync:
    plan, device = mesh.plan, mesh.world.device
    stage = ("nothing", "optimizer", "gradients", "parameters").index(plan.data.shard)
    stays_whole = stage == 3 and plan.data.reshard == "step" and plan.step.microbatches > 1
    reductions, replicas = _groups(mesh)
    if stage < 3:
        materialiser.fill_all()
    members = make_members(model, blueprint, plan)
    flats = []
    for inside in members:
        with materialiser.filling(inside) as filled:
            flats.append(_make_flat(filled, layouts, mesh, reductions, keep_whole=stage < 3))
    materialiser.finish()
    _place_rest(model, mesh, flats)
    # With one part the whole is the part: nothing is gained by giving it back.
    is_whole = stage < 2 or reductions.size == 1
    settings = GradientSettings(
        accumulate=DTYPES[plan.precision.accumulate],
        reduce=DTYPES[plan.precision.reduce],
        # Microbatches of a pipeline overlap: their gradients add up here, and leave when the stage's are complete.
        every_microbatch=not is_whole and not stays_whole and mesh.size("pipeline") == 1,
        keep_whole=is_whole,
    )
    sync = ZeroSync(
        flats,
        group=reductions,
        replicas=replicas,
        settings=settings,
        device=device,
        waits_in_backward=plan.data.buffers == "synchronise" and has_batch_norms(model),
        apart=apart,
    )
    if stage == 3:
        _add_gathering(sync, model, blueprint, members, flats, stays_whole=stays_whole, stage_of=stage_of)
    return sync


def _place_rest(model: nn.Module, mesh: Mesh, flats: Sequence[FlatParameters]) -> None:
    """Buffers, and frozen parameters that are in no flat buffer."""
    device, kinds = mesh.world.device, flat_kinds(model, mesh.plan)
    taken = {id(parameter) for flat in flats for parameter in flat.parameters}
    rest: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken:
            parameter.data = parameter.data.to(device, kinds[name].compute)
            rest.append(parameter)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    copy_from_first([*rest, *model.buffers()], mesh.batch_group("control"))
    if mesh.plan.precision.compute != "model":
        cast_between_layers(model)


def _groups(mesh: Mesh) -> tuple[Group, list[Group]]:
    """The ranks that share one copy of the state, and those that keep the same part of it."""
    sharing = mesh.state_group("gradients")
    if mesh.plan.data.shard == "nothing":
        alone = dataclasses.replace(sharing, ranks=(mesh.world.rank,), index=0, handle=None, shared=None)
        return alone, [sharing]
    return sharing, [mesh.group("replicate", "gradients")]


def _make_flat(
    members: Members, layouts: Mapping[str, Layout], mesh: Mesh, shared_by: Group, *, keep_whole: bool
) -> FlatParameters:
    device = mesh.world.device
    sources = [mesh.batch_group("control")]
    # Gathers have a group of their own: beside a backward pass their order and that of reductions may differ.
    group = shared_by if shared_by.size == 1 else mesh.state_group("parameters")
    return FlatParameters(
        members.named,
        layouts=[layouts[name] for name, _ in members.named],
        kind=members.kind,
        group=group,
        sources=sources,
        keep_whole=keep_whole,
        device=device,
        master_device=torch.device("cpu") if mesh.plan.data.offload else device,
    )


def _add_gathering(
    sync: ZeroSync,
    model: nn.Module,
    blueprint: Blueprint,
    members: Sequence[Members],
    flats: Sequence[FlatParameters],
    *,
    stays_whole: bool,
    stage_of: Mapping[str, int] | None,
) -> None:
    flats_of: dict[str, list[FlatParameters]] = {}
    for inside, flat in zip(members, flats, strict=True):
        flats_of.setdefault(inside.unit, []).append(flat)
    if not blueprint.blocks:
        log.warning(
            'no list of blocks was found in the model, so [data] shard = "parameters" gathers all of it at once; '
            "give the model a weft_blueprint() that names its blocks"
        )
    blocks = [name for name in blueprint.blocks if name in flats_of]
    root = Unit(module=model, flats=tuple(flats_of.get("", ())))
    units = {name: Unit(module=model.get_submodule(name), flats=tuple(flats_of[name])) for name in blocks}
    if stage_of is not None:
        sync.use(StageGathering(root, units, stage_of))
    else:
        gathering = Gathering(
            root,
            list(units.values()),
            stay_whole=stays_whole,
            block_done=lambda index: sync.close(flats_of[blocks[index]]),
        )
        sync.use(gathering)
    why = "refuses to save parameters that no rank has whole"
    add_hook(model, "state_dict_pre", _refuse_state_dict, by="zero", why=why)


def _refuse_state_dict(*_: object) -> None:
    raise ModelError(
        'with [data] shard = "parameters" no rank has whole parameters, so state_dict() would save nothing of use; '
        "call trainer.save(directory) on every rank, which writes whole tensors under the model's own names"
    )
