"""Start parameter servers for workers that are started by themselves, on this host or others, and watch them.

servers   of all the plan's shards, or of some, where others are on other hosts; the first of all (0) leads
workers   join by its address, and, beyond this host, the job's key
the run   is over when all workers have ended; while some have died and none is there, servers wait for them
"""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from weft.errors import LaunchError
from weft.plan.check import require
from weft.plan.plan import Plan
from weft.plan.shared_fields import differences, shared_fields
from weft.server.listening import listen_at
from weft.server.local_servers import MOST_RESTARTS, LocalServers
from weft.server.protocol.ask_run import described_run
from weft.server.protocol.client import JOIN_TIMEOUT_S
from weft.server.protocol.keys import key_for
from weft.server.protocol.served_run import job_name
from weft.server.status import Status

LEADER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersHere:
    """Which servers of a plan are started on this host, and how others reach them."""

    numbers: tuple[int, ...]
    listen: str | None
    """HOST or HOST:PORT; None: only workers of this host reach them."""
    key_file: Path | None
    leader: str | None = None
    """The address of server 0, where it is not one of them."""
    num_elsewhere: int = 0
    """Servers of the plan that are started on other hosts."""


def launch_servers(
    plan: Plan,
    here: ServersHere,
    *,
    seed: int,
    max_restarts: int = MOST_RESTARTS,
    described: dict[str, Any],
    on_start: Callable[[Sequence[str]], None],
    on_status: Callable[[Status], None],
) -> None:
    """Serve until all workers have ended. `max_restarts`: how often each server is started again when it dies, from its
    last snapshot. `described`: what workers must have alike besides the plan. `on_start` is
    called with the servers' addresses, `on_status` with every news of the first of them."""
    described = {**shared_fields(plan), **described}
    if here.leader is not None:
        key = key_for(here.leader, None if here.key_file is None else str(here.key_file))
        require(differences(described, described_run(here.leader, key, timeout_s=JOIN_TIMEOUT_S)))
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with LocalServers(
            plan.server.shards,
            most_frame_bytes=2 * plan.comm.bucket_bytes,  # the optimizer's state may be wider than weights
            job=job_name(seed),
            numbers=here.numbers,
            leader=here.leader,
            described=described,
            reports=True,
            max_restarts=max_restarts,
            **listen_at(here.listen, here.key_file),
        ) as servers:
            on_start(servers.addresses)
            _watch(servers, here.numbers, on_status)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _watch(servers: LocalServers, numbers: Sequence[int], on_status: Callable[[Status], None]) -> None:
    said: queue.Queue[tuple[int, str]] = queue.Queue()
    servers.listen_to(lambda place, line: said.put((place, line)))
    is_over = [False] * len(numbers)
    while not all(is_over):
        place, line = said.get()
        if not line:
            raise LaunchError(f"server {numbers[place]} has ended, and with it the run; see its output")
        found = json.loads(line)
        if "problems" in found:
            raise LaunchError(found["problems"])
        status = Status.of_object(found)
        is_over[place] = status.is_over
        if place == 0:
            on_status(status)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
