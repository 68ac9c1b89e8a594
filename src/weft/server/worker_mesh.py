"""A worker's ranks as a world of their own: which of the launched processes they are, and their mesh.

    torchrun, 8 processes, [axes] data 4, tensor 2       worker 0: ranks 0, 1     worker 1: ranks 2, 3     ...

Workers know nothing of each other: one that dies leaves no broken connection behind. The first process starts the
servers, and tells the others where they are; on several hosts these need the job's key, and an address to listen at:

    WEFT_LISTEN=10.0.0.1 WEFT_KEY=job.key torchrun --nnodes 2 --nproc-per-node 4 ... train.py      on every host

A worker of a job whose servers wait for it, or that runs already, is launched by itself:

    WEFT_JOIN=ipc:///tmp/weft-servers-x/0 torchrun --nproc-per-node 2 train.py                     on the same host
    WEFT_JOIN=tcp://10.0.0.1:5000 WEFT_KEY=job.key torchrun --nproc-per-node 2 train.py            on another one
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from weft.comm.objects import gather_values
from weft.comm.world.binding import request_hardware_queues
from weft.errors import LaunchError, WeftError
from weft.hosts import host_id
from weft.mesh import Mesh
from weft.plan.all_ranks import with_ranks
from weft.plan.check import check, require
from weft.plan.partition.one_worker import one_worker
from weft.plan.plan import ALL, Plan
from weft.plan.shared_fields import differences, shared_fields
from weft.server.listening import listen_at
from weft.server.local_servers import MOST_RESTARTS, LocalServers
from weft.server.protocol.ask_run import FoundRun, HeldNumber, ask_run
from weft.server.protocol.client import JOIN_TIMEOUT_S
from weft.server.protocol.keys import key_for
from weft.server.protocol.served_run import ServedRun, job_name
from weft.sync.served import ServedSync
from weft.sync.served_progress import Progress
from weft.world import World, choose_device, join_ranks, join_world, meet

log = logging.getLogger("weft")
JOIN, KEY, LISTEN = "WEFT_JOIN", "WEFT_KEY", "WEFT_LISTEN"
"""Environment of a worker that joins a running job: the address of its first server, and the file of the job's key.
Of processes that are started together on several hosts: that file, and where the first one's host listens."""
STARTED = "WEFT_STARTED"
"""Environment of a worker that was started with the servers: its run as JSON (`started_run`)."""
_said = itertools.count()
_runs = itertools.count()
"""Runs that this process has joined, as many as the others have: a store keeps what was said of earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This process in a run with servers."""

    run: ServedRun
    world: World
    """Of its worker."""
    servers: LocalServers | None = None
    """Those that this process has started."""
    store: Store | None = None
    """Where the processes of all workers meet; None where workers were started one by one."""
    held: HeldNumber | None = None
    """Keeps the number of this worker until it is there."""
    is_by_itself: bool = False
    """It was started by itself, and not with the others."""
    described: dict[str, Any] = field(default_factory=dict)
    """What the run says of itself, which a worker must have alike."""


