"""Each tensor rank's part of every parameter and buffer, computed from the model's regions.

Whole tensors are made first and cut here, so that a model starts with the same values however many ranks split it.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError, PlanError
from weft.layout import Layout, Split
from weft.mesh import Mesh
from weft.plan.model_refusals import SHARES_OF_TIED_WEIGHTS
from weft.plan.partition.grid import Grid
from weft.plan.partition.tensor import Count, Range, Region, entries, region_problems, region_shares, share_of

AXIS = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Entries of one rank's part of a tensor that other ranks hold too."""

    place: int
    """The rank's index along the tensor axis."""
    name: str
    dim: int
    entries: Range
    """Range along the dim, in that rank's part."""
    holders: tuple[int, ...]
    """Indices along the tensor axis of all ranks that hold them, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The parts of one model that the ranks along the tensor axis hold."""

    regions: tuple[Region, ...] = ()
    splits: Mapping[str, Split] = field(default_factory=dict)
    """The split of every parameter and buffer that is cut, by name."""
    repeated: tuple[Repeated, ...] = ()
    """Entries that several ranks hold, for all ranks."""

    @property
    def partial(self) -> frozenset[str]:
        """Parameters that every rank holds whole and uses on its shard."""
        return frozenset(name for region in self.regions for name in region.partial)

    @property
    def uneven(self) -> frozenset[str]:
        """Tensors of which ranks hold parts of different sizes."""
        sizes = {name: {sum(b - a for a, b in part) for part in split.parts} for name, split in self.splits.items()}
        return frozenset(name for name, different in sizes.items() if len(different) > 1)

    @property
    def overlapping(self) -> frozenset[str]:
        """Tensors of which several ranks hold some entries, beside others that they do not all hold."""
        return frozenset(one.name for one in self.repeated if not self.is_whole_part(one))

    def is_whole_part(self, one: Repeated) -> bool:
        """True if the entries are all that their holders have of the tensor."""
        start, stop = one.entries
        parts = self.splits[one.name].parts
        return all(sum(b - a for a, b in parts[place]) == stop - start for place in one.holders)

    def layout(self, name: str, global_shape: Sequence[int]) -> Layout:
        split = self.splits.get(name)
        return Layout(global_shape=tuple(global_shape), splits=() if split is None else (split,))


def make_shares(regions: Sequence[Region], tensor: int) -> Shares:
    """The cuts of all regions; all regions that cannot be cut are refused together."""
    problems = [problem for region in regions for problem in region_problems(region, tensor)]
    if problems:  # blocks are alike, and so is what is wrong with them
        raise PlanError(list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", problem) for problem in problems)))
    splits: dict[str, Split] = {}
    repeated: list[Repeated] = []
    for region in regions:
        each, out_of = region_shares(region, tensor)
        for cut in region.cuts:
            split = Split(dim=cut.dim, axis=AXIS, parts=tuple(entries(cut, share, out_of) for share in each))
            if splits.setdefault(cut.name, split) != split:
                raise ModelError(f'"{cut.name}" is to be cut in two ways at once; declare one in weft_blueprint()')
        repeated += _find_repeated(region, tensor)
    return Shares(regions=tuple(regions), splits=splits, repeated=tuple(repeated))


def share_tied(made: Shares, tied: Sequence[Sequence[str]], model: nn.Module) -> Shares:
    """The same shares, with tied tensors cut under each of their names."""
    layers = {name for region in made.regions for name in (*itertools.chain(*region.columns), *region.rows)}
    splits, problems = dict(made.splits), []
    for names in tied:
        cut = {made.splits[name] for name in names if name in made.splits}
        known = {id(_owner(model, name)) for name in names if name in made.splits or name.rpartition(".")[0] in layers}
        left = [name for name in names if id(_owner(model, name)) not in known]
        if len(cut) > 1 or (cut and left):
            problems.append(SHARES_OF_TIED_WEIGHTS.message(names=" and ".join(names)))
        splits |= {name: split for split in cut for name in names}
    if problems:
        raise ModelError(problems)
    return replace(made, splits=splits)


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module that holds a tensor: one that is used twice has two names."""
    return model.get_submodule(name.rpartition(".")[0])


def _find_repeated(region: Region, tensor: int) -> list[Repeated]:
    """The entries that several ranks hold, one record per rank."""
    each, out_of = region_shares(region, tensor)
    found = []
    for cut in region.cuts:
        for place, share in enumerate(each):
            first = 0
            for section in cut.sections:
                start, stop = share_of(section.num_units, share, out_of)
                theirs = [share_of(section.num_units, other, out_of) for other in each]
                # Holders change only where a rank's share begins or ends.
                edges = {edge for begin, end in theirs if begin < end for edge in (begin, end) if start < edge < stop}
                for begin, end in itertools.pairwise(sorted({start, stop} | edges)):
                    holders = tuple(p for p, (low, high) in enumerate(theirs) if low <= begin < high)
                    length = (end - begin) * section.unit
                    if len(holders) > 1:
                        where = (first, first + length)
                        found.append(Repeated(place=place, name=cut.name, dim=cut.dim, entries=where, holders=holders))
                    first += length
    return found


def set_count(model: nn.Module, count: Count, shared: Range, out_of: int) -> None:
    """Set an attribute that counts units to the number of this rank's units."""
    owner: Any = model.get_submodule(count.module)
    holder, _, attribute = count.attribute.rpartition(".")
    if holder:  # other modules may refer to the same object
        setattr(owner, holder, copy.copy(getattr(owner, holder)))
        owner = getattr(owner, holder)
    setattr(owner, attribute, count.local_value(getattr(owner, attribute), shared, out_of))


def counted_elements(made: Shares, layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, tuple[Range, ...]]:
    """The elements that this rank counts in norms, by name of each parameter that other tensor ranks hold too.

    An element is counted by the first rank that holds it.
    """
    place, sizes = mesh.index(AXIS), mesh.grid.axes.sizes
    coordinates = mesh.grid.coordinates(mesh.world.rank)
    counted: dict[str, tuple[Range, ...]] = {}
    if place:
        counted |= {name: () for name, layout in layouts.items() if not layout.splits}
    for one in made.repeated:
        if one.place != place or one.holders[0] == place or one.name not in layouts:
            continue
        shape = layouts[one.name].local_shape(sizes, coordinates)
        inner, length = math.prod(shape[one.dim + 1 :]), shape[one.dim]
        for row in range(math.prod(shape[: one.dim])):
            start, stop = ((row * length + entry) * inner for entry in one.entries)
            ranges = counted.get(one.name, ((0, math.prod(shape)),))
            pieces = (piece for low, high in ranges for piece in ((low, min(high, start)), (max(low, stop), high)))
            counted[one.name] = tuple(piece for piece in pieces if piece[0] < piece[1])
    return counted


def local_part(whole: torch.Tensor, layout: Layout, grid: Grid, rank: int) -> torch.Tensor:
    """A copy of a rank's part of a whole tensor; the tensor itself if it is not cut."""
    if layout.splits:
        sizes, coordinates = grid.axes.sizes, grid.coordinates(rank)
        part = whole.new_empty(layout.local_shape(sizes, coordinates))
        for there, here in layout.windows(sizes, coordinates):
            part[here] = whole[there]
        whole = part
    return whole if layout.flat_range is None else whole.flatten()[slice(*layout.flat_range)]
