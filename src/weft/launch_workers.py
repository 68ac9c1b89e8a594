"""Start parameter servers and their workers on this host, and start one again when it dies while the others go on.

    servers   outlive any worker; one that dies is started again from its snapshot, and workers send what came after it;
              they end with this process, however that ends
    worker    one process per rank; if one dies, its others are killed, and the worker joins the run again
    run       over when all workers have ended; those that cannot be started again are named, and left out

A user's mistake (`WeftError`) ends all of them, as with other launches (`launch.py`).
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from weft.errors import LaunchError
from weft.launch import PARENT_FILE, enter, interruptible, reported, start_server
from weft.plan.partition.one_worker import WORKER, one_worker
from weft.plan.plan import Plan
from weft.plan.shared_fields import shared_fields
from weft.server.local_servers import LocalServers, how_it_ended
from weft.server.protocol.served_run import job_name
from weft.server.worker_mesh import started_run

log = logging.getLogger("weft")
_LOOK_S = 0.5


@dataclass(slots=True, kw_only=True)
class Worker:
    """The processes of one worker."""

    number: int
    attempt: int = 0
    processes: list[Any] = field(default_factory=list)
    """Of its ranks; none when it has ended."""
    pipes: list[Any] = field(default_factory=list)
    """Where ranks say what their function returned."""

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def launch_workers(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    plan: Plan,
    seed: int,
    max_restarts: int = 3,
    listen: Mapping[str, Any] | None = None,
    described: Mapping[str, Any] | None = None,
    on_start: Callable[[Sequence[str]], None] | None = None,
    saved: Path | None = None,
) -> list[Any]:
    """Run a function on the ranks of all workers of a plan; returns the results of those that ended well.

    It is called as `launch` calls it, in an environment in which `weft.parallelize` joins the run. `listen`: where
    workers of other hosts may join (`server/listening.py`); `described`: what they must have alike besides the plan.
    `on_start` is called with the addresses of the servers. `saved`: where these keep their snapshots until the run has
    ended well.
    """
    start_server()
    with tempfile.TemporaryDirectory(prefix="weft-") as name, (Path(name) / PARENT_FILE).open("w") as parent:
        fcntl.flock(parent, fcntl.LOCK_EX)
        folder, num_workers = Path(name), int(plan.axes.data)
        job = job_name(seed)
        servers = LocalServers(
            plan.server.shards,
            most_frame_bytes=2 * plan.comm.bucket_bytes,  # the optimizer's state may be wider than weights
            job=job,
            num_started=num_workers,
            described={**shared_fields(plan), **(described or {})},
            **(listen or {}),
            max_restarts=max_restarts,
            saved=saved,
        )
        with servers, interruptible(folder):
            if on_start is not None:
                on_start(servers.addresses)
            launched = _Launched(function, arguments, plan, servers, job, folder, max_restarts)
            try:
                return launched.run()
            finally:
                launched.kill()


class _Launched:
    """Workers while they run."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        plan: Plan,
        servers: LocalServers,
        job: str,
        folder: Path,
        max_restarts: int,
    ) -> None:
        self._function, self._arguments, self._folder = function, arguments, folder
        self._servers, self._job, self._max_restarts = servers, job, max_restarts
        self._num_workers, self._num_ranks = int(plan.axes.data), one_worker(plan).axes.num_ranks
        self._workers = [Worker(number=number) for number in range(self._num_workers)]

    def run(self) -> list[Any]:
        """Until no worker runs any more."""
        results: list[Any] = []
        for worker in self._workers:
            self._start(worker)
        while running := [one for one in self._workers if one.processes]:
            connection.wait([process.sentinel for one in running for process in one.processes], timeout=_LOOK_S)
            for worker in running:
                results += self._look_at(worker)
            if (mistake := reported(self._folder)) is not None:
                raise mistake
        if not results:
            raise LaunchError("no worker is left: see above why each of them ended")
        return results

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _start(self, worker: Worker) -> None:
        context = multiprocessing.get_context("forkserver")
        environment = started_run(
            job=self._job,
            addresses=self._servers.addresses,
            worker=worker.number,
            num_workers=self._num_workers,
            attempt=worker.attempt,
        )
        environment |= {
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_workers * self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RESTART_COUNT": str(worker.attempt),
            WORKER: str(worker.number),
        }
        worker.processes, worker.pipes = [], []
        for rank in range(self._num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(worker.number * self._num_ranks + rank)}
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=({**environment, **own}, theirs, self._function, str(self._folder), self._arguments),
                name=f"worker {worker.number}, rank {rank}",
            )
            process.start()
            theirs.close()
            worker.processes.append(process)
            worker.pipes.append(ours)

    def _look_at(self, worker: Worker) -> list[Any]:
        """What a worker's ranks have returned, if all of them have; it is started again if one has died."""
        codes = [process.exitcode for process in worker.processes]
        failed = [code for code in codes if code not in (0, None)]
        if not failed and None in codes:
            return []
        worker.kill()
        pipes, worker.processes = worker.pipes, []
        if not failed:
            return [pipe.recv() for pipe in pipes if pipe.poll()]
        how = how_it_ended(failed[0])
        if reported(self._folder) is not None:
            return []
        if worker.attempt == self._max_restarts:
            log.warning("worker %d %s, and is not started again; the others go on without it", worker.number, how)
            return []
        worker.attempt += 1
        log.warning(
            "worker %d %s; the others go on, and it is started again (restart %d of %d)",
            worker.number,
            how,
            worker.attempt,
            self._max_restarts,
        )
        self._start(worker)
        return []


def _run_rank(
    environment: dict[str, str], pipe: Any, function: Callable[..., Any], folder: str, arguments: dict[str, Any]
) -> None:
    """The main function of a rank's process."""
    os.environ.update(environment)
    if environment[WORKER] != "0":  # what all of them would say is said once
        log.setLevel(logging.ERROR)
    pipe.send(enter(function, folder, arguments))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
