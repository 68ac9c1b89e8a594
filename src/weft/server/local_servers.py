"""Server processes on this host, started and ended by one process of the run.

They listen at sockets in a folder that nobody else can enter, or, where other hosts take part, at a TCP port for which
a peer needs the job's key. They end when the process that started them does, however it ends.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.errors import LaunchError
from weft.server.process import UNTIL_LEFT, ServerOptions
from weft.server.snapshot_file import remove_snapshots
from weft.server.snapshot_keeper import EVERY_S
from weft.server.workers.members import DEAD_AFTER_S

log = logging.getLogger("weft")
END_S = 5.0
COMES_BACK_S = 120.0
"""How long workers wait for a server that is started again: imports of torch on a busy machine, and its snapshot."""
MOST_RESTARTS = 3
"""Of each server, unless a person says otherwise."""
_LOOK_S = 0.2


class LocalServers:
    """All servers of a run, on this host."""

    def __init__(
        self,
        num_servers: int,
        *,
        most_frame_bytes: int,
        tcp_host: str | None = None,
        port: int = 0,
        key_file: Path | None = None,
        dead_after_s: float = DEAD_AFTER_S,
        num_threads: int = 1,
        job: str = "",
        num_started: int = 0,
        numbers: Sequence[int] | None = None,
        leader: str | None = None,
        described: Mapping[str, Any] | None = None,
        reports: bool = False,
        max_restarts: int = 0,
        snapshot_every_s: float = EVERY_S,
        saved: Path | None = None,
    ) -> None:
        """`tcp_host`: the address of this host at which workers on others reach them, with `key_file`; `port`: of the
        first of them, those after it take the ports behind; 0: free ones. `job`: the name of the run, for workers that
        join it; `num_started`: those that are started with the servers, and numbered from 0; `described`: what those
        who join must have alike. `numbers`: of the servers here, where others are elsewhere, and the first of all at
        `leader`. `reports`: they say how far they are (`listen_to`). `max_restarts`: how often each is started again
        when it dies, from a snapshot made at least so often. `saved`: where snapshots are, which stay there unless the
        run ends well; else in a folder that ends with it."""
        self._folder = Path(tempfile.mkdtemp(prefix="weft-servers-"))  # of mode 700
        self._saved = saved
        if saved is not None:
            remove_snapshots(saved)  # of a run that is over: these servers begin
        self._processes: list[subprocess.Popen[str]] = []
        self.addresses: tuple[str, ...] = ()
        """One per server: by TCP if others may connect, else of this host."""
        self._options: list[ServerOptions] = []
        self._max_restarts = max_restarts
        self._ended: set[int] = set()
        """Servers that are not started again."""
        self._closing = threading.Event()
        self._watching: threading.Thread | None = None
        self._hear: Callable[[int, str], None] | None = None
        self._listening: dict[int, threading.Thread] = {}
        """Of the last process of each server."""
        self._changing = threading.RLock()
        """Held while a server's process is another one than before."""
        self._ends_when_left = False
        found: list[str] = []
        numbers = range(num_servers) if numbers is None else numbers
        try:
            for place, number in enumerate(numbers):
                bind = f"tcp://{tcp_host}:{port and port + place}" if tcp_host else f"ipc://{self._folder}/{number}"
                options = ServerOptions(
                    number=number,
                    bind=(bind,),
                    key_file=None if key_file is None else str(key_file),
                    leader=leader or (found[0] if found else None),
                    most_frame_bytes=most_frame_bytes,
                    dead_after_s=dead_after_s,
                    num_threads=num_threads,
                    job=job,
                    num_servers=num_servers,
                    num_started=num_started,
                    described=dict(described or {}),
                    reports=reports,
                    folder=f"{saved or self._folder}/saved-{number}" if max_restarts or saved else None,
                    snapshot_every_s=snapshot_every_s,
                    comes_back_s=COMES_BACK_S if max_restarts else 0.0,
                )
                self._options.append(options)
                self._processes.append(_start(options))
                if not found:  # the others connect to it
                    found.append(_address(number, self._processes[0]))
            others = zip(numbers[1:], self._processes[1:], strict=True)
            self.addresses = (*found, *(_address(number, one) for number, one in others))
        except BaseException:
            self.close()
            raise
        if max_restarts:
            self._watching = threading.Thread(target=self._watch, name="weft-servers", daemon=True)
            self._watching.start()

    @property
    def pids(self) -> Sequence[int]:
        return [one.pid for one in self._processes]

    def listen_to(self, hear: Callable[[int, str], None]) -> None:
        """Call this, from threads, with the place of a server among those here and a line that it says; an empty one
        when it has ended, and is not started again."""
        with self._changing:
            self._hear = hear
            for place in range(len(self._processes)):
                self._listen_to(place)

    def close_when_left(self) -> None:
        """End them as soon as all workers have left. One that dies meanwhile is started again, and ends then."""
        with self._changing:
            self._ends_when_left = True
            for one in self._processes:
                _end_when_left(one)
        while any((code := one.poll()) is None or self._is_started_again(n, code) for n, one in self._numbered):
            self._closing.wait(_LOOK_S)
        self.close()

    def close(self) -> None:
        """End them."""
        self._stop_watching()
        for one in self._processes:
            if one.stdin is not None:
                one.stdin.close()
        for one in self._processes:
            try:
                one.wait(END_S)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
            if one.stdout is not None:
                one.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _numbered(self) -> Sequence[tuple[int, subprocess.Popen[str]]]:
        return list(enumerate(self._processes))

    def _is_started_again(self, place: int, code: int) -> bool:
        """A server that has ended with this code will be there again."""
        return code != 0 and self._watching is not None and place not in self._ended

    def _watch(self) -> None:
        """Start servers again that have died."""
        while not self._closing.wait(_LOOK_S):
            for place, process in self._numbered:
                if (code := process.poll()) and place not in self._ended:
                    with self._changing:
                        self._start_again(place, code)

    def _listen_to(self, place: int) -> None:
        """Hear what the process says that is this server now."""
        process, hear = self._processes[place], self._hear
        assert hear is not None

        def listen() -> None:
            _listen(place, process, hear)
            if self._watching is None:
                hear(place, "")

        self._listening[place] = threading.Thread(target=listen, name="weft-servers", daemon=True)
        self._listening[place].start()

    def _start_again(self, place: int, code: int) -> None:
        """At the address at which it was. Its own errors would come again."""
        if place in self._listening:
            self._listening[place].join()  # what it has said is heard first
        options, how = self._options[place], how_it_ended(code)
        if code > 0 or options.attempt == self._max_restarts:
            self._ended.add(place)
            log.error("server %d %s, and is not started again; see its output", options.number, how)
            if self._hear is not None:
                self._hear(place, "")
            return
        options = replace(options, attempt=options.attempt + 1, bind=(self.addresses[place],))
        log.warning(
            "server %d %s; it is started again from its last snapshot (restart %d of %d)",
            options.number,
            how,
            options.attempt,
            self._max_restarts,
        )
        _close_pipes(self._processes[place])
        self._options[place], self._processes[place] = options, _start(options)
        if self._hear is not None:
            self._listen_to(place)
        if self._ends_when_left:
            _end_when_left(self._processes[place])

    def _stop_watching(self) -> None:
        self._closing.set()
        if self._watching is not None:
            self._watching.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self._saved is not None:
            remove_snapshots(self._saved)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _start(options: ServerOptions) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weft.server.process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which whoever waits for its address sees
        process.stdin.write(json.dumps(asdict(options)) + "\n")
        process.stdin.flush()
    return process


def _end_when_left(process: subprocess.Popen[str]) -> None:
    """Tell a server to end as soon as all workers have left."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(UNTIL_LEFT)
            process.stdin.flush()


def _address(number: int, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LaunchError(f"server {number} ended with code {process.wait()} before it listened; see its error above")
    said = json.loads(line)
    if isinstance(said, dict):
        raise LaunchError(said["problems"])
    found: str = said[0]
    return found


def _listen(place: int, process: subprocess.Popen[str], hear: Callable[[int, str], None]) -> None:
    assert process.stdout is not None
    with suppress(ValueError):  # closed meanwhile
        for line in process.stdout:
            if not line.startswith("["):  # where it listens, which one that was started again says, too
                hear(place, line)
