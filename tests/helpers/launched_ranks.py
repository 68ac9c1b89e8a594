"""Processes that look like the ranks of a launcher, on hosts that exist by name only, for tests of what ends or names
a run that fails or hangs. No launcher would end them: what ends them is weft's watch, or the end of the test."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from ranks import start_forkserver

from weft.comm.failures import server as failure_server
from weft.comm.failures import wait_reports
from weft.comm.failures import watch as failure_watch
from weft.comm.failures.limits import Limits
from weft.world import join_world, leave_world

END_S = 60.0
"""Seconds until a rank that was not ended fails its test."""
_LOOK_S = 0.02
Body = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int | None
    """None if the process had to be killed."""
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of a rank."""

    world: int
    port: int
    folder: str
    ranks_per_host: int
    timeout_s: float
    is_script: bool
    limits: Limits


def run(
    body: Body,
    world: int,
    folder: Path,
    *,
    ranks_per_host: int = 8,
    timeout_s: float = 60.0,
    is_script: bool = True,
    limits: Limits | None = None,
    until: str = "",
) -> list[Ended]:
    """A function on several ranks, until all have ended, or until one of them has printed a text.

    `is_script`: as an interpreter runs a script.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = Settings(
        world=world,
        port=port,
        folder=str(folder),
        ranks_per_host=ranks_per_host,
        timeout_s=timeout_s,
        is_script=is_script,
        limits=limits or Limits(),
    )
    context = start_forkserver()
    processes = [context.Process(target=_be_rank, args=(body, rank, settings)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline, ended = time.monotonic() + END_S, []
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if until and any(until in _stderr(folder, rank) for rank in range(world)):
            time.sleep(0.5)  # stacks are written beside the message
            break
        time.sleep(_LOOK_S)
    for rank, process in enumerate(processes):
        code = process.exitcode
        process.kill()
        process.join()
        ended.append(Ended(code=code, stderr=_stderr(folder, rank)))
    return ended


def _stderr(folder: Path, rank: int) -> str:
    path = folder / f"stderr-{rank}"
    return path.read_text() if path.exists() else ""


def _be_rank(body: Body, rank: int, settings: Settings) -> None:
    """The main function of a rank: what an interpreter does with a script, its uncaught errors included."""
    os.dup2(os.open(f"{settings.folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    each = settings.ranks_per_host
    names = {"RANK": rank, "WORLD_SIZE": settings.world, "LOCAL_RANK": rank % each, "MASTER_PORT": settings.port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ[wait_reports.STACKS] = f"{settings.folder}/stacks"
    for module in (failure_watch, failure_server, wait_reports):
        module.host_id = lambda: f"host {rank // each}"  # type: ignore[assignment]
    failure_watch.PEER_GRACE_S = 0.3
    failure_watch.limits = settings.limits
    try:
        join_world("cpu", timeout_s=settings.timeout_s)
        dist.barrier()
        body(rank)
    except BaseException:
        if not settings.is_script:
            raise
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        leave_world()
        os._exit(1)
    if settings.is_script:
        leave_world()
        os._exit(0)


def printed(ended: list[Ended]) -> list[str]:
    """The lines that the watch printed, with their ranks."""
    return [f"{rank} {line}" for rank, one in enumerate(ended) for line in one.stderr.splitlines() if "weft:" in line]
