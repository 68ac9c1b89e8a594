"""From a plan to ranks, axes and process groups.

A `World` is this process among all processes; a `Mesh` gives every rank its place on the plan's axes and the process
groups that the plan declares (`plan/partition/groups.py`). They are made with the mesh, so that looking one up is never
collective, and `close` gives them back.

With one process and no launcher there is no process group at all, and every group has one member.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from weft.comm.failures.watch import leave_watch, report, watch_world
from weft.comm.group import Group, Traffic
from weft.comm.process_groups import ProcessGroups
from weft.comm.under_way import wait_for_all
from weft.comm.world.binding import (
    RankLocation,
    backend_of,
    exchange_locations,
    find_location,
    needless_sharing_warning,
    number_hosts,
    request_hardware_queues,
    require_own_gpus,
    slow_backend_warning,
)
from weft.comm.world.fake_world import is_fake, ranks_per_host, refuse_half_fake
from weft.comm.world.nccl_settings import nccl_problems, require_room_for_communicators
from weft.errors import LaunchError, PlanError
from weft.hosts import host_id
from weft.plan.all_ranks import with_ranks
from weft.plan.check import check, require
from weft.plan.model_refusals import SHARED_MEMORY_ON_A_DEVICE
from weft.plan.partition.grid import Grid
from weft.plan.partition.groups import (
    COMMUNICATOR_BYTES,
    HOST_PURPOSES,
    WORLD,
    GroupKey,
    num_communicators,
    num_ranks_along,
    plan_groups,
)
from weft.plan.partition.replicas import batch_axes, one_replica, replica_axes, state_axes
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan
from weft.plan.text import format_plan

DEFAULT_TIMEOUT_S = 1800.0
"""Of exchanges, as torch's own."""
log = logging.getLogger("weft")


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
    hosts: tuple[int, ...] = (0,)
    """The number of each rank's host."""
    backend: str = "gloo"
    """The c10d backend that moves tensors of this device between ranks."""

    @property
    def is_fake(self) -> bool:
        """True if tensors have no values, and other ranks, if any, do not exist, so nothing can be run."""
        return self.device.type == "meta"


