"""The parts of a run with parameter servers that are started by themselves: `--role server` and `--role worker`.

Which flags go with which role is decided here, all mistakes at once, before anything is started.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.terminal import SECONDS_BETWEEN_LINES, say
from weft.launch import is_launched, launch
from weft.plan.partition.one_worker import is_served, one_worker
from weft.plan.plan import ALL, Plan
from weft.server.listening import key_missing

if TYPE_CHECKING:
    from weft.cli.which_run import Run
    from weft.launch_servers import ServersHere
    from weft.server.status import Status

KEY_FILE = "job.key"
"""Of the servers' run, in its folder, unless --key says where."""


class Role(StrEnum):
    """What one command starts of a run with servers."""

    SERVER = "server"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFlags:
    """What the command line says of servers and workers."""

    role: Role | None
    listen: str | None
    join: str | None
    key: Path | None
    servers: str | None
    """Numbers of the servers that are started here, with commas."""

    @property
    def environment(self) -> dict[str, str]:
        """What `weft.parallelize` reads of it, in every process of a worker (`server/worker_mesh.py`)."""
        from weft.server.worker_mesh import JOIN, KEY, LISTEN

        given = {JOIN: self.join, KEY: self.key, LISTEN: self.listen}
        return {name: str(value) for name, value in given.items() if value is not None}

    def problems(self, plan: Plan | None, *, ranks: int | None, replicas_in_process: bool) -> list[str]:
        """What is wrong with these flags for this plan, which is None if it could not be read, and beside others."""
        given = {"--listen": self.listen, "--join": self.join, "--key": self.key, "--servers": self.servers}
        named = [name for name, value in given.items() if value is not None]
        if plan is not None and not is_served(plan) and (self.role or named):
            flags = ", ".join([f"--role {self.role.value}"] if self.role else named)
            return [f'{flags} has no effect without [data] sync = "server" in the plan; set it, or leave {flags} out']
        found = list(self._problems_of_role(named))
        if self.role and replicas_in_process:
            found.append(f"--replicas-in-process starts no servers; leave --role {self.role.value} out")
        if self.role == Role.SERVER and ranks is not None:
            found.append("--role server starts no ranks; leave --ranks out")
        if plan is not None and self.role and plan.axes.data == ALL:
            found.append(
                '[axes] data = "all" says how many workers a run begins with, and those that join it cannot be counted '
                "before; give the number"
            )
        elif plan is not None and self.role == Role.WORKER and ranks not in (None, one_worker(plan).axes.num_ranks):
            found.append(
                f"a worker of this plan has {one_worker(plan).axes.num_ranks} ranks, not {ranks}; leave --ranks out"
            )
        if plan is not None and self.role == Role.SERVER and not found:
            found += self._problems_of_servers(plan.server.shards)
        return found

    def _problems_of_role(self, named: Sequence[str]) -> Sequence[str]:
        if self.role is None and is_launched() and self.listen and not self.key:
            return [key_missing(self.listen)]
        if self.key and not (self.listen or self.join or is_launched()):
            return ["--key has no effect without --listen, for nobody reaches servers from other hosts; leave it out"]
        if self.role is None:
            left = [name for name in named if name in ("--join", "--servers")]
            roles = {"--join": "worker", "--servers": "server"}
            return [f"{name} goes with --role {roles[name]}; add that, or leave {name} out" for name in left]
        if self.role == Role.WORKER:
            found = [f"{name} goes with --role server; leave it out" for name in named if name in _OF_SERVERS]
            missing = "--role worker joins a run; give the address of its first server with --join"
            return found if self.join else [*found, missing]
        if is_launched():
            return ["--role server starts its processes itself; start it without torchrun"]
        return []

    def _problems_of_servers(self, num_servers: int) -> list[str]:
        numbers = self._numbers(num_servers)
        if numbers is None:
            return [
                f"--servers {self.servers} names no servers of [server] shards = {num_servers}; give numbers from 0 to "
                f"{num_servers - 1}, each once, with commas"
            ]
        if 0 in numbers and self.join:
            return [
                "--join with --role server is the address of server 0, which is started here; leave --join out, or "
                "name the others with --servers"
            ]
        if 0 not in numbers and not self.join:
            return [f"--servers {self.servers} is led by server 0, which is elsewhere; give its address with --join"]
        return []

    def _numbers(self, num_servers: int) -> tuple[int, ...] | None:
        if self.servers is None:
            return tuple(range(num_servers))
        parts = [part.strip() for part in self.servers.split(",")]
        numbers = sorted({int(part) for part in parts if part.isdecimal()})
        is_right = len(numbers) == len(parts) and numbers[-1] < num_servers
        return tuple(numbers) if is_right else None

    def servers_here(self, plan: Plan, directory: Path) -> ServersHere:
        """The servers that are started here."""
        from weft.launch_servers import ServersHere

        numbers = self._numbers(plan.server.shards)
        assert numbers is not None
        key = self.key or (directory / KEY_FILE if self.listen or self.join else None)
        return ServersHere(
            numbers=numbers,
            listen=self.listen,
            key_file=key,
            leader=self.join,
            num_elsewhere=plan.server.shards - len(numbers),
        )


_OF_SERVERS = ("--listen", "--servers")


