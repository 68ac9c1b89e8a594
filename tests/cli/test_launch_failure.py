"""A rank that fails under `weft train` ends the others, which wait for it as for a GPU: deaf, and to SIGTERM too."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import finish, start
from ranks import start_forkserver

from weft.errors import DataError, LaunchError
from weft.launch import launch
from weft.world import join_world

FOREVER_S = 600.0
LATE_S = 20.0
"""Seconds after which a rank says that nobody ended it; the launcher itself kills it after 30."""


def fail_on_one(*, folder: Path, attempt: int, kind: str, late: Path) -> None:
    """A rank's work: rank 1 fails, rank 0 waits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `StopRequest` does in a run
    world = join_world("cpu", timeout_s=3.0 if kind == "stuck" else 60.0)
    dist.barrier()
    if world.rank == 0:
        threading.Timer(LATE_S, late.touch).start()
    if world.rank == 1 and kind == "mistake":
        raise DataError("planted mistake")
    if world.rank == 1 and kind == "error":
        raise ValueError("planted error")
    if world.rank == 0 and kind == "stuck":
        dist.all_reduce(torch.ones(4))
    time.sleep(FOREVER_S)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        pytest.param("mistake", DataError, "^planted mistake$", marks=pytest.mark.long),
        ("error", LaunchError, "^rank 1 ended with code 1: ValueError: planted error"),
        pytest.param(
            "stuck",
            LaunchError,
            "^rank 0 ended with code 1: .*rank 0 has waited .* in all-reduce .*ranks 0, 1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_first_failure_ends_all_ranks_and_is_what_the_parent_raises(
    kind: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    start_forkserver()
    with pytest.raises(error, match=message):
        launch(fail_on_one, {"kind": kind, "late": tmp_path / "late"}, num_ranks=2, max_restarts=0)
    assert not (tmp_path / "late").exists()


SCRIPT = """
import signal, sys, threading, time
from pathlib import Path
from weft.world import join_world

signal.signal(signal.SIGTERM, signal.SIG_IGN)
world = join_world("cpu")
if world.rank == 1:
    raise ValueError("planted")
threading.Timer(20.0, Path("late").touch).start()
time.sleep(600)
"""


@pytest.mark.long
def test_a_script_under_torchrun_ends_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start("--nproc-per-node", "2", "script.py", folder=tmp_path, module="torch.distributed.run")
    outcome = finish(process)
    assert outcome.code == 1 and outcome.stderr.count("ValueError: planted") == 1
    assert not (tmp_path / "late").exists()
