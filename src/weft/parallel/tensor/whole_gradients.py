"""Gradients that several tensor ranks have: of parameters that all hold whole, and of entries that some repeat.

All are exchanged once in a step, after the sum over data (`comm/shared_gradients.py`), but for one case: where state is
sharded over data, and a rank and its counterparts keep different parts of a repeated entry. Then whole gradients are
summed before they leave, each as soon as it is computed.
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


def find_shifted(model: nn.Module, blocks: Sequence[str], shares: Shares, plan: Plan) -> frozenset[str]:
    """Parameters of which tensor ranks may keep different parts: with them in a flat buffer are some of uneven size."""
    if Sharding.of(plan).num_parts == 1:
        return frozenset()
    specs, uneven = describe_parameters(model, blocks if plan.data.shard == "parameters" else ()), shares.uneven
    # All that is outside blocks is in the root, where there is a tensor axis.
    unit_of = {spec.name: None if spec.is_outside else spec.block for spec in specs}
    units = {unit for name, unit in unit_of.items() if name in uneven}
    return frozenset(name for name, unit in unit_of.items() if unit in units)


def find_apart(shares: Shares, shifted: Collection[str], mesh: Mesh) -> dict[str, str]:
    """Of these, the ones that several ranks hold whole, and which ranks: they lie in buffers of their own."""
    apart = {name: "tensor ranks" for name in shifted if name not in shares.splits}
    here = (one for one in shares.repeated if one.place == mesh.index(AXIS) and one.name in shifted)
    return apart | {one.name: f"tensor ranks {one.holders}" for one in here if _is_all(one, shares)}


def shared_gradients(
    model: nn.Module,
    shares: Shares,
    mesh: Mesh,
    *,
    partial: Collection[str],
    shifted: Collection[str],
    may_differ: bool,
) -> list[SharedGradient]:
    """What a model's ranks along the tensor axis exchange after the sum over data; collective.

    `partial`: whole parameters that are used on shards. `may_differ`: sums over data may round differently on two of
    these ranks.
    """
    group = mesh.group(AXIS, "activations")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = [name for name in named if name not in shares.splits]
    shared = [SharedGradient(name=name, group=group, kind="sum") for name in whole if name in partial]
    if may_differ:
        shared += [SharedGradient(name=name, group=group, kind="alike") for name in whole if name not in partial]
    for one, holders, is_early in _repeated_here(shares, named, shifted, mesh):
        if _is_all(one, shares):
            shared.append(SharedGradient(name=one.name, group=holders, kind="sum"))
        elif not is_early:
            inner = math.prod(named[one.name].shape[1:])
            start, stop = one.entries
            elements = (start * inner, stop * inner) if one.dim == 0 else None
            within = (one.dim, start, stop - start)
            shared.append(SharedGradient(name=one.name, group=holders, kind="sum", within=within, elements=elements))
    return shared


def add_up_early(model: nn.Module, shares: Shares, mesh: Mesh, *, shifted: Collection[str]) -> None:
    """Sum gradients of repeated entries that could not be found after the sum over data; collective."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for one, holders, is_early in _repeated_here(shares, named, shifted, mesh):
        if is_early:
            start, stop = one.entries
            _add_up(named[one.name], holders, within=(one.dim, start, stop - start))


def _is_all(one: Repeated, shares: Shares) -> bool:
    """True if the entries are all that their holders have of the tensor."""
    start, stop = one.entries
    parts = shares.splits[one.name].parts
    return all(sum(b - a for a, b in parts[place]) == stop - start for place in one.holders)


def _repeated_here(
    shares: Shares, named: Collection[str], shifted: Collection[str], mesh: Mesh
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
            may_be_elsewhere = one.name in shifted or not is_same or one.dim > 0
            is_early = is_sharded and may_be_elsewhere and not _is_all(one, shares)
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
