"""Norms of whole tensors for an optimizer that holds parts of them: what each rank sums, and how the sums are added up.

LARS and LAMB scale the step of each tensor by the norms of its weight and its update. Under ZeRO a rank has a flat
range of every tensor, empty for some; with `[axes] tensor` it has a share of some and all of others. So each rank sums
the squares of the elements that it counts, and the sums of all tensors travel in one message per group: over the ranks
that share the state, then over those that split layers. Where every rank holds whole tensors nothing is exchanged.

All copies of a weight must be updated with the same bits, and groups on other ranks add up the same numbers in another
order. So the sums are gathered and added in the order of ranks, as in `comm/shared_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weft.comm.collectives import all_gather
from weft.comm.group import Group
from weft.layout import Range
from weft.mesh import Mesh
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.wire import NUM_TENSOR_SUMS


@runtime_checkable
class NeedsTensorNorms(Protocol):
    """An optimizer that updates parts of tensors rightly if it is told the norms of the whole ones."""

    param_groups: list[dict[str, object]]

    def use_norms(self, norms: TensorNorms) -> None:
        """Called once, before the first step."""


class TensorNorms:
    """Completes sums of squares over the ranks that hold the rest of each tensor."""

    def __init__(
        self, groups: Sequence[Group], *, slots: Sequence[int], counted: Sequence[tuple[Range, ...] | None]
    ) -> None:
        """`slots`: the place of each of the optimizer's parameters in the message, the same on all ranks; `counted`:
        the elements of each, flattened, that this rank counts; None for all."""
        self._groups = tuple(groups)
        self._slots = tuple(slots)
        self.counted = tuple(counted)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def exchanges(self) -> bool:
        """True if other ranks hold parts of the same tensors."""
        return bool(self._groups)

    def complete(self, squares_SN: torch.Tensor, parameters: tuple[int, ...]) -> torch.Tensor:
        """The sums over all ranks, for some of the optimizer's parameters; collective, and in float64.

        Ranks may give different parameters: what a rank leaves out counts as zero.
        """
        if not self._groups or not self._slots or squares_SN.is_meta:
            return squares_SN
        index = self._index(parameters, squares_SN.device)
        whole = squares_SN.new_zeros((NUM_TENSOR_SUMS, len(self._slots)), dtype=torch.float64)
        whole.index_copy_(1, index, squares_SN.double())
        for group in self._groups:
            mine = whole.to(group.device)
            every = mine.new_empty((group.size * NUM_TENSOR_SUMS, len(self._slots)))
            all_gather(every, mine, group)
            whole = every.view(group.size, *whole.shape).sum(0).to(whole.device)
        return whole.index_select(1, index)

    def _index(self, parameters: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Kept, because a list that is copied to a GPU makes the host wait."""
        if parameters not in self._indices:
            if len(self._indices) > 8:  # the parameters in use keep changing
                self._indices.clear()
            slots = [self._slots[n] for n in parameters]
            self._indices[parameters] = torch.tensor(slots, dtype=torch.int64, device=device)  # also of no slots
        return self._indices[parameters]


def give_norms(
    optimizer: object, pieces: Sequence[Piece], mesh: Mesh, *, counted: Mapping[str, tuple[Range, ...]]
) -> None:
    """Tell an optimizer that needs them the norms of whole tensors; any other is left alone.

    `counted`: the elements that this rank counts of parameters that other tensor ranks hold too, by name.
    """
    if not isinstance(optimizer, NeedsTensorNorms):
        return
    groups = []
    if Sharding.of(mesh.plan).num_parts > 1:
        groups.append(mesh.state_group("gradients"))
    if mesh.size("tensor") > 1:
        groups.append(mesh.group("tensor", "activations"))
    by_id = {id(piece.tensor): piece for piece in pieces}
    held = [by_id[id(one)] for group in optimizer.param_groups for one in group["params"]]  # type: ignore[attr-defined]
    # By name: buffers, and so the order of pieces, may differ between ranks that split layers.
    place = {name: number for number, name in enumerate(sorted(piece.name for piece in pieces))}
    norms = TensorNorms(
        groups,
        slots=[place[piece.name] for piece in held],
        counted=[_within(counted.get(piece.name), piece.layout.flat_range) for piece in held],
    )
    optimizer.use_norms(norms)


def _within(ranges: tuple[Range, ...] | None, kept: Range | None) -> tuple[Range, ...] | None:
    """The counted elements among those that this rank keeps, from the first of these on."""
    if ranges is None or kept is None:
        return ranges
    first, last = kept
    return tuple((max(a, first) - first, min(b, last) - first) for a, b in ranges if a < last and b > first)
