"""From a plan to ranks, axes and process groups.

A `Mesh` gives every rank of a `World` its place on the plan's axes and the process groups that the plan declares
(`plan/partition/groups.py`). They are made with the mesh, so that looking one up is never collective, and `close` gives
them back.

With one process and no launcher there is no process group at all, and every group has one member.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.comm.group import Group, Traffic
from weft.comm.objects import gather_values
from weft.comm.process_groups import ProcessGroups, is_used_between_steps
from weft.comm.world.nccl_settings import nccl_problems, require_room_for_communicators
from weft.errors import LaunchError, PlanError
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
from weft.plan.plan import Plan
from weft.world import World

log = logging.getLogger("weft")


class Mesh:
    """The plan's axes and process groups, seen from this rank."""

    def __init__(self, plan: Plan, world: World, *, sharing: Mesh | None = None) -> None:
        """`sharing`: a mesh with the same axes and transport, whose process groups this one uses and does not close.
        Groups on which something may be under way between two calls are always a mesh's own."""
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
                owner = self._own if is_used_between_steps(self.plan, key) else self.process_groups
                self._groups[key] = owner.get_or_make(key, self.traffic)

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
    def whole_plan(self) -> Plan:
        """The plan of the run: of all workers, where each is a world of its own."""
        return self.plan

    @property
    def ranks_before(self) -> int:
        """Ranks of the run that are counted before this world's: those of other workers."""
        return 0

    @property
    def leads(self) -> bool:
        """Ranks of this world write what is written once per run."""
        return True

    @property
    def joins_running(self) -> bool:
        """The run has begun before, so that weights come from others and not from a checkpoint."""
        return False

    @property
    def by_itself(self) -> int | None:
        """The number of this world's worker, if it was started by itself: it tells there how the run goes."""
        return None

    @property
    def described(self) -> Mapping[str, Any]:
        """What the run says of itself, where this world has joined one that others have started."""
        return {}

    def said_by_first(self, text: str) -> str:
        """What the first rank of the run gave here; collective."""
        said: str = gather_values(text, self.everyone("control"))[0]
        return said

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
    kind: Callable[[Plan, World], Mesh] | None = None,
) -> Mesh:
    """Lay the plan's axes over the ranks that are running, and make its process groups; collective.

    A plan that does not fit the ranks is refused. `groups`: instead of those of the plan, one of which only models with
    batch norms need. `sharing`: a mesh of the same axes and transport, whose process groups are used. `kind`: makes
    another kind of mesh.
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
    mesh = Mesh(plan, world, sharing=sharing) if kind is None else kind(plan, world)
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
