"""`@ranks(4)`: run a test's body on four ranks, in a pool of processes kept for the whole pytest run.

    @ranks(2)
    @pytest.mark.parametrize("size", [1, 1000])
    def test_sum(size: int) -> None:
        tensor = torch.ones(size)
        dist.all_reduce(tensor)
        assert tensor.sum() == 2 * size

Starting a rank imports torch, which takes seconds; a body takes milliseconds. So there is one pool per world size,
forked from a forkserver that has imported everything once (`rank_preload.py`). A default gloo group of that size is
ready in every body. Fixtures and parameters are sent to the ranks, so they must be picklable: a path, not a capsys.

How a body ends, as seen from here:

    1 every rank passed or skipped      the pool is kept for the next test
    2 a rank raised, died, or is late   the others get GRACE_S to report too, then SIGUSR1 makes the silent ones
                                        print their stacks, then the pool is killed; the next test forks a new one

All pipes are waited on at once: an error on rank 1 never hides behind a rank 0 that waits for it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import pytest
from rank_process import Report, Task, rank_main, warning_filters

START_TIMEOUT_S = 100.0
GRACE_S = 0.3
STACK_WAIT_S = 0.5


class Pool:
    """The processes of one world size and the pipes to them. A broken pool is killed, never repaired."""

    def __init__(self, world: int, *, fresh: bool = False) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        context = start_forkserver()
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world, self.folder, dict(os.environ))
            process = context.Process(target=rank_main, args=arguments, kwargs={"fresh": fresh}, name=f"rank {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def send(self, task: Task) -> None:
        for pipe in self.pipes:
            # A dead rank is found, with its exit code, by collect().
            with suppress(BrokenPipeError):
                pipe.send(task)

    def collect(self, timeout_s: float, *, dies: Collection[int] = ()) -> dict[int, Report]:
        """Reports by rank. A missing rank did not report in time."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout_s
        while len(reports) < self.world:
            waiting = [rank for rank in range(self.world) if rank not in reports]
            # Wait for the sentinel too: a rank's own child may hold the pipe open after the rank is dead.
            sources = [source for rank in waiting for source in (self.pipes[rank], self.processes[rank].sentinel)]
            ready = connection.wait(sources, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.pipes[rank] in ready or self.processes[rank].sentinel in ready:
                    reports[rank] = self.read(rank)
                    if is_failure(rank, reports[rank], dies):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return reports

    def read(self, rank: int) -> Report:
        with suppress(EOFError, ConnectionResetError):
            if self.pipes[rank].poll():
                report: Report = self.pipes[rank].recv()
                return report
        self.processes[rank].join(timeout=1.0)
        code = self.processes[rank].exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Report(kind="died", text=f"died: {how}\n{self.stack(rank)}".rstrip())

    def stack(self, rank: int) -> str:
        """The rank's stack when it crashed or was asked, as its faulthandler wrote it."""
        path = self.folder / f"stack-{rank}"
        return path.read_text() if path.exists() else ""

    def stacks(self, silent: Collection[int]) -> dict[int, str]:
        """Make the silent ranks print their stacks. A stopped process cannot answer."""
        for rank in silent:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline, before = time.monotonic() + STACK_WAIT_S, {}
        while time.monotonic() < deadline:
            now = {rank: self.stack(rank) for rank in silent}
            if all(now.values()) and now == before:
                break
            before = now
            time.sleep(0.03)
        return {rank: text or "(no stack: the process does not answer signals)" for rank, text in before.items()}

    def kill(self) -> None:
        """Kill every rank and its children: each leads its own process group."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(timeout=10.0)
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_forkserver() -> multiprocessing.context.ForkServerContext:
    """A clean process that has imported everything and forks the ranks; started once, ends with this process."""
    forkserver.set_forkserver_preload(["rank_preload"])
    # Python 3.11 does not give the forkserver our sys.path, and silently skips a preload it cannot find.
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = here if before is None else here + os.pathsep + before
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("forkserver")


def is_failure(rank: int, report: Report, dies: Collection[int]) -> bool:
    if rank in dies:
        return report.kind != "died"
    return report.kind in ("failed", "died")


def failure_text(pool: Pool, reports: dict[int, Report], *, title: str, timeout_s: float, dies: Collection[int]) -> str:
    """Empty on success. Otherwise the likeliest cause first: a death, then the earliest error, then silence."""
    bad = [rank for rank, report in reports.items() if is_failure(rank, report, dies)]
    silent = [rank for rank in range(pool.world) if rank not in reports]
    skipped = [rank for rank, report in reports.items() if report.kind == "skipped"]
    if not bad and not silent and len(skipped) in (0, pool.world):
        return ""
    bad.sort(key=lambda rank: (reports[rank].kind != "died", reports[rank].at_s))
    sections, shown = [], ""
    for rank in bad:
        text = reports[rank].text or "was to die, but returned"
        sections.append((rank, "the same" if text == shown else text))
        shown = shown or text
    if bad:
        head = f"rank {bad[0]} of {pool.world} failed"
    elif silent:
        head = f"{', '.join(f'rank {rank}' for rank in silent)} of {pool.world} silent after {timeout_s:g} s"
    else:
        head = f"ranks {skipped} of {pool.world} skipped and the others did not"
    sections += [(rank, f"waiting in:\n{text}") for rank, text in pool.stacks(silent).items()]
    return "\n".join([f"{title}: {head}", *(f"--- rank {rank} of {pool.world}: {text}" for rank, text in sections)])


kept_pools: dict[int, Pool] = {}


def run_on_ranks(task: Task, world: int, *, fresh: bool, timeout_s: float, dies: Collection[int]) -> None:
    """Run one task on every rank of a pool and turn the reports into this test's outcome."""
    # Removed from the dictionary while in use, so that any exit but success leaves no broken pool behind.
    pool, keep = None if fresh else kept_pools.pop(world, None), False
    try:
        if pool is None:
            pool = Pool(world, fresh=fresh)
            started = pool.collect(START_TIMEOUT_S)
            if text := failure_text(pool, started, title="starting the pool", timeout_s=START_TIMEOUT_S, dies=()):
                pytest.fail(text, pytrace=False)
        idle_death = not all(process.is_alive() for process in pool.processes)
        title = f"{task.function} (a rank had died before it began)" if idle_death else task.function
        pool.send(task)
        reports = pool.collect(timeout_s, dies=dies)
        if text := failure_text(pool, reports, title=title, timeout_s=timeout_s, dies=dies):
            pytest.fail(text, pytrace=False)
        keep = not fresh
    finally:
        if keep and pool is not None:
            kept_pools[world] = pool
        elif pool is not None:
            pool.kill()
    if reports[0].kind == "skipped":
        pytest.skip(reports[0].text)


def close_pools() -> None:
    """Kill every kept rank; called when pytest's session ends."""
    while kept_pools:
        kept_pools.popitem()[1].kill()


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in a body."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def ranks(
    world: int, *, fresh: bool = False, timeout_s: float = 60.0, dies: Collection[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on `world` ranks.

    fresh: in a new pool that is discarded afterwards, for a body that leaves a rank in a bad state.
    dies: the ranks that must die in the body; their death is not a failure. Implies fresh.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if body.__qualname__ != body.__name__:
            raise TypeError(
                f"@ranks runs functions that a rank can import by name; {body.__qualname__} is not at the top"
            )

        @functools.wraps(body)
        def on_ranks(**parameters: Any) -> None:
            try:
                payload = pickle.dumps((parameters, warning_filters()))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                names = ", ".join(parameters)
                raise TypeError(f"the ranks are sent {names}; one of them cannot be pickled: {error}") from error
            file = str(Path(body.__code__.co_filename).resolve())
            task = Task(file=file, module=body.__module__, function=body.__name__, payload=payload)
            run_on_ranks(task, world, fresh=fresh or bool(dies), timeout_s=timeout_s, dies=dies)

        on_ranks.body = body  # type: ignore[attr-defined]
        return pytest.mark.ranks(pytest.mark.timeout(START_TIMEOUT_S + timeout_s)(on_ranks))

    return decorate
