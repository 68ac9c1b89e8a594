"""From a plan to ranks, axes and process groups: the only place that makes groups.

A `World` is this process among all processes; a `Mesh` gives every rank its place on the plan's axes and one process
group per axis *and purpose*, because two threads, or two exchanges whose order may differ between ranks, must never
share a group. Groups are made when first asked for; asking is collective, so every rank asks in the same order.

With one process and no launcher there is no process group at all, and every group has one member.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from weft.comm.fake_world import is_fake, ranks_per_host, refuse_half_fake
from weft.comm.group import Group, Traffic
from weft.comm.shared_memory.connect import Connection, SharedMemoryError, timeout_s
from weft.comm.shared_memory.transport import SharedTransport
from weft.comm.two_level import TwoLevel
from weft.errors import LaunchError, PlanError
from weft.hosts import host_id, num_cores, number_hosts
from weft.plan.check import check, require
from weft.plan.model_refusals import SHARED_MEMORY_ON_A_DEVICE
from weft.plan.partition.grid import Grid
from weft.plan.plan import Plan

log = logging.getLogger("weft")

WORLD = "world"
"""The name under which exchanges between all ranks are counted; not an axis of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all processes of the run."""

    rank: int
    """This process, counted over all hosts."""
    size: int
    """Processes in the run."""
    local_rank: int
    """This process, counted on its host."""
    device: torch.device
    """Where this rank computes."""
    hosts: tuple[int, ...] = (0,)
    """Of every rank, the number of its host."""

    @property
    def is_fake(self) -> bool:
        """Nothing can be run: tensors have no values, and other ranks, if any, do not exist."""
        return self.device.type == "meta"


@dataclass(slots=True)
class Mesh:
    """The plan's axes, seen from this rank."""

    plan: Plan
    world: World
    grid: Grid
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    _has_noticed: bool = False
    """That a group cannot share memory."""

    def size(self, axis: str) -> int:
        return self.grid.axes.sizes[axis]

    def index(self, axis: str) -> int:
        return self.grid.coordinates(self.world.rank)[axis]

    @property
    def data_size(self) -> int:
        """Parts a global batch is cut into."""
        return self.size("replicate") * self.size("data")

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's."""
        return self.index("replicate") * self.size("data") + self.index("data")

    def group(self, axis: str, purpose: str) -> Group:
        """The group of this rank along an axis, or several joined by "+". Collective when first asked for.

        "pipeline:0,3" is made of the ranks at these places along an axis; on other ranks it has no members.
        """
        if (axis, purpose) not in self._groups:
            self._groups[axis, purpose] = self._make_group(axis, purpose)
        return self._groups[axis, purpose]

    @property
    def sequence_size(self) -> int:
        """Parts a sequence is cut into."""
        return self.grid.axes.sequence

    @property
    def sample_rank(self) -> int:
        """Which part of the batch, and of its sequences, is this rank's: no two that have different tokens agree."""
        part = self.index("ring") * self.size("ulysses") + self.index("ulysses")
        return self.data_rank * self.sequence_size + part

    def state_group(self, purpose: str) -> Group:
        """The ranks of one replica that have the same parameters: along data, and along the axes of the sequence."""
        return self.group(self.grid.axes.state_axes, purpose)

    def batch_group(self, purpose: str) -> Group:
        """The ranks that share one global batch and have the same parameters, over all replicas; ordered by rank."""
        if self.size("replicate") == 1:
            return self.state_group(purpose)
        axes = self.grid.axes.state_axes
        return self.group(f"replicate+{axes}" if self.grid.axes.state > 1 else "replicate", purpose)

    def everyone(self, purpose: str) -> Group:
        """All ranks of the run as one group; its traffic is counted under "world"."""
        return self.group(WORLD, purpose)

    def _make_group(self, axis: str, purpose: str) -> Group:
        everyone, name = tuple(range(self.world.size)), f"{axis}/{purpose}"
        axis, _, places = axis.partition(":")
        axes = tuple(axis.split("+"))
        groups = (everyone,) if axis == WORLD else self.grid.groups(axes)
        mine = everyone if axis == WORLD else self.grid.ranks_along(axes, self.world.rank)
        if places:
            chosen = [int(place) for place in places.split(",")]
            groups = tuple(tuple(ranks[place] for place in chosen) for ranks in groups)
            mine = next((ranks for ranks in groups if self.world.rank in ranks), ())
        index = mine.index(self.world.rank) if mine else -1
        has_others = len(groups[0]) > 1 and not self.world.is_fake
        # A thread beside the steps must not touch a GPU's streams: its messages stay on the host.
        backend = "gloo" if purpose == "saving" and self.world.device.type == "cuda" else None
        handle = _make_handle(groups, mine, name, backend) if has_others else None
        group = Group(
            axis=axis,
            purpose=purpose,
            ranks=mine,
            index=index,
            handle=handle,
            traffic=self.traffic.setdefault(axis, Traffic()),
            through_host=self.world.device.type == "cuda" and handle is not None and dist.get_backend(handle) == "gloo",
        )
        if handle is None or self.plan.comm.transport == "c10d" or self.world.device.type != "cpu":
            return group
        hosts = [self._by_host(ranks) for ranks in groups]
        if all(len(places) == 1 for places in hosts):
            connection = Connection(handle, mine, index)
            shared = self._connect(connection, name)
            return replace(group, shared=shared, connection=connection if shared is not None else None)
        if all(len(inside) == 1 for places in hosts for inside in places):
            return group
        return self._add_levels(group, groups, hosts, name)

    def _by_host(self, ranks: tuple[int, ...]) -> list[list[int]]:
        """Of every host, in the order of its first rank, which places of a group are on it."""
        places: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            places.setdefault(self.world.hosts[rank], []).append(place)
        return list(places.values())

    def _add_levels(
        self, group: Group, groups: Sequence[tuple[int, ...]], hosts: Sequence[list[list[int]]], name: str
    ) -> Group:
        """The same group, talking in two levels; every rank takes part in making those of every group."""
        inside, across = [], []
        for ranks, places in zip(groups, hosts, strict=True):
            inside += [tuple(ranks[place] for place in here) for here in places]
            is_even = len({len(here) for here in places}) == 1
            for number in range(len(places[0]) if is_even else 1):
                across.append(tuple(ranks[here[number]] for here in places))
        me = self.world.rank
        local = next(ranks for ranks in inside if me in ranks)
        counterparts = next((ranks for ranks in across if me in ranks), ())
        local_handle = _make_handle([ranks for ranks in inside if len(ranks) > 1], local, f"{name}/host")
        across_handle = _make_handle([ranks for ranks in across if len(ranks) > 1], counterparts, f"{name}/across")
        connection = Connection(local_handle, local, local.index(me)) if local_handle is not None else None
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
        here = self.world.hosts.count(self.world.hosts[self.world.rank])
        try:
            return connection.connect(spin=here <= num_cores(), name=name)
        except SharedMemoryError as error:
            problem = f"ranks of one host cannot share memory ({error})"
        if self.plan.comm.transport == "shared":
            raise LaunchError(f'{problem}; give it room, or use [comm] transport = "c10d"')
        if connection.is_first and not self._has_noticed:
            log.warning("%s, so they exchange through sockets, which is several times slower", problem)
        self._has_noticed = True
        return None


