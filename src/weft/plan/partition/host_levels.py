"""Ranks by host, for codecs: ranks of one host are summed as they are, and the codec acts between hosts.

Inside a host bytes cost little. So where the ranks between which a codec would act are several on each of several
hosts, they are summed inside each host first, every rank gets a slice of the sum, and compresses that with the ranks of
its place on the other hosts: a codec loses less of fewer, larger sums, and gathered messages are fewer.

    data = 4 on 2 hosts      host 0 | rank 0  rank 1 |      "data in hosts": 0 1, 2 3
                             host 1 | rank 2  rank 3 |      "data between hosts": 0 2, 1 3

There is one level where all these ranks are on one host, where each is alone on its own, where hosts have unequal
numbers of them, where ranks that share sequences are summed first anyway, and with local steps, which exchange rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.partition.grid import Grid
from weft.plan.partition.replicas import state_axes
from weft.plan.plan import Plan

IN_HOSTS, BETWEEN_HOSTS = " in hosts", " between hosts"
"""What the name of a group's axes ends with, if its ranks are those of one host, or have the same place on theirs."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A rank among those between which a codec acts in two levels."""

    places: tuple[Ranks, ...]
    """The places of each host's ranks, along the axes on which the codec acts."""
    host: int
    """The number of this rank's host among these."""
    index: int
    """This rank's place among those of its host."""


def codec_group(plan: Plan) -> tuple[str, str] | None:
    """Axes and purpose of the group in which a codec acts, if it may have levels."""
    if plan.codec.name == "none" or plan.replica_axis is not None:
        return None
    if plan.data.shard != "nothing":
        return "replicate", "gradients"
    return None if plan.axes.sequence > 1 else (state_axes(plan), "gradients")


def level_groups(plan: Plan, hosts: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Axes and purpose of the groups inside and between hosts, in which a codec acts in two levels; none where it acts
    in one. `hosts`: the number of each rank's host."""
    found = codec_group(plan)
    if found is None or not all(_is_even(by_host) for by_host in _all_by_host(plan, found[0], hosts)):
        return ()
    axes, purpose = found
    return (axes + IN_HOSTS, purpose), (axes + BETWEEN_HOSTS, purpose)


def find_host_place(plan: Plan, hosts: Sequence[int], rank: int) -> HostPlace | None:
    """Where a rank is among those that exchange with it in two levels; None where a codec acts in one."""
    found = codec_group(plan)
    if found is None or not level_groups(plan, hosts):
        return None
    ranks = Grid(plan.axes).ranks_along(tuple(found[0].split("+")), rank)
    by_host = _by_host(ranks, hosts)
    host = next(number for number, inside in enumerate(by_host) if rank in inside)
    places = tuple(tuple(ranks.index(one) for one in inside) for inside in by_host)
    return HostPlace(places=places, host=host, index=by_host[host].index(rank))


def uneven_hosts(plan: Plan, hosts: Sequence[int]) -> str | None:
    """What is told where a codec acts in one level only because hosts have unequal numbers of ranks."""
    found = codec_group(plan)
    if found is None or level_groups(plan, hosts):
        return None
    for by_host in _all_by_host(plan, found[0], hosts):
        sizes = [len(ranks) for ranks in by_host]
        if len(sizes) > 1 and max(sizes) > 1:
            return (
                f'the {sum(sizes)} ranks along "{found[0]}" are unevenly on hosts ({", ".join(map(str, sizes))}), so '
                f"the codec {plan.codec.name} acts between all of them, and not only between hosts; equal numbers of "
                "ranks per host would send less"
            )
    return None


def ranks_of_level(groups: Sequence[Ranks], hosts: Sequence[int], level: str) -> list[Ranks]:
    """Groups along some axes, cut into those of a level; hosts must have equal numbers of each group's ranks."""
    found: list[Ranks] = []
    for ranks in groups:
        by_host = _by_host(ranks, hosts)
        found += by_host if level == IN_HOSTS else list(zip(*by_host, strict=True))
    return found


def split_level(axes: str) -> tuple[str, str]:
    """The name of axes, and how it ends where the group is that of a level."""
    for level in (IN_HOSTS, BETWEEN_HOSTS):
        if axes.endswith(level):
            return axes.removesuffix(level), level
    return axes, ""


def _all_by_host(plan: Plan, axes: str, hosts: Sequence[int]) -> list[list[Ranks]]:
    """The ranks of every group along these axes, by host. Ranks whose hosts are not known count as on one."""
    known = hosts if len(hosts) == plan.axes.num_ranks else (0,) * plan.axes.num_ranks
    return [_by_host(ranks, known) for ranks in Grid(plan.axes).groups(tuple(axes.split("+")))]


def _by_host(ranks: Ranks, hosts: Sequence[int]) -> list[Ranks]:
    """In the order of each host's first rank."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return [tuple(inside) for inside in found.values()]


def _is_even(by_host: Sequence[Ranks]) -> bool:
    """True if there are several hosts, and several ranks on each, as many on all."""
    return len(by_host) > 1 and len({len(ranks) for ranks in by_host}) == 1 and len(by_host[0]) > 1
