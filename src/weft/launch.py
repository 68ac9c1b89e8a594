"""Start local ranks through torch's elastic agent, which also starts them again when one dies.

The agent watches its ranks; when one is killed or fails, it stops the others and starts all of them anew, and they go
on from the last checkpoint. Mistakes of the user (`WeftError`) are not worth a restart: such a rank ends quietly and
leaves its problems in a folder the parent reads, so that they are printed once, not once a rank.

Ranks are forked from a server that has imported torch once, which starts them in a tenth of the time that spawning
takes. Several hosts are torchrun's business: inside torchrun nothing here is used.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from weft import errors
from weft.errors import LaunchError, WeftError

STOP_FILE = "stop"
_ERROR_FILE = "error.json"
_PEER_ERROR_WAIT_S = 2.0
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
    file `stop` in it says that the user asked to stop. Ctrl-C makes that file instead of killing anybody; a second one
    ends the ranks at once.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for chatty in ("torch.distributed.elastic", "torch.multiprocessing"):  # what they report is said better below
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["weft.training.loop", "weft.launch"])
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
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        previous = signal.signal(signal.SIGINT, _make_interrupt(folder))
        try:
            results = elastic_launch(config, _enter)(function, str(folder), arguments)
        except ChildFailedError as error:
            raise _left_behind(folder) or LaunchError(_describe(error, max_restarts)) from None
        finally:
            signal.signal(signal.SIGINT, previous)
        if mistake := _left_behind(folder):
            raise mistake
    return [results[rank] for rank in sorted(results)]


def _enter(function: Callable[..., Any], folder_name: str, arguments: dict[str, Any]) -> Any:
    """What a rank runs. A user's mistake ends it quietly; anything else is the agent's to see."""
    folder, attempt = Path(folder_name), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent's file speaks for it
    _share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        return function(folder=folder, attempt=attempt, **arguments)
    except WeftError as error:
        _leave_behind(folder, error)
    except RuntimeError:
        deadline = time.monotonic() + _PEER_ERROR_WAIT_S
        while not (folder / _ERROR_FILE).exists():
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return None


def _share_cores(num_ranks: int) -> None:
    """Ranks on one host divide its cores; left alone, each would start a thread for every one of them."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // num_ranks))


def _make_interrupt(folder: Path) -> Callable[[int, FrameType | None], None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop = folder / STOP_FILE
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step; Ctrl-C again to end at once", file=sys.stderr, flush=True)

    return interrupt


def _leave_behind(folder: Path, error: WeftError) -> None:
    temporary = folder / f".{os.getpid()}"
    temporary.write_text(json.dumps({"kind": type(error).__name__, "problems": error.problems}))
    temporary.rename(folder / _ERROR_FILE)


def _left_behind(folder: Path) -> WeftError | None:
    """The mistake a rank reported, if one did."""
    path = folder / _ERROR_FILE
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    kind: type[WeftError] = getattr(errors, found["kind"], WeftError)
    return kind(found["problems"])


def _describe(error: Any, max_restarts: int) -> list[str]:
    """Which rank failed and how, after all restarts were used up."""
    rank, failure = error.get_first_failure()
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    problems = [f"rank {rank} {how} and was started again {max_restarts} times in vain"]
    message = failure.message.get("message") if isinstance(failure.message, dict) else failure.message
    if message:
        problems.append(str(message).strip().splitlines()[-1])
    return problems
