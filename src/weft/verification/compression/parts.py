"""Which parts of which tensors a plan's replicas compress, told by the ranks that have them.

Every tensor is cut as the plan cuts it (tensor axis, pipeline, ZeRO), and each rank compresses its part by itself. A
part goes as it is if it is small or has one dim, or if several ranks of a replica have the tensor or some rows of it:
those are summed, or must stay equal, between these ranks. Where ranks of a replica share sequences, or several replicas
a host, they first sum their gradients, and each compresses a slice of every bucket; only where these slices begin is
asked of the sync itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

import torch

from weft.comm.objects import gather_values
from weft.layout import Range, Runs
from weft.plan.exchange.coded_tensor import is_coded
from weft.plan.exchange.gradient_exchange import codec_groups
from weft.plan.partition.host_levels import find_host_place
from weft.plan.plan import Plan
from weft.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPart:
    """A part of a tensor that is compressed by itself."""

    name: str
    num_columns: int
    """Columns of the tensor that it is a range of: a rank's share, before it is sharded or sliced."""
    places: torch.Tensor
    """The place of each element in the flattened whole tensor."""
    by_host: tuple[tuple[int, ...], ...] = ()
    """The replicas on each host, if those are summed as they are and hosts compress."""


def num_coded_replicas(plan: Plan) -> int:
    """The number of replicas between which the codec acts."""
    if plan.replica_axis is not None:
        return plan.num_replicas
    return plan.axes.data_ranks if plan.data.shard == "nothing" else plan.axes.replicate


def find_coded_parts(trainer: Trainer) -> list[CodedPart]:
    """All parts of one replica, the same on every rank; collective."""
    mesh, plan = trainer.mesh, trainer.mesh.plan
    mine: list[object] = []
    host = find_host_place(plan, mesh.world.hosts, mesh.world.rank)
    # Its counterparts in other replicas, or on other hosts, have the same parts.
    is_first = mesh.index(_codec_axis(plan)) == 0 if host is None else host.host == 0
    if plan.codec.name not in ("none", "half") and is_first:
        mine = [[*one, [] if host is None else host.places] for one in _own_parts(trainer)]
    found: dict[str, CodedPart] = {}
    for one in (one for ranks_parts in gather_values(mine, mesh.everyone("control")) for one in ranks_parts):
        name, num_columns, runs, by_host = one
        together = tuple(tuple(replicas) for replicas in by_host)
        part = CodedPart(name=name, num_columns=num_columns, places=places_of(runs), by_host=together)
        found.setdefault(f"{name} {num_columns} {runs}", part)  # others may have copies of it
    return list(found.values())


def _codec_axis(plan: Plan) -> str:
    return plan.replica_axis or ("data" if plan.data.shard == "nothing" else "replicate")


def _own_parts(trainer: Trainer) -> Iterator[tuple[object, ...]]:
    """Name, number of columns and runs of every part of this rank."""
    mesh, codec = trainer.mesh, trainer.mesh.plan.codec
    sizes, coordinates = mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank)
    together = _held_together(trainer)
    slices = _slices(trainer)
    for piece in trainer.sync.pieces:
        layout = piece.layout
        shape = layout.local_shape(sizes, coordinates)
        if piece.name in together or not is_coded(codec, shape):
            continue
        if slices is not None:
            layout = replace(layout, flat_range=slices.get(piece.name, (0, 0)))
        runs = [astuple(one) for one in layout.runs(sizes, coordinates)]
        if runs:
            yield piece.name, math.prod(shape[1:]), runs


def _held_together(trainer: Trainer) -> frozenset[str]:
    """Parameters of which several ranks of a replica have some rows, or, where gradients are exchanged, parts of the
    gradient."""
    parts, names = trainer.parts, set[str]()
    sums_gradients = trainer.mesh.plan.replica_axis is None
    if parts.tensor is not None:
        names |= parts.tensor.shares.overlapping
    if parts.tensor is not None and sums_gradients:
        names |= {one.name for one in parts.tensor.shared_gradients(sums_may_differ=False)}
    if parts.cut is not None and sums_gradients:
        names |= parts.cut.holders.keys()
    return frozenset(names)


def _slices(trainer: Trainer) -> dict[str, Range] | None:
    """The range of each of this rank's tensors that it compresses, by name; None where it compresses all it has."""
    plan, world = trainer.mesh.plan, trainer.mesh.world
    if codec_groups(plan, rank=world.rank, hosts=world.hosts).num_inside == 1 or plan.replica_axis is not None:
        return None
    assert trainer.sync.compressed is not None
    return trainer.sync.compressed.ranges()


def places_of(all_runs: Sequence[Sequence[int]]) -> torch.Tensor:
    """The place of each element of these runs, given as plain numbers, in the flattened whole tensor."""
    names = [one.name for one in fields(Runs)]
    places = [
        torch.arange(there, there + runs.numel)
        for runs in (Runs(**dict(zip(names, one, strict=True))) for one in all_runs)
        for there, _ in runs.places()
    ]
    return torch.cat(places)
