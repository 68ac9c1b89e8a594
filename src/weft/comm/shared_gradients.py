"""Gradients of parameters that several stages or tensor ranks hold: one exchange per group of holders and step.

sum         each holder has a part of the gradient: a weight that two stages use, a norm that each rank applies to some
            tokens, a head that two ranks keep
broadcast   each holder has the whole gradient, but sums over data may have rounded differently on each; the first
            holder's is copied to the others

Holders keep their copies equal only if they update them with the same bits. How a collective rounds depends on the
ring, and on the offset in the buffer, so gradients are first summed over data and only then over the holders: what one
collective returns is the same on all its ranks. With three or more holders, each rank gathers all parts and adds them
in the order of ranks, because other data ranks do the same in a group of their own, and must get the same bits too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from weft.comm.collectives import all_gather, all_reduce, broadcast
from weft.comm.group import Group
from weft.plan.partition.tensor import Range
from weft.plan.partition.wire import Member, assign_buckets

Kind = Literal["sum", "broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGradient:
    """A parameter, or a part of it, whose gradient a group of ranks shares."""

    name: str
    group: Group
    kind: Kind
    within: tuple[int, int, int] | None = None
    """Dim, start and length of the part that is shared; None: all of it."""
    elements: Range | None = None
    """That part as a range of the flattened parameter, where it is contiguous."""

    def part_of(self, gradient: torch.Tensor, kept: Range | None) -> torch.Tensor:
        """The shared part of a gradient; `kept`: the range of elements that a sharded, flat gradient holds."""
        if self.within is None:
            return gradient
        if kept is None:
            return gradient.narrow(*self.within)
        assert self.elements is not None, f"{self.name}: a part that is cut across cannot be found in a flat range"
        low, high = (min(max(edge, kept[0]), kept[1]) - kept[0] for edge in self.elements)
        return gradient[low:high]


class SharedGradientExchange:
    """Exchanges gradients between their holders, many in one collective."""

    def __init__(self, shared: Sequence[SharedGradient], *, bucket_bytes: int) -> None:
        """`shared`: in the order of exchange, the same on all holders. Neighbours of one group and kind share
        buckets."""
        self.names = frozenset(one.name for one in shared)
        self._sums = frozenset(one.name for one in shared if one.kind == "sum")
        self._calls = [(group, kind, tuple(members)) for (group, kind), members in groupby(shared, _group_and_kind)]
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[int, tuple[tuple[int, ...], ...]] = {}
        """The members of each call that travel together, as the first step has found them."""

    @torch.no_grad()
    def run(self, gradients: Mapping[str, torch.Tensor], kept: Mapping[str, Range] | None = None) -> None:
        """Exchange all gradients in `names`, in place, after they were summed over data; collective.

        `kept`: the range of elements of each that a rank has, where they are sharded: the same on all holders.
        """
        for number, (group, kind, members) in enumerate(self._calls):
            parts = [one.part_of(gradients[one.name], (kept or {}).get(one.name)) for one in members]
            if number not in self._buckets:
                self._buckets[number] = self._assign(parts)
            for bucket in self._buckets[number]:
                _exchange([parts[index] for index in bucket], group, kind)

    def _assign(self, parts: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
        """The parts that travel together, by their numbers; empty ones in no bucket."""
        filled = [number for number, part in enumerate(parts) if part.numel()]
        sizes = [
            Member(numel=part.numel(), item_bytes=part.element_size(), kind=str(part.dtype))
            for part in map(parts.__getitem__, filled)
        ]
        buckets = assign_buckets(sizes, self._bucket_bytes, first_bytes=self._bucket_bytes)
        return tuple(tuple(filled[place] for place in bucket) for bucket in buckets)

    def came_from_others(self, name: str, gradient: torch.Tensor) -> bool:
        """True if other holders had a part of the gradient of a parameter that this rank did not use.

        Tokens of one rank only may go through an expert. A sum that is zero to the last element counts as unused. The
        host waits for the device, on ranks that left a parameter unused.
        """
        return name in self._sums and bool(gradient.any())


def sums_may_differ(groups: Sequence[Group], device: torch.device) -> bool:
    """True if sums of the same numbers over these groups, one after the other, may round differently in others."""
    # Two numbers have one sum, and ranks of a host's shared memory add in the order of ranks.
    return any(group.size > 2 and (group.shared is None or device.type != "cpu") for group in groups)


def _group_and_kind(one: SharedGradient) -> tuple[Group, Kind]:
    return one.group, one.kind


def _exchange(parts: Sequence[torch.Tensor], group: Group, kind: Kind) -> None:
    if len(parts) == 1 and parts[0].is_contiguous():
        _exchange_flat(parts[0].view(-1), group, kind)
        return
    flat = torch.cat([part.reshape(-1) for part in parts])
    _exchange_flat(flat, group, kind)
    sums = flat.split([part.numel() for part in parts])
    torch._foreach_copy_(list(parts), [one.view(part.shape) for one, part in zip(sums, parts, strict=True)])


def _exchange_flat(flat: torch.Tensor, group: Group, kind: Kind) -> None:
    if kind == "broadcast":
        broadcast(flat, group)
    elif group.size == 2:
        all_reduce(flat, group)
    else:
        rows = flat.new_empty(group.size, flat.numel())
        all_gather(rows.view(-1), flat, group)
        torch.sum(rows, dim=0, out=flat)
