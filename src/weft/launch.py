"""Start local ranks through torch's elastic agent, which restarts all of them when one dies.

They then continue from the last checkpoint, unless the failure is one that would come again (`restarts.py`). A user's
mistake (`WeftError`) is such: its rank writes the problems to a folder and ends, and the parent raises them once.

Ranks are forked from a server that has imported torch once, so that a restart does not wait for imports. Ranks on
several hosts are started by torchrun instead.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from weft import errors
from weft.errors import LaunchError, WeftError
from weft.hosts import num_cores
from weft.restarts import RankFailure, Restarts, first_failure

STOP_FILE = "stop"
_ERROR_FILE = "error.json"
PARENT_FILE = "parent"
_REPORT_WAIT_S = 2.0


def is_launched() -> bool:
    """True if a launcher (torchrun, or this file) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_num_ranks() -> int:
    """Ranks to start by default: one per GPU, or two that share a CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(
    function: Callable[..., Any], arguments: dict[str, Any], *, num_ranks: int, max_restarts: int = 3
) -> list[Any]:
    """Run a function on local ranks; returns its results in the order of ranks.

    It is called as function(folder=..., attempt=..., **arguments). `folder` is shared by the ranks of this launch. The
    first Ctrl-C or SIGTERM only makes a file `stop` in it, which asks them to stop; a second one ends them at once.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for chatty in ("torch.distributed.elastic", "torch.multiprocessing"):  # the errors below are clearer
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    start_server()
    with tempfile.TemporaryDirectory(prefix="weft-") as name, (Path(name) / PARENT_FILE).open("w") as parent:
        folder = Path(name)
        fcntl.flock(parent, fcntl.LOCK_EX)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            start_method="forkserver",
            signals_to_handle="SIGHUP,SIGQUIT",
            logs_specs=DefaultLogsSpecs(log_dir=name),
        )
        restarts = Restarts(max_restarts)
        try:
            with interruptible(folder), _deciding(restarts, folder):
                results = elastic_launch(config, enter)(function, str(folder), arguments)
        except ChildFailedError as error:
            failure = reported(folder) or _describe(first_failure(dict([error.get_first_failure()])), restarts)
            raise failure from failure.__cause__
        if mistake := reported(folder):
            raise mistake
    return [results[rank] for rank in sorted(results)]


@contextmanager
def _deciding(restarts: Restarts, folder: Path) -> Iterator[None]:
    """Context in which torch's agent asks us before it starts ranks again; by itself it knows only how often."""
    from torch.distributed.launcher import api

    module: Any = api
    original: Any = module.LocalElasticAgent

    class Agent(original):  # type: ignore[misc]
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.failures:
                reported = (folder / _ERROR_FILE).exists()
                if reported or not restarts.is_worth(first_failure(result.failures)):
                    self._remaining_restarts = 0
            return result

    module.LocalElasticAgent = Agent
    try:
        yield
    finally:
        module.LocalElasticAgent = original


def start_server() -> None:
    """Start the process that ranks are forked from, out of reach of Ctrl-C."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["weft.training.run.loop", "weft.launch"])
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which it inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def enter(function: Callable[..., Any], folder_name: str, arguments: dict[str, Any]) -> Any:
    """The main function of a rank. It reports a user's mistake to the parent, any other error to the agent."""
    import torch
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from weft.comm.failures import watch

    folder, attempt = Path(folder_name), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if (folder / _ERROR_FILE).exists():
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; ranks look for the file
    _end_with_parent(folder)
    if "OMP_NUM_THREADS" not in os.environ:  # by default each rank would start a thread per core of the host
        torch.set_num_threads(max(1, num_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    watch.leave_printing_to_parent()
    try:
        return function(folder=folder, attempt=attempt, **arguments)
    except WeftError as error:
        if watch.report(error):
            _report(folder, error)
        else:
            _wait_for_report(folder)
        _end(2)
    except Exception as error:
        if not watch.report(error):
            watch.end_after_peer()
        get_error_handler().record_exception(error)
        _end(1)


def _wait_for_report(folder: Path) -> None:
    """Let the rank that was first write its report: the parent looks for it as soon as any rank has ended."""
    deadline = time.monotonic() + _REPORT_WAIT_S
    while not (folder / _ERROR_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _end(code: int) -> NoReturn:
    """End this rank now. If it merely returned, its process would stay, with open connections, until all have; and an
    ordinary end would destroy communicators, which may wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent(folder: Path) -> None:
    """End this rank when its parent is killed: a resumed run would find it writing to its directory."""
    file = (folder / PARENT_FILE).open()

    def watch() -> None:
        fcntl.flock(file, fcntl.LOCK_SH)  # the parent holds it exclusively for as long as it lives
        os._exit(1)

    threading.Thread(target=watch, name="weft-parent", daemon=True).start()


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM ask the ranks to stop."""
    stop, others = folder / STOP_FILE, multiprocessing.active_children()

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if stop.exists():
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()  # the agent would give them half a minute
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step; Ctrl-C again to end at once", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class RankTraceback(Exception):
    """A rank's traceback: the cause of the error that the parent raises, shown only on request."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _report(folder: Path, error: WeftError) -> None:
    temporary = folder / f".{os.getpid()}"
    where = "".join(traceback.format_exception(error))
    temporary.write_text(json.dumps({"kind": type(error).__name__, "problems": error.problems, "traceback": where}))
    temporary.rename(folder / _ERROR_FILE)


def reported(folder: Path) -> WeftError | None:
    """The user's mistake that a rank reported, if one did."""
    path = folder / _ERROR_FILE
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    kind: type[WeftError] = getattr(errors, found["kind"], WeftError)
    mistake = kind(found["problems"])
    mistake.__cause__ = RankTraceback(found["traceback"])
    return mistake


def _describe(failure: RankFailure, restarts: Restarts) -> LaunchError:
    """The failure of a rank after all restarts that were worth it."""
    times = "once" if restarts.done == 1 else f"{restarts.done} times"
    again = f" and was started again {times} in vain" if restarts.done else ""
    if restarts.came_again:
        again += " (the same error came again, so there are no more restarts)"
    where = "" if failure.step is None else f" in step {failure.step}"
    if not failure.error:
        return LaunchError(f"rank {failure.rank} {failure.how}{where}{again}")
    described = LaunchError(
        f"rank {failure.rank} {failure.how}{where}{again}: {failure.error} (--traceback shows where)"
    )
    described.__cause__ = RankTraceback(failure.traceback)
    return described
