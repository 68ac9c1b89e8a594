"""One host of `server_lab.py`: for every side, in new processes, its worker and its servers.

Workers meet in shared memory, and find the servers' addresses in files: nothing that only measures crosses the network.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from emulated_accelerator import Emulated, EmulatedModel, make_batch
from slow_networks_rank import Meeting
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.lab.counters import read_counters
from weft.launch_servers import ServersHere, launch_servers
from weft.plan.plan import Axes, Comm, Data, Plan, Server
from weft.server.worker_mesh import JOIN, KEY
from weft.world import join_world, leave_world

NUM_WORKERS = 4
NUM_HOSTS = NUM_WORKERS + 1
ALONE, ALL_REDUCE, DDP = "no exchange", "all-reduce", "DDP"
WARM_UP_STEPS = 3
LEARNING_RATE = 1e-4
FIRST_PORT = 29600
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to exchange."""

    number: int
    servers_at: tuple[int, ...] = ()
    """The host of each server."""


SIDES = {
    ALONE: Side(number=0),
    DDP: Side(number=1),
    ALL_REDUCE: Side(number=2),
    "a server on a host of its own": Side(number=3, servers_at=(NUM_WORKERS,)),
    "2 servers on a host of their own": Side(number=4, servers_at=(NUM_WORKERS,) * 2),
    "a server on the first worker's host": Side(number=5, servers_at=(0,)),
    "a server on each worker's host": Side(number=6, servers_at=tuple(range(NUM_WORKERS))),
}


def plan_of(side: str, bucket_mb: float) -> Plan:
    servers = len(SIDES[side].servers_at)
    common: dict[str, Any] = {"comm": Comm(bucket_bytes=int(1e6 * bucket_mb))}
    if side == ALONE:
        return Plan(**common)
    common["axes"] = Axes(data=NUM_WORKERS)
    return Plan(**common, data=Data(sync="server"), server=Server(shards=servers)) if servers else Plan(**common)


def wait_for(path: Path) -> str:
    """What another process writes there."""
    while not path.exists():
        time.sleep(POLL_S)
    return path.read_text()


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads a part of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def leader_file(given: dict[str, Any], side: str) -> Path:
    return Path(given["folder"], f"{SIDES[side].number}.leader")


def key_file(given: dict[str, Any]) -> Path:
    return Path(given["folder"], "job.key")


def serve(side: str, host: int, given: dict[str, Any]) -> None:
    """The servers of a host, until all workers have ended."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(given["seconds_at_most"], exit=True)
    numbers = tuple(number for number, at in enumerate(SIDES[side].servers_at) if at == host)
    told = leader_file(given, side)

    def begin(addresses: Any) -> None:
        if 0 in numbers:
            write_whole(told, addresses[0])

    here = ServersHere(
        numbers=numbers,
        listen=os.environ["WEFT_LAB_ADDRESS"],
        key_file=key_file(given),
        leader=None if 0 in numbers else wait_for(told),
        num_elsewhere=len(SIDES[side].servers_at) - len(numbers),
    )
    plan = plan_of(side, given["bucket_mb"])
    launch_servers(plan, here, seed=SIDES[side].number, described={}, on_start=begin, on_status=lambda _: None)


def work(side: str, host: int, given: dict[str, Any]) -> None:
    """The worker of a host; the first one writes what was found."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    faulthandler.dump_traceback_later(given["seconds_at_most"], exit=True)
    is_alone = side == ALONE or bool(SIDES[side].servers_at)  # workers of servers are started one by one
    os.environ["RANK"], os.environ["WORLD_SIZE"] = ("0", "1") if is_alone else (str(host), str(NUM_WORKERS))
    os.environ["MASTER_PORT"] = str(FIRST_PORT + SIDES[side].number)
    if SIDES[side].servers_at:
        os.environ[JOIN], os.environ[KEY] = wait_for(leader_file(given, side)), str(key_file(given))
    meeting = Meeting(f"{given['folder']}/{SIDES[side].number}.table", host, NUM_WORKERS)
    batch = make_batch(host)
    trainer, step = make_trainer(side, given)
    for _ in range(WARM_UP_STEPS):
        step(*batch)
    meeting.wait()
    before, started_ns, steps_s = read_counters(), time.perf_counter_ns(), []
    for _ in range(given["steps"]):
        began = time.perf_counter()
        step(*batch)
        steps_s.append(time.perf_counter() - began)
    ended_ns = meeting.largest(time.perf_counter_ns())
    after = read_counters()
    if host == 0:
        packets = {pair: (one.bytes - before[pair].bytes) / given["steps"] for pair, one in after.items()}
        content = {
            "step_s": (ended_ns - started_ns) / 1e9 / given["steps"],
            "steps_s": steps_s,
            "sent": [sum(one for (source, _), one in packets.items() if source == at) for at in range(NUM_HOSTS)],
            "received": [sum(one for (_, target), one in packets.items() if target == at) for at in range(NUM_HOSTS)],
        }
        write_whole(Path(given["folder"], f"{SIDES[side].number}.json"), json.dumps(content))
        print(f"  {side}: {1e3 * content['step_s']:.0f} ms, median {1e3 * statistics.median(steps_s):.0f}", flush=True)
    meeting.wait()
    if trainer is not None:
        trainer.close()
    del step
    leave_world()


def make_trainer(side: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """What is closed at the end, and a step."""
    torch.manual_seed(0)
    model = EmulatedModel(Emulated(**given["work"]))
    if side == DDP:
        join_world("cpu")
        wrapped = DistributedDataParallel(model, bucket_cap_mb=given["bucket_mb"], gradient_as_bucket_view=True)
        return None, functools.partial(step_of_torch, wrapped, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    trainer = weft.parallelize(
        model,
        plan_of(side, given["bucket_mb"]),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE),
        device="cpu",
    )
    return trainer, trainer.step


def step_of_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run_host(given: dict[str, Any]) -> None:
    """All sides on this host, one after the other."""
    host = int(os.environ["WEFT_LAB_HOST"])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "weft.training.parallelize"])
    for side in given["sides"]:
        processes = []
        if host in SIDES[side].servers_at:
            processes.append(context.Process(target=serve, args=(side, host, given)))
        if host < NUM_WORKERS:
            processes.append(context.Process(target=work, args=(side, host, given)))
        for one in processes:
            one.start()
        while any(one.is_alive() for one in processes):
            if any(one.exitcode for one in processes):
                break
            time.sleep(POLL_S)
        for one in processes:
            if one.is_alive():
                one.terminate()
            one.join()
        if any(one.exitcode for one in processes):
            sys.exit(f'"{side}" failed on host {host}')
