"""Gradients of replicated parameters: those that all tensor ranks hold whole, and entries that some ranks repeat.

All are exchanged once per step, after the sum over data (`comm/shared_gradients.py`), with one exception: where state
is sharded over data, and the ranks that hold a repeated entry keep different parts of it. Then it is summed over these
ranks before the sum over data, as soon as the gradient is computed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradient
from weft.mesh import Mesh
from weft.parallel.tensor.shares import AXIS, Repeated, Shares
from weft.parallel.zero.grouping import describe_parameters
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.tensor import Range
from weft.plan.plan import Plan


def find_misaligned(model: nn.Module, blocks: Sequence[str], shares: Shares, plan: Plan) -> frozenset[str]:
    """Parameters of which tensor ranks may keep different parts: their flat buffers also hold parts of uneven sizes."""
    if Sharding.of(plan).num_parts == 1:
        return frozenset()
    specs, uneven = describe_parameters(model, blocks if plan.data.shard == "parameters" else ()), shares.uneven
    # All that is outside blocks is in the root, where there is a tensor axis.
    unit_of = {spec.name: None if spec.is_outside_blocks else spec.block for spec in specs}
    units = {unit for name, unit in unit_of.items() if name in uneven}
    return frozenset(name for name, unit in unit_of.items() if unit in units)


def find_own_buffers(shares: Shares, misaligned: Collection[str], mesh: Mesh) -> dict[str, str]:
    """Misaligned parameters that several ranks hold whole, which need flat buffers of their own, and these ranks."""
    replicated = {name: "tensor ranks" for name in misaligned if name not in shares.splits}
    here = (one for one in shares.repeated if one.place == mesh.index(AXIS) and one.name in misaligned)
    return replicated | {one.name: f"tensor ranks {one.holders}" for one in here if shares.is_whole_part(one)}


def shared_gradients(
    model: nn.Module,
    shares: Shares,
    mesh: Mesh,
    *,
    partial: Collection[str],
    misaligned: Collection[str],
    sums_may_differ: bool,
) -> list[SharedGradient]:
    """The gradients that ranks along the tensor axis exchange after the sum over data; collective.

    `partial`: whole parameters that are used on shards. `sums_may_differ`: sums over data may round differently on
    two of these ranks.
    """
    group = mesh.group(AXIS, "activations")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = [name for name in named if name not in shares.splits]
    shared = [SharedGradient(name=name, group=group, kind="sum") for name in whole if name in partial]
    if sums_may_differ:
        shared += [SharedGradient(name=name, group=group, kind="broadcast") for name in whole if name not in partial]
    for one, holders, is_early in _repeated_here(shares, named, misaligned, mesh):
        if shares.is_whole_part(one):
            shared.append(SharedGradient(name=one.name, group=holders, kind="sum"))
        elif not is_early:
            inner = math.prod(named[one.name].shape[1:])
            start, stop = one.entries
            elements = (start * inner, stop * inner) if one.dim == 0 else None
            within = (one.dim, start, stop - start)
            shared.append(SharedGradient(name=one.name, group=holders, kind="sum", within=within, elements=elements))
    return shared


def add_early_sum_hooks(model: nn.Module, shares: Shares, mesh: Mesh, *, misaligned: Collection[str]) -> None:
    """Let gradients of repeated entries that are misaligned after the sum over data be summed before it; collective."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for one, holders, is_early in _repeated_here(shares, named, misaligned, mesh):
        if is_early:
            start, stop = one.entries
            _add_up(named[one.name], holders, within=(one.dim, start, stop - start))


def _repeated_here(
    shares: Shares, named: Collection[str], misaligned: Collection[str], mesh: Mesh
) -> list[tuple[Repeated, Group, bool]]:
    """This rank's repeated entries, and the ranks that hold them, in an order that all of these have.

    The third is True if these ranks would not keep the same parts of the entries after the sum over data.
    """
    keys = {one.holders: (f"{AXIS}:{','.join(map(str, one.holders))}", "repeated") for one in shares.repeated}
    mesh.add_groups(sorted(keys.values()))
    is_sharded = Sharding.of(mesh.plan).num_parts > 1
    places: defaultdict[tuple[str, tuple[int, ...]], Counter[Range]] = defaultdict(Counter)
    for one in shares.repeated:
        places[one.name, one.holders][one.entries] += 1
    found = []
    for one in shares.repeated:
        if one.place == mesh.index(AXIS) and one.name in named:
            is_same = set(places[one.name, one.holders].values()) == {len(one.holders)}
            may_be_misaligned = one.name in misaligned or not is_same or one.dim > 0
            is_early = is_sharded and may_be_misaligned and not shares.is_whole_part(one)
            found.append((one, mesh.group(*keys[one.holders]), is_early))
    return sorted(found, key=lambda one: keys[one[0].holders])


def _add_up(parameter: nn.Parameter, group: Group, *, within: tuple[int, int, int]) -> None:
    """Sum a part of a parameter's gradient over a group as soon as it is computed."""

    def add_up(gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        part = whole.narrow(*within)
        flat = part.contiguous()
        all_reduce(flat, group)
        if flat is not part:
            part.copy_(flat)
        return whole

    parameter.register_hook(add_up)
