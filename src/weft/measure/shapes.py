"""The groups of ranks to time, computed from the host of each rank.

    one host, 4 ranks        pairs, and all 4                                         inside the host
    2 hosts × 4 ranks        pairs, and all 4 of a host                               inside each host
                             one rank of every host, and all 8                        between hosts

All groups of a size exchange at once, as in training. Where hosts hold unequal numbers of ranks, or ranks are
not numbered host by host, only the group of all is timed: no grid of axes fits the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.plan import Axes, Comm, Data, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A mesh, and its axis whose groups are timed."""

    replicate: int
    data: int
    axis: str
    between_hosts: bool

    @property
    def num_ranks(self) -> int:
        """Ranks of one group."""
        return self.data if self.axis == "data" else self.replicate

    def plan(self, transport: str) -> Plan:
        """A plan whose mesh has these groups."""
        return Plan(
            axes=Axes(replicate=self.replicate, data=self.data),
            data=Data(shard="optimizer") if self.replicate > 1 else Data(),
            comm=Comm(transport=transport),
        )


def group_shapes(host_of: Sequence[int]) -> tuple[Shape, ...]:
    """The groups to time, those inside hosts first; `host_of` is the host of each rank."""
    num_ranks, num_hosts = len(host_of), len(set(host_of))
    if num_ranks == 1:
        return ()
    everyone = Shape(replicate=1, data=num_ranks, axis="data", between_hosts=num_hosts > 1)
    here, rest = divmod(num_ranks, num_hosts)
    if rest or any(host != rank // here for rank, host in enumerate(host_of)):
        return (everyone,)
    inside = [size for size in (2, 4, 8, 16, 32) if size < here and here % size == 0] + [here] * (here > 1)
    shapes = [Shape(replicate=num_ranks // size, data=size, axis="data", between_hosts=False) for size in inside]
    if num_hosts > 1 and here > 1:
        shapes.append(Shape(replicate=num_hosts, data=here, axis="replicate", between_hosts=True))
    return tuple(shapes) if num_hosts == 1 else (*shapes, everyone)


def host_pairs(host_of: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The pairs of ranks whose links are measured: the first ranks of each two hosts, then two ranks of each host."""
    ranks_on: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks_on.setdefault(host, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in ranks_on.values() if len(ranks) > 1]
    leaders = [ranks[0] for ranks in ranks_on.values()]
    between = [(first, second) for place, first in enumerate(leaders) for second in leaders[place + 1 :]]
    return (*between, *inside)
