"""Meshes for tests, kept from test to test: making a process group takes tens of milliseconds and several threads.

A pool's rank keeps one mesh for each shape, transport and set of hosts. A test's own mesh shares its process groups and
counts its own traffic.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from weft.comm.group import Group
from weft.mesh import Mesh, make_mesh
from weft.plan.partition.groups import GroupKey
from weft.plan.plan import Axes, Comm, Plan
from weft.verification.verdict import Verification
from weft.verification.verify import verify as verify_plan
from weft.world import World, join_world


@functools.cache
def _kept(axes: Axes, transport: str, world: World) -> Mesh:
    return Mesh(Plan(axes=axes, comm=Comm(transport=transport)), world)  # type: ignore[arg-type]


def kept_mesh(plan: Plan, world: World | None = None) -> Mesh:
    """The mesh whose process groups a mesh of this plan may share; collective."""
    return _kept(plan.axes, plan.comm.transport, world or join_world("cpu"))


def mesh_with(plan: Plan, *keys: GroupKey, world: World | None = None) -> Mesh:
    """A mesh that has these groups; collective."""
    kept = kept_mesh(plan, world)
    return make_mesh(plan, kept.world, groups=keys, sharing=kept)


def data_group(purpose: str, *, transport: str | None = None, world: World | None = None) -> Group:
    """All ranks along the data axis; collective."""
    size = world.size if world is not None else dist.get_world_size() if dist.is_initialized() else 1
    comm = Comm() if transport is None else Comm(transport=transport)  # type: ignore[arg-type]
    return mesh_with(Plan(axes=Axes(data=size), comm=comm), ("data", purpose), world=world).group("data", purpose)


def verify(model: Any, plan: Plan, **settings: Any) -> Verification:
    """`weft.verify` with the process groups of the kept mesh."""
    return verify_plan(model, plan, mesh=kept_mesh(plan), **settings)
