"""What this rank holds of every parameter, under the unsplit model's names, and how the whole of it comes together.

A parameter may be a tensor of the model, a window on a flat buffer, or a part of one that other ranks share.
Checkpoints and `verify` need not know which: they see a tensor and its layout, and ask for the whole one flat buffer at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.comm.collectives import all_gather, broadcast
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.sync.base import Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of one parameter, in the precision that training keeps it in."""

    tensor: torch.Tensor
    layout: Layout
    flat: FlatParameters | None = None
    """The buffer it lies in, if any."""
    piece: nn.Parameter | None = None
    """As the optimizer sees it; None if it is frozen."""


def held_parameters(model: nn.Module, sync: Sync, layouts: Mapping[str, Layout]) -> dict[str, Held]:
    """Of every parameter by name, in the order of the model. `layouts` say where this rank's part of each lies."""
    pieces = {piece.name: piece.tensor for piece in sync.pieces}
    in_flats = {}
    for flat in sync.flats:
        for name, part in zip(flat.names, flat.kept_views(flat.master), strict=True):
            in_flats[name] = Held(tensor=part, layout=layouts[name], flat=flat, piece=pieces.get(name))
    return {
        name: in_flats.get(name) or Held(tensor=parameter.detach(), layout=layouts[name], piece=pieces.get(name))
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def whole_tensors(
    held: dict[str, Held], mesh: Mesh, part_of: Callable[[str, Held], torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole of something kept for each parameter (itself, a moment), one by one; collective.

    `part_of` gives this rank's part of it, of the shape of what is held; None, on all ranks alike, leaves the parameter
    out. What is yielded may be a buffer that goes with the next one.
    """
    for name, part in _along_data(held, part_of):
        yield name, join(part, held[name].layout, mesh)


@torch.no_grad()
def join(part: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The whole of a tensor that the tensor axis shares out; collective. Parts may differ in shape."""
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
    """All that a rank's data ranks have among them."""
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
