"""Stopping between two steps: whichever rank is asked, all stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from meshes import mesh_with
from oracle import data_plan
from ranks import ranks

from weft.mesh import Mesh
from weft.training.run import stop as stop_module
from weft.training.run.stop import StopRequest


def mesh_of(num_ranks: int) -> Mesh:
    return mesh_with(data_plan(num_ranks), ("world", "control"))


def steps_until_stop(stop: StopRequest, *, most: int = 500, step_s: float = 0.0) -> int | None:
    """After how many steps ranks agree to stop; None if never."""
    for step in range(1, most + 1):
        time.sleep(step_s)
        if stop.agreed():
            return step
    return None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest(mesh_of(1)) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert steps_until_stop(stop, most=2000) is not None
    assert signal.getsignal(number) is before


def test_without_a_request_nothing_stops() -> None:
    with StopRequest(mesh_of(1)) as stop:
        assert steps_until_stop(stop) is None


def test_a_second_ctrl_c_is_not_held_back() -> None:
    with mock.patch.object(stop_module, "_SECONDS_OF_ONE_CTRL_C", 0.0), StopRequest(mesh_of(1)):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)  # where Python runs the handler at the latest


def test_a_ctrl_c_that_comes_twice_at_once_is_one() -> None:
    """torchrun sends its ranks what the terminal has sent them already."""
    with StopRequest(mesh_of(1)) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
        assert stop.agreed()


def test_in_another_thread_only_the_file_counts(tmp_path: Path) -> None:
    """Python lets only the main thread handle signals."""
    seen = []

    def run() -> None:
        with StopRequest(mesh_of(1), file=tmp_path / "stop") as stop:
            (tmp_path / "stop").touch()
            seen.append(stop.agreed())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("way", ["signal", "file"])
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, asked: int, way: str) -> None:
    mesh = mesh_of(2)
    mine = mesh.world.rank == asked
    with StopRequest(mesh, file=tmp_path / "stop" if mine else None) as stop:
        assert steps_until_stop(stop, most=5, step_s=0.002 * (1 + mesh.world.rank)) is None
        if mine and way == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif mine:
            (tmp_path / "stop").touch()
        # a rank that stopped earlier than the other would leave it alone in an exchange, and this would not end
        assert steps_until_stop(stop, step_s=0.002) is not None


def test_looking_costs_an_exchange_twice_a_second() -> None:
    clock_s, looks = 0.0, 0

    def count(*_: object, **__: object) -> None:
        nonlocal looks
        looks += 1

    clock = mock.patch.object(stop_module.time, "perf_counter", lambda: clock_s)
    with clock, mock.patch.object(stop_module, "all_reduce", count), StopRequest(mesh_of(1)) as stop:
        for _ in range(1000):
            clock_s += 0.01
            assert not stop.agreed()
    assert 20 <= looks <= 22