class WorkerMesh(Mesh):
    """The mesh of one worker's ranks."""

    def __init__(self, plan: Plan, world: World, *, joined: Joined) -> None:
        super().__init__(plan, world)
        self.run, self._servers, self._store = joined.run, joined.servers, joined.store
        self._held, self._is_by_itself, self._described = joined.held, joined.is_by_itself, joined.described
        self._sync: ServedSync | None = None

    def join_another(self, plan: Plan) -> Joined:
        """Another run of the same workers, with servers of its own; collective."""
        size = int(self.run.plan.axes.data) * self.world.size
        if self._store is None and size > 1:
            raise LaunchError("workers that were started one by one have no place to meet again; leave mesh out")
        plan = with_ranks(plan, size)
        require(check(plan, num_ranks=size))
        rank, worker = self.ranks_before + self.world.rank, self.run.worker
        run, servers = _find_servers(plan, self._store, rank, worker)
        return Joined(run=run, world=self.world, servers=servers, store=self._store)

    def join_with(self, sync: ServedSync, trainer: Progress, *, timeout_s: float) -> None:
        """Say with what this worker joins its run, as soon as it needs what others have."""
        sync.join_later(self.run, trainer, self, timeout_s=timeout_s)
        self._sync = sync

    @property
    def whole_plan(self) -> Plan:
        return self.run.plan

    @property
    def ranks_before(self) -> int:
        return self.run.worker * self.world.size

    @property
    def leads(self) -> bool:
        if self._sync is None or not self._sync.has_joined:
            return self.run.worker == 0
        return self._sync.take_part().index == 0

    @property
    def joins_running(self) -> bool:
        return self.run.is_running

    @property
    def by_itself(self) -> int | None:
        return self.run.worker if self._is_by_itself else None

    @property
    def described(self) -> Mapping[str, Any]:
        return self._described

    def said_by_first(self, text: str) -> str:
        text = super().said_by_first(text)
        if self._store is None:
            return text
        key = f"weft/said/{next(_said)}"
        if self.run.worker == 0 and self.world.rank == 0:
            self._store.set(key, text)
        return self._store.get(key).decode()

    def gather_from_workers(self, value: Any) -> list[Any]:
        """What the first rank of each worker gives, as plain values, in the order of workers; collective among all
        ranks of the workers with which the run began, which were launched together."""
        num_workers = int(self.run.plan.axes.data)
        if num_workers == 1:
            return gather_values(value, self.everyone("control"))[:1]
        if self._store is None:
            raise LaunchError(
                "workers that were started one by one have no place to meet; launch them together, as torchrun does"
            )
        key = f"weft/gathered/{next(_said)}"
        if self.world.rank == 0:
            self._store.set(f"{key}/{self.run.worker}", json.dumps(value))
        found = [json.loads(self._store.get(f"{key}/{worker}")) for worker in range(num_workers)]
        self._store.set(f"{key}/{self.run.worker}/{self.world.rank}", "read")
        if self.run.worker == 0 and self.world.rank == 0:  # the store may be gone with this process
            places = itertools.product(range(num_workers), range(self.world.size))
            self._store.wait([f"{key}/{worker}/{rank}" for worker, rank in places])
        return found

    @property
    def data_size(self) -> int:
        """Workers that share a batch now."""
        return 1 if self._sync is None else self._sync.take_part().num_workers

    @property
    def data_rank(self) -> int:
        """The number of this worker among them."""
        return 0 if self._sync is None else self._sync.take_part().index

    def close(self, *, failed: bool = False) -> None:
        super().close(failed=failed)
        if self._held is not None:
            self._held.close()
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.leave(failed=failed)
        servers, self._servers = self._servers, None
        if servers is not None and failed:
            servers.close()
        elif servers is not None:
            servers.close_when_left()


def join_run(plan: Plan, device: torch.device | str | None, *, timeout_s: float, earlier: Mesh | None = None) -> Joined:
    """Join a run with servers, as one of the processes that a launcher has started; collective. `earlier`: the mesh of
    another run of these processes, whose workers are those of this run."""
    if isinstance(earlier, WorkerMesh):
        return earlier.join_another(plan)
    if STARTED in os.environ:
        return _join_started(plan, device, json.loads(os.environ[STARTED]), timeout_s)
    if JOIN in os.environ:
        return _join_running(plan, device, os.environ[JOIN], timeout_s)
    store, rank, size = _launched(timeout_s)
    plan = with_ranks(plan, size)
    require(check(plan, num_ranks=size))
    of_one = one_worker(plan).axes.num_ranks
    worker, place = divmod(rank, of_one)
    run, servers = _find_servers(plan, store, rank, worker)
    try:
        world = _world_of_worker(store, worker, place, of_one, device, timeout_s)
    except BaseException:
        if servers is not None:
            servers.close()
        raise
    return Joined(run=run, world=world, servers=servers, store=store)


def ranks_of_run(plan: Plan) -> int:
    """Ranks of all workers with which a run begins, before this process has joined it."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if STARTED in os.environ:
        return launched * int(json.loads(os.environ[STARTED])["num_workers"])
    return plan.axes.num_ranks if JOIN in os.environ and plan.axes.data != ALL else launched


def _launched(timeout_s: float) -> tuple[Store | None, int, int]:
    """Where processes meet, this one's number, and how many they are."""
    if dist.is_initialized():
        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return meet(timeout_s)
    return None, 0, 1