class Mesh:
    """The plan's axes and process groups, seen from this rank."""

    def __init__(self, plan: Plan, world: World, *, sharing: Mesh | None = None) -> None:
        """`sharing`: a mesh with the same axes and transport, whose process groups this one uses and does not close.
        Groups on which something may be under way between two calls are always a mesh's own (`_is_own`)."""
        self.plan = plan
        self.world = world
        self.grid = Grid(plan.axes)
        self.traffic: dict[str, Traffic] = {}
        """Bytes and seconds so far, by axis."""
        self._groups: dict[GroupKey, Group] = {}
        self._is_closed = False
        self._own = ProcessGroups(
            self.grid,
            rank=world.rank,
            hosts=world.hosts,
            device=world.device,
            backend=world.backend,
            transport=plan.comm.transport,
            timeout_s=plan.comm.timeout_s,
        )
        self.process_groups: ProcessGroups = self._own if sharing is None else sharing.process_groups
        if sharing is not None:  # a trainer that is dropped without `close` keeps the groups of the other, not its own
            weakref.finalize(self, self._own.close, failed=True).atexit = False

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Give back the process groups, with their threads, connections and shared memory. All ranks do it.

        `failed`: other ranks may still be in an exchange, so nothing is done that could wait for them.
        """
        self._is_closed = True
        for group in self._groups.values():
            group.close()
        self._own.close(failed=failed)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of this mesh, in the order in which they were made."""
        return tuple(self._groups.values())

    def add_groups(self, keys: Iterable[GroupKey]) -> None:
        """Make more groups, which only the model shows to be needed. Collective: all ranks give the same keys."""
        self._refuse_closed()
        for key in keys:
            if key not in self._groups:
                owner = self._own if self._is_own(key) else self.process_groups
                self._groups[key] = owner.get_or_make(key, self.traffic)

    def _is_own(self, key: GroupKey) -> bool:
        """True for groups that hold messages between two steps: those of pipelines that never empty."""
        return key[0].startswith("pipeline") and self.plan.pipeline.schedule in FLUSH_FREE

    def group(self, axes: str, purpose: str) -> Group:
        """The group of this rank along an axis, or several joined by "+"; see `plan/partition/groups.py`."""
        self._refuse_closed()
        if (axes, purpose) not in self._groups:
            if num_ranks_along(self.plan.axes, axes) > 1:
                raise LookupError(
                    f'no process group "{axes}/{purpose}" was made for this mesh, which has '
                    f"{', '.join(map('/'.join, self._groups)) or 'none'}; declare it in plan_groups()"
                )
            self.add_groups([(axes, purpose)])  # of one rank: nothing to agree on
        return self._groups[axes, purpose]

    def _refuse_closed(self) -> None:
        if self._is_closed or self.process_groups.is_closed:
            raise RuntimeError("this mesh is closed, and its process groups are gone; make a new one")

    def state_group(self, purpose: str) -> Group:
        """The ranks of one replica that have the same parameters: along data, and along the axes of the sequence."""
        return self.group(state_axes(self.plan), purpose)

    def batch_group(self, purpose: str) -> Group:
        """The ranks of one replica that share its batch and have the same parameters, ordered by rank."""
        return self.group(batch_axes(self.plan), purpose)

    def between_replicas(self, purpose: str) -> Group:
        """The ranks that hold the same part of each replica, where replicas differ; else this rank alone."""
        if self.plan.replica_axis is not None:
            return self.group(self.plan.replica_axis, purpose)
        return self.group(batch_axes(self.plan), "control").alone

    def whole_replica(self, purpose: str) -> Group:
        """All ranks of this rank's replica."""
        return self.group(WORLD if self.plan.replica_axis is None else replica_axes(self.plan), purpose)

    def everyone(self, purpose: str) -> Group:
        """All ranks of the run as one group; its traffic is counted under "world"."""
        return self.group(WORLD, purpose)

    @property
    def axis_groups(self) -> tuple[Group, ...]:
        """One group of device tensors per axis. A broadcast in each of them, one after the other, takes a tensor from
        rank 0 to all ranks, without a communicator of all ranks."""
        return (*self.copy_groups, self.group("pipeline", "totals"), self.group("tensor", "activations"))

    @property
    def copy_groups(self) -> tuple[Group, ...]:
        """Groups of device tensors of which a broadcast in each gives all replicas the first one's weights."""
        between = (self.between_replicas("weights"),) if self.num_replicas > 1 else ()
        return (*between, *self.batch_groups)

    @property
    def batch_groups(self) -> tuple[Group, ...]:
        """Groups of device tensors of which a broadcast, or a sum, in each covers the ranks of `batch_group`."""
        is_hybrid = self.size("replicate") > 1 and self.plan.replica_axis is None
        replicas = (self.group("replicate", "gradients"),) if is_hybrid else ()
        return (*replicas, self.state_group("gradients"))

    @property
    def num_replicas(self) -> int:
        """Replicas that differ between exchanges; 1 where all ranks hold the same weights."""
        return self.plan.num_replicas

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return 0 if self.plan.replica_axis is None else self.index(self.plan.replica_axis)

    @property
    def num_batch_parts(self) -> int:
        """Parts that the batch of one replica is cut into."""
        return one_replica(self.plan).data_ranks

    @property
    def batch_part(self) -> int:
        """The number of this rank's part of its replica's batch."""
        return self.data_rank % self.num_batch_parts

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
        """The number of this rank's part of the batch."""
        return self.index("replicate") * self.size("data") + self.index("data")

    @property
    def sequence_size(self) -> int:
        """Parts a sequence is cut into."""
        return self.grid.axes.sequence

    @property
    def sample_rank(self) -> int:
        """The number of this rank's part of the batch and of its sequences: ranks with different tokens differ."""
        part = self.index("ring") * self.size("ulysses") + self.index("ulysses")
        return self.data_rank * self.sequence_size + part


def make_mesh(
    plan: Plan,
    world: World,
    *,
    groups: Sequence[GroupKey] | None = None,
    batch_norms: bool = False,
    sharing: Mesh | None = None,
) -> Mesh:
    """Lay the plan's axes over the ranks that are running, and make its process groups; collective.

    A plan that does not fit the ranks is refused. `groups`: instead of those of the plan, one of which only models with
    batch norms need. `sharing`: a mesh of the same axes and transport, whose process groups are used.
    """
    plan = with_ranks(plan, world.size)
    require(check(plan, num_ranks=world.size))
    if plan.comm.transport == "shared" and world.device.type not in ("cpu", "meta"):
        raise PlanError(SHARED_MEMORY_ON_A_DEVICE.message(device=world.device))
    if sharing is not None:
        ours, theirs = ((one.axes, one.comm.transport) for one in (plan, sharing.plan))
        if ours != theirs or world != sharing.world:
            raise PlanError(f"the mesh given is for {theirs[0]}, {theirs[1]}; this plan needs {ours[0]}, {ours[1]}")
        if sharing.process_groups.has_failed:
            raise PlanError("a step failed on the mesh given, and its messages may still be in flight; make a new mesh")
    elif world.backend == "nccl" and world.device.type == "cuda":
        _require_nccl_settings(plan, world)
        require_room_for_communicators(
            free_bytes=torch.cuda.mem_get_info(world.device)[0],
            num_communicators=num_communicators(plan, batch_norms=batch_norms, hosts=world.hosts)
            if groups is None
            else sum(purpose not in HOST_PURPOSES for _, purpose in groups),
            bytes_each=COMMUNICATOR_BYTES,
            device=str(world.device),
        )
    mesh = Mesh(plan, world, sharing=sharing)
    try:
        mesh.add_groups(plan_groups(plan, batch_norms=batch_norms, hosts=world.hosts) if groups is None else groups)
    except BaseException:
        mesh.close(failed=True)
        raise
    return mesh


