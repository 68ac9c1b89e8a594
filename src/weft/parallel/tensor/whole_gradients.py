"""Gradients that several tensor ranks have: of parameters that all hold whole, and of entries that some repeat.

All are exchanged once in a step, after the sum over data (`comm/shared_gradients.py`), but for one case: where state is
sharded over data, and a rank and its counterparts keep different parts of a repeated entry. Then whole gradients are
summed before they leave, each as soon as it is computed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradient
from weft.mesh import Mesh
from weft.parallel.tensor.shares import AXIS, Repeated, Shares
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.tensor import Range


def shared_gradients(
    model: nn.Module, shares: Shares, partial: Collection[str], mesh: Mesh, *, may_differ: bool
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
    for one, holders, is_early in _repeated_here(shares, named, mesh):
        if not is_early:
            start, stop = one.entries
            inner = math.prod(named[one.name].shape[1:])
            shared.append(
                SharedGradient(
                    name=one.name,
                    group=holders,
                    kind="sum",
                    within=(one.dim, start, stop - start),
                    elements=(start * inner, stop * inner) if one.dim == 0 else None,
                )
            )
    return shared


def add_up_early(model: nn.Module, shares: Shares, mesh: Mesh) -> None:
    """Sum gradients of repeated entries that could not be found after the sum over data; collective."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for one, holders, is_early in _repeated_here(shares, named, mesh):
        if is_early:
            start, stop = one.entries
            _add_up(named[one.name], holders, within=(one.dim, start, stop - start))


def _repeated_here(shares: Shares, named: Collection[str], mesh: Mesh) -> list[tuple[Repeated, Group, bool]]:
    """This rank's repeated entries, and the ranks that hold them, in an order that all of these have.

    The third is True if these ranks would not keep the same parts of the entries after the sum over data.
    """
    keys = {one.holders: (f"{AXIS}:{','.join(map(str, one.holders))}", "repeated") for one in shares.repeated}
    mesh.add_groups(sorted(keys.values()))
    is_sharded, is_even = Sharding.of(mesh.plan).num_parts > 1, shares.is_even
    places: defaultdict[tuple[str, tuple[int, ...]], Counter[Range]] = defaultdict(Counter)
    for one in shares.repeated:
        places[one.name, one.holders][one.entries] += 1
    found = []
    for one in shares.repeated:
        if one.place == mesh.index(AXIS) and one.name in named:
            is_same = set(places[one.name, one.holders].values()) == {len(one.holders)}
            is_early = is_sharded and not (is_even and is_same and one.dim == 0)
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
