"""Global tensors gathered from the parts that ranks hold, for tests that compare them with one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weft.checkpoint.local_parts import Held
from weft.comm.collectives import all_gather, broadcast
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.zero.flat_parameters import FlatParameters


@torch.no_grad()
def whole_tensors(
    held: dict[str, Held], mesh: Mesh, part_of: Callable[[str, Held], torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The global tensor of each parameter (or of a moment of it), one by one; collective.

    `part_of` returns this rank's part, of the shape of the held tensor; None, on all ranks alike, skips the parameter.
    A yielded tensor may be a view of a buffer that is freed with the next one.
    """
    for name, part in _along_data(held, part_of):
        yield name, join(part, held[name].layout, mesh)


@torch.no_grad()
def join(part: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """Gather a tensor that the tensor axis splits; collective. Parts may differ in shape."""
    if not layout.splits:
        return part
    group, sizes = mesh.group("tensor", "control"), mesh.grid.axes.sizes
    whole = part.new_empty(layout.global_shape, device=mesh.world.device)
    for place, rank in enumerate(group.ranks):
        coordinates = mesh.grid.coordinates(rank)
        theirs = whole.new_empty(layout.local_shape(sizes, coordinates))
        if place == group.index:
            theirs.copy_(part)
        broadcast(theirs, group, root=place)
        for there, here in layout.windows(sizes, coordinates):
            whole[there] = theirs[here]
    return whole


def _along_data(
    held: dict[str, Held], part_of: Callable[[str, Held], torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather what the data axis shards."""
    together: dict[FlatParameters, list[str]] = {}
    for name, one in held.items():
        part = part_of(name, one)
        if part is None:
            continue
        if one.flat is None or one.flat.flat.num_parts == 1:
            yield name, part
        else:
            together.setdefault(one.flat, []).append(name)
    for flat, names in together.items():
        yield from _gather_flat(flat, {name: part_of(name, held[name]) for name in names})


def _gather_flat(flat: FlatParameters, parts: dict[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    first = next(part for part in parts.values() if part is not None)
    mine = torch.zeros(flat.flat.part_numel, dtype=first.dtype, device=flat.mine.device)
    for name, view in zip(flat.names, flat.kept_views(mine), strict=True):
        part = parts.get(name)
        if part is not None:
            view.copy_(part)
    whole = mine.new_empty(flat.flat.numel)
    all_gather(whole, mine, flat.group)
    for name, view in zip(flat.names, flat.member_views(whole), strict=True):
        if name in parts:
            yield name, view