def _make_handle(
    groups: Sequence[tuple[int, ...]], mine: tuple[int, ...], name: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """This rank's process group among all of these, which every rank takes part in making."""
    handle, everyone = None, dist.group.WORLD
    assert everyone is not None
    timeout = timedelta(seconds=timeout_s(everyone))
    for ranks in groups:
        made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
        handle = made if ranks == mine else handle
    return handle


def make_mesh(plan: Plan, world: World) -> Mesh:
    """Lay the plan's axes over the ranks that are running; a plan that does not fit them is refused."""
    require(check(plan, num_ranks=world.size))
    if plan.comm.transport == "shared" and world.device.type not in ("cpu", "meta"):
        raise PlanError(SHARED_MEMORY_ON_A_DEVICE.message(device=world.device))
    return Mesh(plan=plan, world=world, grid=Grid(plan.axes))


def join_world(device: torch.device | str | None = None, *, timeout_s: float = 1800.0) -> World:
    """Join the processes a launcher started (torchrun's environment), or be the only one.

    A process group that exists already is used as it is. Otherwise one is made with a store of its own for every
    attempt: after a restart, torchrun's shared store still holds the dead attempt's addresses, and gloo would dial
    them.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized() and launched and int(os.environ["WORLD_SIZE"]) > 1:
        _init_process_group(chosen, timeout_s)
    refuse_half_fake(chosen)
    if not dist.is_initialized():
        return World(rank=0, size=1, local_rank=0, device=chosen)
    if is_fake():
        return _imagine_world(chosen)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=chosen,
        hosts=_find_hosts(chosen),
    )


def _imagine_world(device: torch.device) -> World:
    rank, size, each = dist.get_rank(), dist.get_world_size(), ranks_per_host()
    hosts = tuple(other // each for other in range(size))
    return World(rank=rank, size=size, local_rank=rank % each, device=device, hosts=hosts)


def leave_world() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_hosts(device: torch.device) -> tuple[int, ...]:
    """Of every rank, the number of its host; collective."""
    ids = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    ids[dist.get_rank()] = int.from_bytes(hashlib.sha256(host_id().encode()).digest()[:7], "little")
    dist.all_reduce(ids)
    return number_hosts([str(one) for one in ids.tolist()])


def _init_process_group(device: torch.device, timeout_s: float) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"cannot reach the other ranks: {error}; start weft with `weft train` or torchrun") from error
    dist.init_process_group(
        _backend(device),
        store=PrefixStore(f"weft/attempt-{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def _choose_device(device: torch.device | str | None, local_rank: int) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:  # "cuda" means this rank's own
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return chosen


def _backend(device: torch.device) -> str:
    # NCCL refuses two ranks on one GPU; gloo does not.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and ranks_here <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"