def _require_nccl_settings(plan: Plan, world: World) -> None:
    found = nccl_problems(os.environ, plan, hosts=world.hosts)
    if found.refused:
        raise LaunchError(found.refused)
    for text in found.warned if world.rank == 0 else ():
        log.warning("%s", text)


def join_world(
    device: torch.device | str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S, plan: Plan | None = None
) -> World:
    """Join the processes a launcher started (torchrun's environment), or be the only one; collective.

    Ranks with different versions, or with different plans where `plan` is given, are refused on all of them.
    A process group that exists already is used as it is. A new one gets a store of its own for every attempt: after a
    restart, torchrun's shared store still holds the dead attempt's addresses, and gloo would connect to them.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")
    if device is None or torch.device(device).type == "cuda":
        request_hardware_queues(os.environ)  # before the first question to the driver
    chosen = _choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        refuse_half_fake(chosen)
        if is_fake():
            return _fake_world(chosen)
        rank, size = dist.get_rank(), dist.get_world_size()
        watch_world(_get_default_store(), rank, size, timeout_s=timeout_s)
        locations = _exchange_locations(_get_default_store(), rank, size, chosen, plan)
    elif launched and int(os.environ["WORLD_SIZE"]) > 1:
        refuse_half_fake(chosen)
        store, rank, size = _meet(timeout_s)
        watch_world(store, rank, size, timeout_s=timeout_s)
        locations = _exchange_locations(store, rank, size, chosen, plan)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" and dist.is_nccl_available() else "gloo"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        watch_world(store, rank, size, timeout_s=timeout_s)  # which learns the group
    else:
        return World(rank=0, size=1, local_rank=0, device=chosen)
    backend = backend_of(chosen, dist.group.WORLD)
    for warning in (slow_backend_warning(locations, backend), needless_sharing_warning(locations, os.environ)):
        if warning is not None and rank == 0 and size > 1:
            log.warning("%s", warning)
    return World(
        rank=rank, size=size, local_rank=local_rank, device=chosen, hosts=number_hosts(locations), backend=backend
    )


def leave_world() -> None:
    """End the process group, if there is one.

    If an exception is being handled (in a `finally`, for example), it reports the error to the other ranks and keeps
    NCCL's communicators: destroying one waits for kernels that wait for those ranks.
    """
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        report(error)
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            return
    else:
        wait_for_all()
        leave_watch()
    if dist.is_initialized():
        dist.destroy_process_group()


def _fake_world(device: torch.device) -> World:
    each, rank, size = ranks_per_host(), dist.get_rank(), dist.get_world_size()
    hosts = tuple(other // each for other in range(size))
    return World(rank=rank, size=size, local_rank=rank % each, device=device, hosts=hosts)


def _exchange_locations(
    store: Store, rank: int, size: int, device: torch.device, plan: Plan | None
) -> tuple[RankLocation, ...]:
    """Every rank's host and device; collective. Ranks that cannot work together are refused on all of them."""
    location = find_location(host_id(), device, rank=rank, environment=os.environ)
    if plan is not None:
        location = replace(location, plan=format_plan(plan))
    locations = exchange_locations(store, rank, size, location)
    require_own_gpus(locations)
    return locations


def _meet(timeout_s: float) -> tuple[Store, int, int]:
    """The store of this attempt, this rank, and the number of ranks."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"cannot reach the other ranks: {error}; start weft with `weft train` or torchrun") from error
    return PrefixStore(f"weft/attempt-{attempt}", store), rank, size


def _choose_device(device: torch.device | str | None, local_rank: int) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:  # "cuda" means this rank's own
        everyone = dist.group.WORLD if dist.is_initialized() else None
        bound: torch.device | None = None if everyone is None else everyone.bound_device_id
        if bound is not None and bound.type == "cuda":  # its communicator is on that one
            return bound
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return chosen
