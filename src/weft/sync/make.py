"""Chooses and makes the sync of a plan.

one data rank, the model's own precision        `NoSync`; also a stage of a pipeline with nothing to train
several, the model's own precision               `AllReduce`, with a codec `CompressedAllReduce`
anything sharded, cast, narrowed or offloaded    `ZeroSync`, with as many parts as ranks share one copy
replicas that differ between exchanges           `LocalSync` around the one of these that fits one replica;
                                                 `DelayedSync` where exchanges are merged later, `StreamingSync`
                                                 where fragments of the model are exchanged by themselves
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.blueprint import Blueprint
from weft.comm.broadcast_many import copy_from_first
from weft.comm.group import Group
from weft.errors import ModelError
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.state.batchnorm import has_batch_norms, running_statistics
from weft.parallel.state.buffers import persistent_buffers
from weft.parallel.state.materialise import Cut, Draws, Materialiser
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import Gathering
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.parallel.zero.grouping import cast_between_layers, compute_dtypes, describe_parameters
from weft.parallel.zero.overlapped_gather import OverlappedGathers
from weft.parallel.zero.unit import Unit
from weft.plan.late_merges import merges_late, uses_streaming
from weft.plan.partition import flat_buffers
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.host_levels import level_groups, uneven_hosts
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.sync.allreduce import AllReduce
from weft.sync.base import PipelineSync
from weft.sync.compressed_all_reduce import CompressedAllReduce, coded_places
from weft.sync.compressed_in_process import CompressedInProcess
from weft.sync.delayed import DelayedSync
from weft.sync.in_process import InProcessExchange
from weft.sync.local import LocalSync
from weft.sync.norm import GradientRules
from weft.sync.replica_compression import ReplicaCompression
from weft.sync.served import ServedSync
from weft.sync.streaming import StreamingSync
from weft.sync.whole_parameters import NoSync
from weft.sync.zero import ZeroSync

log = logging.getLogger("weft")

ONE_REPLICA = (
    '[codec] name = "{name}" has no effect: there is one replica, which exchanges nothing with others; '
    "set [axes] data or replicate to 2 or more to compress"
)


def has_no_counterpart(plan: Plan) -> bool:
    """True if there is a codec, and nothing that it could compress is exchanged."""
    is_alone = plan.num_replicas == 1 and plan.axes.data_ranks == 1
    return plan.codec.name != "none" and is_alone and not is_served(plan)


def needs_flats(model: nn.Module, mesh: Mesh) -> bool:
    """True if the plan moves this model's parameters into flat buffers, so that they are not its own tensors."""
    return flat_buffers.needs_flats(mesh.plan, describe_parameters(model), device=mesh.world.device.type)


def place(
    model: nn.Module,
    mesh: Mesh,
    blueprint: Blueprint,
    *,
    layouts: Mapping[str, Layout],
    cut: Cut | None,
    rules: GradientRules,
    stage_of: Mapping[str, int] | None,
    fragment_of: Mapping[str, int] | None = None,
    draws: Draws = lambda name: True,
    in_process: InProcessExchange | None = None,
) -> PipelineSync:
    """Put a model on this rank's device, its parameters where its plan wants them, equal on all ranks; collective.

    `layouts` say which part of the whole each parameter is, and `cut` makes that part of one that still has no memory.
    `stage_of` is the stage of every block in a pipeline, `fragment_of` the fragment that each parameter travels in
    between replicas. Parameters that are not drawn get values later.
    `in_process`: the exchange between replicas that are all in one process.
    """
    if in_process is None and mesh.world.rank == 0 and has_no_counterpart(mesh.plan):
        log.warning("%s", ONE_REPLICA.format(name=mesh.plan.codec.name))
    materialiser = Materialiser(model, mesh.world.device, cut, draws=draws)
    inside: PipelineSync
    if needs_flats(model, mesh):
        inside = _place_in_flats(model, mesh, blueprint, layouts, materialiser, rules, stage_of)
    else:
        materialiser.fill_all()
        inside = _place_whole(model, mesh, layouts, rules)
    if mesh.plan.replica_axis is None and in_process is not None:
        is_broadcast = mesh.plan.data.buffers == "broadcast" and has_batch_norms(model)
        changed = functools.partial(_buffers, model) if is_broadcast else list
        return CompressedInProcess(inside, mesh.state_group("gradients"), mesh.plan, buffers=changed)
    if is_served(mesh.plan):
        return ServedSync(inside, model, blueprint.blocks, summed=[one.name for one in rules.shared])
    if mesh.plan.replica_axis is None:
        return inside
    sizes, coordinates = mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank)
    return _kind_between_replicas(mesh)(
        inside,
        mesh.between_replicas("weights"),
        mesh.plan,
        device=mesh.world.device,
        replica=mesh.whole_replica("control"),
        statistics=functools.partial(running_statistics, model) if mesh.plan.data.buffers != "local" else list,
        shared=rules.shared_weights,
        shapes={name: layouts[name].local_shape(sizes, coordinates) for name in (one.name for one in inside.pieces)},
        number=mesh.replica,
        fragment_of=fragment_of,
        in_process=in_process,
    )


