"""This process among all processes of a run: how it meets the others, what it knows of them, and how it leaves."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from weft.comm.failures.watch import leave_watch, report, watch_world
from weft.comm.under_way import wait_for_all
from weft.comm.world.binding import (
    RankLocation,
    backend_of,
    exchange_locations,
    find_location,
    needless_sharing_warning,
    number_hosts,
    ranks_on_device,
    request_hardware_queues,
    require_own_gpus,
    slow_backend_warning,
)
from weft.comm.world.fake_world import is_fake, ranks_per_host, refuse_half_fake
from weft.errors import LaunchError
from weft.hosts import host_id
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
    ranks_on_device: int = 1
    """Ranks that share the memory of this device: those of the host, or those that use the same GPU."""

    @property
    def is_fake(self) -> bool:
        """True if tensors have no values, and other ranks, if any, do not exist, so nothing can be run."""
        return self.device.type == "meta"


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
    chosen = choose_device(device, local_rank)
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
        return join_ranks(*meet(timeout_s), device=chosen, local_rank=local_rank, timeout_s=timeout_s, plan=plan)
    else:
        return World(rank=0, size=1, local_rank=0, device=chosen)
    return _world_of(locations, rank, size, chosen, local_rank)


def join_ranks(
    store: Store, rank: int, size: int, *, device: torch.device, local_rank: int, timeout_s: float, plan: Plan | None
) -> World:
    """Join the processes that meet in a store, as torch's default process group; collective."""
    watch_world(store, rank, size, timeout_s=timeout_s)
    locations = _exchange_locations(store, rank, size, device, plan)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    watch_world(store, rank, size, timeout_s=timeout_s)  # which learns the group
    return _world_of(locations, rank, size, device, local_rank)


def _world_of(locations: Sequence[RankLocation], rank: int, size: int, device: torch.device, local_rank: int) -> World:
    backend = backend_of(device, dist.group.WORLD)
    for warning in (slow_backend_warning(locations, backend), needless_sharing_warning(locations, os.environ)):
        if warning is not None and rank == 0 and size > 1:
            log.warning("%s", warning)
    hosts, sharing = number_hosts(locations), ranks_on_device(locations, rank)
    own = World(rank=rank, size=size, local_rank=local_rank, device=device, hosts=hosts)
    return replace(own, backend=backend, ranks_on_device=sharing)


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


def meet(timeout_s: float) -> tuple[Store, int, int]:
    """The store of this attempt, this rank, and the number of ranks."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"cannot reach the other ranks: {error}; start weft with `weft train` or torchrun") from error
    return PrefixStore(f"weft/attempt-{attempt}", store), rank, size


def choose_device(device: torch.device | str | None, local_rank: int) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:  # "cuda" means this rank's own
        everyone = dist.group.WORLD if dist.is_initialized() else None
        bound: torch.device | None = None if everyone is None else everyone.bound_device_id
        if bound is not None and bound.type == "cuda":  # its communicator is on that one
            return bound
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return chosen