def serve(run: Run, plan: Plan, flags: RoleFlags, *, joining: Sequence[str], max_restarts: int) -> None:
    """Start the servers of a job, say how workers join them, and how far they are. `joining`: arguments of the command
    by which a worker joins."""
    from weft.launch_servers import launch_servers
    from weft.training.run.same_job import shared_facts

    here = flags.servers_here(plan, run.directory)
    seen = ServerProgress(num_workers=int(plan.axes.data), num_steps=run.job.steps.total)
    try:
        launch_servers(
            plan,
            here,
            seed=run.job.steps.seed,
            max_restarts=max_restarts,
            described=shared_facts(run.job),
            on_start=lambda addresses: seen.started(here, addresses, joining),
            on_status=seen.hear,
        )
    except KeyboardInterrupt:
        seen.interrupted()
        raise typer.Exit(130) from None
    seen.finished()


def train_served(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    run: Run,
    plan: Plan,
    flags: RoleFlags,
    *,
    joining: Sequence[str],
    max_restarts: int,
) -> list[Any]:
    """Run a function on the ranks of one more worker of a run, or of all workers and with them their servers; returns
    its results."""
    from weft.checkpoint.server_snapshots import SERVERS, save_servers
    from weft.launch_workers import launch_workers
    from weft.server.listening import listen_at
    from weft.server.protocol.keys import key_for
    from weft.server.worker_mesh import KEY
    from weft.training.run.loop import CHECKPOINTS
    from weft.training.run.same_job import shared_facts

    if flags.role == Role.WORKER:
        assert flags.join is not None
        key_for(flags.join, None if flags.key is None else str(flags.key))  # no rank is needed to see that it is bad
        return launch(function, arguments, num_ranks=one_worker(plan).axes.num_ranks, max_restarts=max_restarts)
    here = flags.servers_here(plan, run.directory)
    if here.key_file is not None:
        arguments["environment"][KEY] = str(here.key_file)

    def say_how_to_join(addresses: Sequence[str]) -> None:
        print(f"one more worker joins with\n  {join_command(addresses[0], here.key_file, joining)}", flush=True)

    if run.resumes:
        save_servers(run.directory, run.directory / CHECKPOINTS)
    return launch_workers(
        function,
        arguments,
        plan=plan,
        seed=run.job.steps.seed,
        max_restarts=max_restarts,
        described=shared_facts(run.job),
        listen=listen_at(here.listen, here.key_file),
        on_start=say_how_to_join,
        saved=run.directory / SERVERS,
    )


def join_command(address: str, key_file: Path | None, arguments: Sequence[str]) -> str:
    """The command by which one more worker joins a run."""
    key = [] if key_file is None or not address.startswith("tcp://") else ["--key", str(key_file)]
    return shlex.join(["weft", "train", *arguments, "--role", "worker", "--join", address, *key])


class ServerProgress:
    """Says on the terminal how far servers are."""

    def __init__(self, *, num_workers: int, num_steps: int) -> None:
        from rich.console import Console

        self._console = Console()
        self._num_workers, self._num_steps = num_workers, num_steps
        self._last: Status | None = None
        self._said_s = -SECONDS_BETWEEN_LINES
        self._spinner = self._console.status("", spinner="line") if self._console.is_terminal else None

    def started(self, here: ServersHere, addresses: Sequence[str], joining: Sequence[str]) -> None:
        """Servers listen."""
        for number, address in zip(here.numbers, addresses, strict=True):
            say(self._console, f"server {number} listens at {address}")
        if here.leader is None:
            say(self._console, f"a worker of {self._num_workers} joins with")
            say(self._console, f"  {join_command(addresses[0], here.key_file, joining)}")
            if here.listen is not None:
                say(self._console, f"for other hosts, copy the key {here.key_file} there first (readable by you alone)")
            if (missing := here.num_elsewhere) > 0:
                say(self._console, f"{missing} more servers are to be started with --join {addresses[0]}")
        if self._spinner is not None:
            self._spinner.start()

    def hear(self, status: Status) -> None:
        """Who has come and gone is said at once, how far the run is every few seconds, or all the time on a
        terminal."""
        before = self._last.workers if self._last is not None else ()
        come, gone = set(status.workers) - set(before), set(before) - set(status.workers)
        words = [f"worker {one} has joined" for one in sorted(come)] + [f"worker {one} is gone" for one in sorted(gone)]
        is_running = status.has_begun and not status.is_over
        text = f"step {status.step}/{self._num_steps}, {status.in_words}" if is_running else status.in_words
        has_begun = status.has_begun and not (self._last is not None and self._last.has_begun)
        now_s, self._last = time.monotonic(), status
        is_due = now_s - self._said_s >= SECONDS_BETWEEN_LINES
        if self._spinner is not None:
            self._spinner.update(text)
            if words:
                say(self._console, "; ".join(words))
        elif words or has_begun or is_due:
            self._said_s = now_s
            say(self._console, "; ".join([*words, text]))

    def finished(self) -> None:
        """All workers have ended."""
        self._end_line()
        status = self._last
        if status is not None and status.version:
            say(self._console, f"done after step {status.step} and {status.version} updates")
        else:
            say(self._console, "done, and no update was made")

    def interrupted(self) -> None:
        """A person, or a scheduler, ends the servers."""
        from weft.server.local_servers import COMES_BACK_S

        self._end_line()
        there = len(self._last.workers) if self._last is not None else 0
        workers = f"{there} worker{'s' if there > 1 else ''}"
        left = f"; {workers} will find that nobody answers, and end within {COMES_BACK_S:g} s" if there else ""
        say(self._console, f"servers are ended{left}")

    def _end_line(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