def _kind_between_replicas(mesh: Mesh) -> Callable[..., LocalSync]:
    """The sync between replicas that differ, with what it needs beside what all of them do."""
    plan = mesh.plan
    if not merges_late(plan):
        return LocalSync
    # Under `offload` what is under way is in host memory, and travels from there.
    exchange_group = mesh.between_replicas("control" if plan.data.offload else "weights")
    world = mesh.world
    num_sharing = world.hosts.count(world.hosts[world.rank]) if plan.data.offload else world.ranks_on_device
    settings: dict[str, Any] = {
        "exchange_group": exchange_group,
        "everyone": mesh.everyone("control"),
        "num_sharing": num_sharing,
    }
    if uses_streaming(plan):
        return functools.partial(StreamingSync, **settings)
    return functools.partial(DelayedSync, **settings, is_first_rank=mesh.world.rank == 0)


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    return list(persistent_buffers(model).values())


def _place_whole(model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], rules: GradientRules) -> PipelineSync:
    """The sync of one replica whose parameters stay the model's own tensors."""
    model.to(mesh.world.device)
    copy_from_first([*model.parameters(), *model.buffers()], mesh.copy_groups)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    pieces = [Piece(name=name, tensor=parameter, layout=layouts[name]) for name, parameter in trainable]
    group = mesh.state_group("gradients")
    if group.size == 1 or not pieces:
        return NoSync(pieces, group, rules, bucket_bytes=mesh.plan.comm.bucket_bytes)
    if coded_places(pieces, mesh.plan, rules) and mesh.plan.replica_axis is None:
        inside, across = codec_groups(mesh)
        if across.size > 1:
            return CompressedAllReduce(
                pieces,
                group,
                mesh.plan,
                inside=inside,
                across=across,
                device=mesh.world.device,
                # Ranks that share sequences exchange inside attention's backward pass, and may use other parameters.
                waits_in_backward=_waits_in_backward(model, mesh.plan) or mesh.plan.axes.sequence > 1,
                rules=rules,
            )
    return AllReduce(pieces, group, bucket_bytes=mesh.plan.comm.bucket_bytes, rules=rules)


@torch.no_grad()
def _place_in_flats(
    model: nn.Module,
    mesh: Mesh,
    blueprint: Blueprint,
    layouts: Mapping[str, Layout],
    materialiser: Materialiser,
    rules: GradientRules,
    stage_of: Mapping[str, int] | None,
) -> ZeroSync:
    plan, device, sharding = mesh.plan, mesh.world.device, Sharding.of(mesh.plan)
    reductions, replicas = reduction_groups(mesh)
    # Gathers have a group of their own: beside a backward pass their order and that of reductions may differ.
    group = reductions if reductions.size == 1 else mesh.state_group("parameters")
    if sharding.stage < 3:
        materialiser.fill_all()
    # Parameters without memory have their global shapes until they are filled.
    sizes, coordinates = mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank)
    specs = [
        dataclasses.replace(
            spec,
            shape=layouts[spec.name].local_shape(sizes, coordinates),
            holders=rules.own_buffers.get(spec.name, ""),
        )
        for spec in describe_parameters(model, blueprint.blocks)
    ]
    flats = []
    named = dict(model.named_parameters())
    for buffer in flat_buffers.flat_buffers(specs, plan):
        with materialiser.filling([named[name] for name in buffer.names]) as parameters:
            flats.append(
                FlatParameters(
                    buffer,
                    parameters,
                    layouts=[layouts[name] for name in buffer.names],
                    group=group,
                    source=mesh.copy_groups,
                    keep_whole=sharding.stage < 3,
                    device=device,
                    master_device=torch.device("cpu") if plan.data.offload else device,
                )
            )
    materialiser.finish()
    _place_rest(model, mesh, flats)
    everyone = mesh.batch_group("control")
    sync = ZeroSync(
        flats,
        group=reductions,
        replicas=replicas,
        place=(everyone.index, everyone.size),
        sharding=sharding,
        device=device,
        waits_in_backward=_waits_in_backward(model, plan),
        bucket_bytes=plan.comm.bucket_bytes,
        rules=rules,
        compression=_replica_compression(mesh, replicas, rules),
    )
    if sharding.stage == 3:
        _add_gathering(sync, model, blueprint, stay_whole=sharding.stays_whole, stage_of=stage_of)
    else:
        sync.overlapped_gathers = OverlappedGathers(model, blueprint.blocks, flats)
    return sync


