"""Start local ranks through torch's elastic agent, which also starts them again when one dies.

The agent watches its ranks; when one is killed or fails, it stops the others and starts all of them anew, and they go
on from the last checkpoint. Mistakes of the user (`WeftError`) are not worth that: such a rank leaves its problems in a
folder and ends, ranks that are started again see them there and do nothing, and the parent prints them once.

Ranks are forked from a server that has imported torch once, so that a restart does not wait for imports.
Several hosts are torchrun's business: there `launch` is not called.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from weft import errors
from weft.errors import LaunchError, WeftError
from weft.hosts import num_cores

STOP_FILE = "stop"
_ERROR_FILE = "error.json"
_PARENT_FILE = "parent"
PEER_ERROR_WAIT_S = 2.0
"""How long a rank that lost its connection waits to see whether a peer left because of a user's mistake."""


def is_launched() -> bool:
    """Whether a launcher (torchrun, or this file) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_num_ranks() -> int:
    """Ranks to start where nobody says how many: one a GPU, or two that share a CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(
    function: Callable[..., Any], arguments: dict[str, Any], *, num_ranks: int, max_restarts: int = 3
) -> list[Any]:
    """Run a function on local ranks; returns what it returned on each, in order.

    It is called as function(folder=..., attempt=..., **arguments). `folder` is shared by the ranks of this launch; a
    file `stop` in it says that the user asked to stop. Ctrl-C and SIGTERM make that file instead of killing anybody; a
    second one ends the ranks at once.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for chatty in ("torch.distributed.elastic", "torch.multiprocessing"):  # what they report is said better below
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    _start_server()
    with tempfile.TemporaryDirectory(prefix="weft-") as name, (Path(name) / _PARENT_FILE).open("w") as parent:
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
        try:
            with _interruptible(folder):
                results = elastic_launch(config, _enter)(function, str(folder), arguments)
        except ChildFailedError as error:
            failure = _left_behind(folder) or _describe(error, max_restarts)
            raise failure from failure.__cause__
        if mistake := _left_behind(folder):
            raise mistake
    return [results[rank] for rank in sorted(results)]


def _start_server() -> None:
    """Start the process that ranks are forked from. Ctrl-C must not reach it in the middle of its imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["weft.training.run.loop", "weft.launch"])
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which it inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def _enter(function: Callable[..., Any], folder_name: str, arguments: dict[str, Any]) -> Any:
    """What a rank runs. A user's mistake is left for the parent; anything else is the agent's to see."""
    folder, attempt = Path(folder_name), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if (folder / _ERROR_FILE).exists():
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent's file speaks for it
    _end_with_parent(folder)
    _share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        return function(folder=folder, attempt=attempt, **arguments)
    except WeftError as error:
        _leave_behind(folder, error)
        _end()
    except RuntimeError:
        deadline = time.monotonic() + PEER_ERROR_WAIT_S
        while not (folder / _ERROR_FILE).exists():
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        _end()


def _end() -> NoReturn:
    """End this rank now. One that merely returned would stay, its connections open, until all of them have."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _end_with_parent(folder: Path) -> None:
    """Ranks whose parent was killed must not train on: a resumed run would meet them in its directory."""
    file = (folder / _PARENT_FILE).open()

    def watch() -> None:
        fcntl.flock(file, fcntl.LOCK_SH)  # the parent holds it exclusively for as long as it lives
        os._exit(1)

    threading.Thread(target=watch, name="weft-parent", daemon=True).start()


def _share_cores(num_ranks: int) -> None:
    """Ranks on one host divide its cores; left alone, each would start a thread for every one of them."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // num_ranks))


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the ranks to stop while this context is open."""
    interrupt = _make_interrupt(folder, others=multiprocessing.active_children())
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _make_interrupt(folder: Path, *, others: Collection[BaseProcess]) -> Callable[[int, FrameType | None], None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop = folder / STOP_FILE
        if stop.exists():
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()  # the agent would give them half a minute
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step; Ctrl-C again to end at once", file=sys.stderr, flush=True)

    return interrupt


class RankTraceback(Exception):
    """Where in a rank an error arose: the cause of the error that the parent raises, shown only if asked for."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _leave_behind(folder: Path, error: WeftError) -> None:
    temporary = folder / f".{os.getpid()}"
    where = "".join(traceback.format_exception(error))
    temporary.write_text(json.dumps({"kind": type(error).__name__, "problems": error.problems, "traceback": where}))
    temporary.rename(folder / _ERROR_FILE)


def _left_behind(folder: Path) -> WeftError | None:
    """The mistake a rank reported, if one did."""
    path = folder / _ERROR_FILE
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    kind: type[WeftError] = getattr(errors, found["kind"], WeftError)
    mistake = kind(found["problems"])
    mistake.__cause__ = RankTraceback(found["traceback"])
    return mistake


def _describe(error: Any, max_restarts: int) -> LaunchError:
    """Which rank failed and how, after all restarts were used up."""
    rank, failure = error.get_first_failure()
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    times = "once" if max_restarts == 1 else f"{max_restarts} times"
    again = f" and was started again {times} in vain" if max_restarts else ""
    if not isinstance(failure.message, dict):
        return LaunchError(f"rank {rank} {how}{again}")
    described = LaunchError(f"rank {rank} {how}{again}: {failure.message['message']} (--traceback shows where)")
    described.__cause__ = RankTraceback(failure.message["extraInfo"]["py_callstack"])
    return described
