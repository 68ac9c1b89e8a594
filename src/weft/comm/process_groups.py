"""Makes the process groups of a mesh and gives them back: the only place that calls `new_group`.

Both are done in one order on all ranks. Each group also finds out here how it will exchange: through the memory of one
host, in two levels where ranks are on several hosts, or through torch.distributed alone. On NCCL its communicator is
made here as well, by a first exchange (`warm_up.py`): inside a step it could deadlock.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.comm.failures.activity import record_exchanges
from weft.comm.group import Group, Traffic
from weft.comm.shared_memory.connect import Connection, SharedMemoryError, timeout_s
from weft.comm.shared_memory.transport import SharedTransport
from weft.comm.two_level import TwoLevel
from weft.comm.warm_up import warm_up
from weft.errors import LaunchError
from weft.hosts import num_cores
from weft.plan.late_merges import merges_late
from weft.plan.partition.grid import Grid
from weft.plan.partition.groups import HOST_PURPOSES, WORLD, GroupKey
from weft.plan.partition.host_levels import ranks_of_level, split_level
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan

log = logging.getLogger("weft")


def is_used_between_steps(plan: Plan, key: GroupKey) -> bool:
    """True for groups on which messages may be under way between two steps: those of pipelines that never empty, and
    those between replicas whose exchanges are merged later."""
    axes = key[0]
    if merges_late(plan) and axes == plan.replica_axis:
        return True
    return axes.startswith("pipeline") and plan.pipeline.schedule in FLUSH_FREE


class ProcessGroups:
    """The process groups that ranks on a grid have made so far."""

    def __init__(
        self,
        grid: Grid,
        *,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        backend: str = "gloo",
        transport: str,
        timeout_s: float = 0.0,
    ) -> None:
        """`hosts`: the number of each rank's host; `backend`: the c10d backend of tensors on the device; `transport`:
        as `[comm] transport` of the plan; `timeout_s`: of exchanges, if that of the whole world is shorter."""
        self.grid = grid
        self.transport = transport
        self.is_closed = False
        self.has_failed = False
        """Messages of a step that failed may be in flight in some groups, and another step would receive them."""
        self._rank = rank
        self._hosts = hosts
        self._device = device
        self._backend = backend
        self._timeout_s = timeout_s
        self._made: dict[GroupKey, Group] = {}
        self._handles: list[tuple[str, dist.ProcessGroup]] = []
        self._copies: weakref.WeakSet[Group] = weakref.WeakSet()
        self._has_warned = False
        self.background_save: threading.Thread | None = None
        """The thread that uses the group of background saves."""

    def get_or_make(self, key: GroupKey, traffic: dict[str, Traffic]) -> Group:
        """A copy of a key's group that counts a mesh's own traffic; made if it is missing. Collective, in one order."""
        if key not in self._made:
            self._made[key] = self._make(*key)
        made = self._made[key]
        copy = replace(made, traffic=traffic.setdefault(made.axis, Traffic()))
        self._copies.add(copy)
        return copy

    def close(self, *, failed: bool) -> None:
        """Give back threads, sockets and shared memory. Tensors that lie in shared memory keep theirs.

        `failed`: NCCL's communicators stay, because destroying one waits for kernels that wait for other ranks, and so
        does the group of background saves, which a thread may still use.
        """
        self.is_closed = True
        if self.background_save is not None and not failed:
            self.background_save.join()
        for group in self._made.values():
            if group.host_wire is not None:
                group.host_wire.close()
            if group.levels is not None:
                group.levels.worker.close()
            group.close()
        for group in self._copies:
            group.close()
        for purpose, handle in self._handles:
            if failed and (self._backend == "nccl" or purpose == "saving"):
                continue
            try:
                dist.destroy_process_group(handle)
            except Exception as error:  # the whole world was left before, or the group had failed
                log.debug("process group for %s: %s", purpose, error)
        self._made.clear()
        self._handles.clear()

    def _make(self, axes: str, purpose: str) -> Group:
        name = f"{axes}/{purpose}"
        groups = self._ranks_of_all(axes)
        mine = next((ranks for ranks in groups if self._rank in ranks), ())
        handle = None
        is_host = purpose in HOST_PURPOSES
        device, backend = (torch.device("cpu"), "gloo") if is_host else (self._device, self._backend)
        if len(groups[0]) > 1 and self._device.type != "meta":
            handle = self._new_group(groups, mine, name, backend)
        group = Group(
            axis=axes.partition(":")[0],
            purpose=purpose,
            ranks=mine,
            index=mine.index(self._rank) if mine else -1,
            handle=handle,
            traffic=Traffic(),
            device=self._device if self._device.type == "meta" else device,
            backend=backend,
            through_host=device.type == "cuda" and backend == "gloo",
        )
        if handle is not None:
            group.record = record_exchanges(handle.group_name, name, mine)
        if handle is not None and group.is_stream_ordered:
            group.communicator_bytes = warm_up(group)
        # Every rank takes the same branch, also those that are in none of these groups: more groups are made below.
        if len(groups[0]) == 1 or self.transport == "c10d" or self._device.type != "cpu" or group.is_stream_ordered:
            return group
        hosts = [self._by_host(ranks) for ranks in groups]
        if all(len(places) == 1 for places in hosts):
            if handle is None:
                return group
            connection = Connection(handle, mine, group.index)
            shared = self._connect(connection, name)
            return replace(group, shared=shared, connection=connection if shared is not None else None)
        if all(len(inside) == 1 for places in hosts for inside in places):
            return group
        return self._add_levels(group, groups, hosts, name)

    def _ranks_of_all(self, axes: str) -> list[tuple[int, ...]]:
        """The ranks of every group along these axes."""
        if axes == WORLD:
            return [tuple(range(self.grid.num_ranks))]
        whole, level = split_level(axes)
        along, _, places = whole.partition(":")
        groups = list(self.grid.groups(tuple(along.split("+"))))
        if level:
            return ranks_of_level(groups, self._hosts, level)
        if not places:
            return groups
        chosen = [int(place) for place in places.split(",")]
        return [tuple(ranks[place] for place in chosen) for ranks in groups]

    def _new_group(
        self, groups: Sequence[tuple[int, ...]], mine: tuple[int, ...], name: str, backend: str = "gloo"
    ) -> dist.ProcessGroup | None:
        """This rank's process group among all of these, which every rank takes part in making."""
        handle, everyone = None, dist.group.WORLD
        assert everyone is not None
        timeout = timedelta(seconds=max(timeout_s(everyone), self._timeout_s))
        for ranks in groups:
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
            if ranks == mine:
                handle = made
                self._handles.append((name.split("/")[1], made))
        return handle

    def _by_host(self, ranks: tuple[int, ...]) -> list[list[int]]:
        """The places of a group's ranks, by host, in the order of each host's first rank."""
        places: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            places.setdefault(self._hosts[rank], []).append(place)
        return list(places.values())

    def _add_levels(
        self, group: Group, groups: Sequence[tuple[int, ...]], hosts: Sequence[list[list[int]]], name: str
    ) -> Group:
        """The same group, exchanging in two levels."""
        inside, across = [], []
        for ranks, places in zip(groups, hosts, strict=True):
            inside += [tuple(ranks[place] for place in here) for here in places]
            is_even = len({len(here) for here in places}) == 1
            for number in range(len(places[0]) if is_even else 1):
                across.append(tuple(ranks[here[number]] for here in places))
        local = next((ranks for ranks in inside if self._rank in ranks), ())
        counterparts = next((ranks for ranks in across if self._rank in ranks), ())
        local_handle = self._new_group([ranks for ranks in inside if len(ranks) > 1], local, f"{name}/host")
        across_handle = self._new_group([ranks for ranks in across if len(ranks) > 1], counterparts, f"{name}/across")
        if group.handle is None:
            return group
        connection = Connection(local_handle, local, local.index(self._rank)) if local_handle is not None else None
        wire = self._connect(connection, name) if connection is not None else None
        # Ranks of another host may not share memory where these do; then all exchange in one level.
        is_complete = torch.tensor([int(wire is not None or len(local) == 1)])
        dist.all_reduce(is_complete, dist.ReduceOp.MIN, group.handle)
        if not is_complete:
            return group
        levels = TwoLevel(
            self._by_host(group.ranks),
            group.index,
            wire=wire,
            across=across_handle,
            across_ranks=counterparts,
            name=name,
        )
        return replace(group, levels=levels, connection=connection)

    def _connect(self, connection: Connection, name: str) -> SharedTransport | None:
        try:
            return connection.connect(spin=self._hosts.count(self._hosts[self._rank]) <= num_cores(), name=name)
        except SharedMemoryError as error:
            problem = f"ranks of one host cannot share memory ({error})"
        if self.transport == "shared":
            raise LaunchError(f'{problem}; give it room, or use [comm] transport = "c10d"')
        if connection.is_first and not self._has_warned:
            log.warning("%s, so they exchange through sockets, which is several times slower", problem)
        self._has_warned = True
        return None