def _place_rest(model: nn.Module, mesh: Mesh, flats: Sequence[FlatParameters]) -> None:
    """Buffers, and frozen parameters that are in no flat buffer."""
    device, dtypes = mesh.world.device, compute_dtypes(model, mesh.plan)
    taken = {id(parameter) for flat in flats for parameter in flat.parameters}
    rest: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken:
            parameter.data = parameter.data.to(device, dtypes[name])
            rest.append(parameter)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    copy_from_first([*rest, *model.buffers()], mesh.copy_groups)
    if mesh.plan.precision.compute != "model":
        cast_between_layers(model)


def reduction_groups(mesh: Mesh) -> tuple[Group, list[Group]]:
    """The ranks that share one copy of the state, and those that keep the same part of it."""
    sharing = mesh.state_group("gradients")
    if mesh.plan.data.shard == "nothing":
        return sharing.alone, [sharing]
    return sharing, [mesh.group("replicate", "gradients")] if mesh.plan.replica_axis is None else []


def codec_groups(mesh: Mesh) -> tuple[Group, Group]:
    """The ranks that are summed as they are before a codec compresses, and those between which it does: the ranks that
    share the sequences of one replica, and the replicas; or those of one host, and hosts."""
    plan, hosts = mesh.plan, mesh.world.hosts
    if levels := level_groups(plan, hosts):
        inside, between = (mesh.group(*key) for key in levels)
        return inside, between
    uneven = uneven_hosts(plan, hosts)
    if uneven is not None and mesh.world.rank == 0:
        log.warning("%s", uneven)
    if plan.data.shard != "nothing":
        across = mesh.group("replicate", "gradients")
        return across.alone, across
    if plan.axes.sequence == 1:
        across = mesh.state_group("gradients")
        return across.alone, across
    return mesh.group("ring+ulysses", "gradients"), mesh.group("data", "gradients")


def _replica_compression(mesh: Mesh, replicas: Sequence[Group], rules: GradientRules) -> ReplicaCompression | None:
    """How replicas that keep gradients in flat buffers compress them; None where they do not."""
    if mesh.plan.codec.name == "none" or mesh.plan.replica_axis is not None or not replicas:
        return None
    inside, across = codec_groups(mesh)
    if across.size == 1:
        return None
    (whole,) = replicas
    return ReplicaCompression(
        mesh.plan, inside=inside, across=across, whole=whole, device=mesh.world.device, rules=rules
    )


def _waits_in_backward(model: nn.Module, plan: Plan) -> bool:
    """True if layers exchange inside the backward pass, so that no rank may wait there for an exchange of gradients."""
    return plan.data.buffers == "synchronise" and has_batch_norms(model)


def _add_gathering(
    sync: ZeroSync, model: nn.Module, blueprint: Blueprint, *, stay_whole: bool, stage_of: Mapping[str, int] | None
) -> None:
    if not blueprint.blocks:
        log.warning(
            'no list of blocks was found in the model, so [data] shard = "parameters" gathers all of it at once; '
            "give the model a weft_blueprint() that names its blocks"
        )
    flats_of: dict[int, list[FlatParameters]] = {}
    for flat in sync.flats:
        if flat.buffer.block is not None:
            flats_of.setdefault(flat.buffer.block, []).append(flat)
    in_root = tuple(flat for flat in sync.flats if flat.buffer.block is None)
    root = Unit(modules=(model,), flats=in_root, place="root")
    units = {number: _make_unit(model, blueprint, number, flats_of[number]) for number in sorted(flats_of)}
    if stage_of is not None:
        named = {blueprint.blocks[number]: unit for number, unit in units.items()}
        sync.gathering = StageGathering(root, named, stage_of)
    else:
        sync.gathering = Gathering(root, list(units.values()), sync.close, stay_whole=stay_whole)
    why = "refuses to save parameters that no rank has whole"
    add_hook(model, "state_dict_pre", _refuse_state_dict, by="zero", why=why)


def _make_unit(model: nn.Module, blueprint: Blueprint, number: int, flats: Sequence[FlatParameters]) -> Unit:
    """A block, or layers outside of blocks."""
    if not flats[0].buffer.is_outside_blocks:
        return Unit(modules=(model.get_submodule(blueprint.blocks[number]),), flats=tuple(flats))
    layers = dict.fromkeys(name.rpartition(".")[0] for flat in flats for name in flat.names)
    modules = tuple(model.get_submodule(layer) for layer in layers)
    return Unit(modules=modules, flats=tuple(flats), place="before" if number < 0 else "after")


def _refuse_state_dict(*_: object) -> None:
    raise ModelError(
        'with [data] shard = "parameters" no rank has whole parameters, so state_dict() would save nothing of use; '
        "call trainer.save(directory) on every rank, which writes whole tensors under the model's own names"
    )
