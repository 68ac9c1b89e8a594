"""From a plan to ranks, axes and process groups: the only place that makes groups.

A `World` is this process among all processes; a `Mesh` gives every rank its place on the plan's axes and one process
group per axis *and purpose*, because two threads, or two exchanges whose order may differ between ranks, must never
share a group. Groups are made when first asked for; asking is collective, so every rank asks in the same order.

With one process and no launcher there is no process group at all, and every group has one member.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from weft.errors import LaunchError
from weft.plan.check import require
from weft.plan.grid import Grid
from weft.plan.plan import Plan

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


@dataclass(slots=True)
class Traffic:
    """What went over one axis so far: counted by `comm/`, read by metrics and by the byte tests."""

    num_calls: int = 0
    sent_bytes: int = 0
    wait_s: float = 0.0
    """Seconds this rank was blocked in exchanges; what computation hid is not in it."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, num_calls: int = 0, sent_bytes: int = 0, wait_s: float = 0.0) -> None:
        """Count; groups of several threads share the traffic of their axis."""
        with self._lock:
            self.num_calls += num_calls
            self.sent_bytes += sent_bytes
            self.wait_s += wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that exchange with each other along an axis, for one purpose."""

    axis: str
    purpose: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the axis."""
    index: int
    """This rank's place in `ranks`."""
    handle: dist.ProcessGroup | None
    """None when there is nobody to exchange with."""
    traffic: Traffic
    through_host: bool = False
    """Messages of CUDA tensors pass through host memory, because gloo can send only from there."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: object) -> Group:
        """A copy of a model exchanges with the same ranks through the same group."""
        return self


@dataclass(slots=True)
class Mesh:
    """The plan's axes, seen from this rank."""

    plan: Plan
    world: World
    grid: Grid
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _groups: dict[tuple[str, str], Group] = field(default_factory=dict)

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
        """The group of this rank along an axis, or several joined by "+". Collective when first asked for."""
        if (axis, purpose) not in self._groups:
            self._groups[axis, purpose] = self._make_group(axis, purpose)
        return self._groups[axis, purpose]

    def batch_group(self, purpose: str) -> Group:
        """The ranks that share one global batch, along replicate and data together; ordered by rank."""
        if self.size("replicate") == 1:
            return self.group("data", purpose)
        return self.group("replicate+data" if self.size("data") > 1 else "replicate", purpose)

    def everyone(self, purpose: str) -> Group:
        """All ranks of the run as one group; its traffic is counted under "world"."""
        return self.group(WORLD, purpose)

    def _make_group(self, axis: str, purpose: str) -> Group:
        everyone = tuple(range(self.world.size))
        axes = tuple(axis.split("+"))
        mine = everyone if axis == WORLD else self.grid.ranks_along(axes, self.world.rank)
        handle = None
        if len(mine) > 1:
            # every rank takes part in making every group
            for ranks in (everyone,) if axis == WORLD else self.grid.groups(axes):
                made = dist.new_group(list(ranks), group_desc=f"{axis}/{purpose}")
                handle = made if ranks == mine else handle
        return Group(
            axis=axis,
            purpose=purpose,
            ranks=mine,
            index=mine.index(self.world.rank),
            handle=handle,
            traffic=self.traffic.setdefault(axis, Traffic()),
            through_host=self.world.device.type == "cuda" and handle is not None and dist.get_backend(handle) == "gloo",
        )


def make_mesh(plan: Plan, world: World) -> Mesh:
    """Lay the plan's axes over the ranks that are running; a plan that does not fit them is refused."""
    require(plan, num_ranks=world.size)
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
    if not dist.is_initialized():
        return World(rank=0, size=1, local_rank=0, device=chosen)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local_rank, device=chosen)


def leave_world() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