def _find_servers(plan: Plan, store: Store | None, rank: int, worker: int) -> tuple[ServedRun, LocalServers | None]:
    servers, place = None, f"weft/servers/{next(_runs)}"
    said: dict[str, Any]
    if rank == 0:
        job = job_name(int(torch.randint(2**62, (1,))))  # so that a seed set by the user repeats the run
        servers = LocalServers(
            plan.server.shards,
            most_frame_bytes=2 * plan.comm.bucket_bytes,  # the optimizer's state may be wider than weights
            job=job,
            num_started=int(plan.axes.data),
            described=shared_fields(plan),
            max_restarts=MOST_RESTARTS,
            **listen_at(os.environ.get(LISTEN), os.environ.get(KEY)),
        )
        said = {"job": job, "addresses": servers.addresses, "host": host_id()}
        if store is not None:
            store.set(place, json.dumps(said))
    else:
        assert store is not None
        said = json.loads(store.get(place))
    is_reached = said["addresses"][0].startswith("tcp://")
    if said["host"] != host_id() and not is_reached:
        raise LaunchError(
            f"workers of several hosts need an address of the first one's servers, and the job's key: set {LISTEN} "
            f"(--listen HOST) on the first host, and {KEY} (--key FILE) on all of them, to a file that all have"
        )
    key = key_for(said["addresses"][0], os.environ.get(KEY)) if is_reached else None
    run = ServedRun(plan=plan, job=said["job"], addresses=tuple(said["addresses"]), worker=worker, key=key)
    return run, servers


def started_run(*, job: str, addresses: Sequence[str], worker: int, num_workers: int, attempt: int) -> dict[str, str]:
    """The environment of the ranks of a worker that is started with its servers."""
    said = dict(job=job, addresses=list(addresses), worker=worker, num_workers=num_workers, attempt=attempt)
    return {STARTED: json.dumps(said)}


def _join_started(plan: Plan, device: torch.device | str | None, said: dict[str, Any], timeout_s: float) -> Joined:
    """Join a run as the worker that whoever started the servers has started; collective among its ranks."""
    world = join_world(device, timeout_s=timeout_s)
    num_ranks = said["num_workers"] * world.size
    plan = with_ranks(plan, num_ranks)
    require(check(plan, num_ranks=num_ranks))
    run = ServedRun(
        plan=plan,
        job=said["job"],
        addresses=tuple(said["addresses"]),
        worker=said["worker"],
        key=key_for(said["addresses"][0], os.environ.get(KEY)),
        attempt=said["attempt"],
        is_running=said["attempt"] > 0,
    )
    return Joined(run=run, world=world)


def _join_running(plan: Plan, device: torch.device | str | None, address: str, timeout_s: float) -> Joined:
    """Join a run as one more worker, of all the processes that were launched together; collective."""
    world = join_world(device, timeout_s=timeout_s)
    problems = []
    if plan.axes.data == ALL:
        problems.append(
            "[axes] data says how many workers a run begins with, and a worker that joins it cannot count them; give "
            "the number"
        )
    elif (of_one := one_worker(plan).axes.num_ranks) != world.size:
        problems.append(
            f"a worker of this plan has {of_one} ranks, and {world.size} were launched to join as one; launch {of_one}"
        )
    require(problems)
    key = key_for(address, os.environ.get(KEY))
    found = FoundRun(**_told_by_first(world, lambda: asdict(ask_run(address, key, timeout_s=JOIN_TIMEOUT_S))))
    require(differences(shared_fields(plan), found.described))
    run = ServedRun(
        plan=plan,
        job=found.job,
        addresses=tuple(found.addresses),
        worker=found.worker,
        key=key,
        drawn=found.asker,
        is_running=found.has_begun,
    )
    holds = found.worker == 0 and world.rank == 0
    held = HeldNumber(address, key, found.asker) if holds else None
    return Joined(run=run, world=world, held=held, is_by_itself=True, described=found.described)


def _told_by_first(world: World, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Plain values that the first rank makes, or the error that it meets; collective."""
    if world.size == 1:
        return make()
    store, key = _get_default_store(), f"weft/join/{next(_runs)}"
    if world.rank == 0:
        try:
            said = make()
        except WeftError as error:
            store.set(key, json.dumps({"problems": error.problems}))
            raise
        store.set(key, json.dumps(said))
        return said
    found: dict[str, Any] = json.loads(store.get(key))
    if "problems" in found:
        raise LaunchError(found["problems"])
    return found


def _world_of_worker(
    store: Store | None,
    worker: int,
    place: int,
    num_ranks: int,
    device: torch.device | str | None,
    timeout_s: float,
) -> World:
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")
    if device is None or torch.device(device).type == "cuda":
        request_hardware_queues(os.environ)  # before the first question to the driver
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if num_ranks == 1:
        return World(rank=0, size=1, local_rank=local_rank, device=chosen)
    if dist.is_initialized():
        raise LaunchError(
            f"torch.distributed is initialised already, for all {dist.get_world_size()} processes; a worker of "
            f"{num_ranks} ranks has a group of its own, so leave it to weft.parallelize to make it"
        )
    assert store is not None
    return join_ranks(
        PrefixStore(f"worker-{worker}", store),
        place,
        num_ranks,
        device=chosen,
        local_rank=local_rank,
        timeout_s=timeout_s,
        plan=None,
    )
