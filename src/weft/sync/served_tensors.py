"""The tensors and the optimizer of a worker, as its servers know them: those of all its ranks together.

A rank that holds a part of a tensor has a tensor of its own there, named by its place; ranks that hold the same part
(stages with a tied weight, ranks that share sequences) have one, which the first of them speaks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.comm.objects import gather_values
from weft.comm.world.agreement import own_versions
from weft.errors import PlanError
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.state.buffers import persistent_buffers
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.exchange.coded_tensor import is_coded
from weft.plan.exchange.push_format import rows_together
from weft.plan.model_refusals import PULL_OF_16_BIT_WEIGHTS
from weft.plan.partition.flat_buffers import DTYPES
from weft.plan.partition.server_shards import ServedTensor
from weft.plan.plan import Codec, Plan
from weft.server.protocol.optimizer_spec import Spec, describe_optimizer
from weft.server.protocol.served_run import ServedRun
from weft.server.protocol.settings import MASTER, Settings, require_readable
from weft.sync.base import Sync
from weft.sync.fixed_tensors import FixedTensors, fixed_of_all, fixed_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTensors:
    """What all ranks of a worker have together."""

    tensors: tuple[ServedTensor, ...]
    dtypes: tuple[str, ...]
    """Of each tensor."""
    optimizer: Spec
    names: tuple[str, ...]
    """Those of this rank's pieces, in their order."""
    fixed: tuple[ServedTensor, ...]
    """What is not trained."""
    fixed_dtypes: tuple[str, ...]
    places: dict[str, Any]
    """Of all that a checkpoint has, by its name here: the name and shape of the whole tensor, and the ranges of its
    dims that lie here; no ranges if it is whole."""


def served_tensors(
    pieces: Sequence[Piece],
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    codec: Codec,
    fixed: FixedTensors,
) -> ServedTensors:
    """The tensors of a worker, in the order of the forward pass, and its optimizer; collective among its ranks.

    `fixed`: what this rank does not train."""
    names = [name_of(piece.name, piece.layout, mesh) for piece in pieces]
    spec = describe_optimizer(optimizer, {id(one.tensor): name for one, name in zip(pieces, names, strict=True)})
    mine = [[*_numbers(one.tensor, codec), name] for name, one in zip(names, pieces, strict=True)]
    mine_places = {name: _place(one.name, one.layout, mesh) for name, one in zip(names, pieces, strict=True)}
    places: dict[str, Any] = {}
    found: dict[str, ServedTensor] = {}
    dtypes: dict[str, str] = {}
    specs, all_fixed = [], []
    told = gather_values([mine, spec, fixed.rows(), {**mine_places, **fixed.places}], mesh.everyone("control"))
    for rank, (rows, one_spec, rank_fixed, rank_places) in enumerate(told):
        all_fixed.append(rank_fixed)
        places |= rank_places
        for numel, item_bytes, dtype, coded, row_numel, name in rows:
            if name in found:
                found[name] = replace(found[name], holders=(*found[name].holders, rank))
                continue
            found[name] = ServedTensor(
                name=name, numel=numel, item_bytes=item_bytes, row_numel=row_numel, holders=(rank,), is_coded=coded
            )
            dtypes[name] = dtype
        specs.append(one_spec)
    not_trained, fixed_dtypes = fixed_of_all(all_fixed)
    return ServedTensors(
        tensors=tuple(found.values()),
        dtypes=tuple(dtypes.values()),
        optimizer=merge_specs(specs),
        names=tuple(names),
        fixed=not_trained,
        fixed_dtypes=fixed_dtypes,
        places=places,
    )


def _numbers(tensor: torch.Tensor, codec: Codec) -> tuple[int, int, str, bool, int]:
    """Elements, bytes of one, their dtype, whether a codec compresses them, and elements that must be together."""
    coded = is_coded(codec, tensor.shape)
    together = rows_together(codec, tensor.shape) if coded else 1
    return tensor.numel(), tensor.element_size(), str(tensor.dtype).removeprefix("torch."), coded, together


def refuse_narrow(pieces: Sequence[Piece], plan: Plan) -> None:
    """Weights of 16 bits are not rounded to 16 bits."""
    narrow = next((one for one in pieces if one.tensor.element_size() < 4), None)
    if plan.server.pull != MASTER and narrow is not None:
        dtype = str(narrow.tensor.dtype).removeprefix("torch.")
        raise PlanError(PULL_OF_16_BIT_WEIGHTS.message(plan, name=narrow.name, dtype=dtype))


def settings_of(run: ServedRun, together: ServedTensors, *, num_ranks: int, needs_norms: bool) -> Settings:
    """What this worker's ranks say to the servers."""
    plan = run.plan
    settings = Settings(
        job=run.job,
        weft=own_versions()["weft"],
        mode=plan.server.mode,
        num_servers=plan.server.shards,
        num_workers=int(plan.axes.data),
        num_ranks=num_ranks,
        staleness=plan.server.staleness,
        backups=plan.server.backups,
        compensation=plan.server.compensation,
        lr_scaling=plan.server.lr_scaling,
        clip_norm=plan.step.clip_norm,
        bucket_bytes=plan.comm.bucket_bytes,
        pull=DTYPES.get(plan.server.pull, MASTER),
        codec={} if plan.codec.name == "none" else asdict(plan.codec),
        tensors=together.tensors,
        dtypes=together.dtypes,
        optimizer=together.optimizer,
        splits=not needs_norms,
        fixed=together.fixed,
        fixed_dtypes=together.fixed_dtypes,
        places=together.places,
    )
    require_readable(settings)
    return settings


def fixed_of(model: nn.Module, sync: Sync, layouts: Mapping[str, Layout], mesh: Mesh) -> FixedTensors:
    """What this rank does not train."""
    tensors = fixed_tensors(model, sync)
    made_later = {name: Layout(global_shape=tuple(one.shape)) for name, one in tensors.items()}
    places = {**made_later, **layouts}
    saved = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return FixedTensors(
        {name_of(name, places[name], mesh): one for name, one in tensors.items()},
        {name_of(name, places[name], mesh): _place(name, places[name], mesh) for name in tensors if name in saved},
    )


def _place(name: str, layout: Layout, mesh: Mesh) -> list[Any]:
    """As `ServedTensors.places` has it."""
    ranges = layout.ranges(mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank))
    is_whole = name_of(name, layout, mesh) == name
    return [name, list(layout.global_shape), [] if is_whole else [[list(one) for one in inside] for inside in ranges]]


def name_of(name: str, layout: Layout, mesh: Mesh) -> str:
    """The name of this rank's part of a tensor: its own where it is whole, else with the part behind it."""
    ranges = layout.ranges(mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank))
    parts = zip(ranges, layout.global_shape, strict=True)
    is_whole = all(tuple(inside) == ((0, size),) for inside, size in parts)
    if is_whole:
        return name
    shown = ",".join("+".join(f"{start}:{stop}" for start, stop in inside) for inside in ranges)
    return f"{name}[{shown}]"


def merge_specs(specs: Sequence[Spec]) -> Spec:
    """The optimizer of all ranks together: groups with equal settings are one, in the order of ranks."""
    groups: dict[str, dict[str, Any]] = {}
    for spec in specs:
        for group in spec["groups"]:
            known = groups.setdefault(json.dumps(group["settings"]), {"settings": group["settings"], "tensors": []})
            known["tensors"] += [name for name in group["tensors"] if name not in known["tensors"]]
    return {"class": specs[0]["class"], "groups": list(groups.values())}
