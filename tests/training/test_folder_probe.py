"""A run's folder is tried before the first step, by all ranks, and refused with the same words on all of them."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import MLP, data_plan, make_trainer
from ranks import gathered, ranks

from weft.errors import JobError
from weft.training.run import folder_probe
from weft.training.run.folder_probe import Room, require_usable, room_for
from weft.training.run.job import Steps
from weft.training.setup.probe_optimizer import num_states

ROOM = Room(num_checkpoints=2, values_per_parameter=3)


def refusal(directory: Path, room: Room = ROOM) -> str | None:
    try:
        require_usable(directory, make_trainer(MLP(), data_plan(2)), room)
    except JobError as error:
        return str(error)
    return None


@ranks(2)
def test_a_folder_that_all_ranks_see_is_left_as_it_was(tmp_path: Path) -> None:
    assert refusal(tmp_path / "new" / "run") is None
    assert not list((tmp_path / "new" / "run").iterdir())


@ranks(2)
def test_a_folder_of_each_host_is_refused_by_all(tmp_path: Path) -> None:
    rank = make_trainer(MLP(), data_plan(2)).mesh.world.rank
    with mock.patch.object(folder_probe, "_SECONDS_UNTIL_SEEN", 0.1):
        told = refusal(tmp_path / f"of rank {rank}")
    assert len(set(gathered(told))) == 1 and str(told).startswith("rank 1 on ")
    assert "does not show the file that rank 0 wrote there; give a folder that all hosts share" in str(told)


def test_a_folder_is_waited_for_that_appears_late_with_its_parents(tmp_path: Path) -> None:
    """As on NFS, which may show none of them at first."""
    late = tmp_path / "runs" / "of today" / "first" / folder_probe._NAME
    maker = threading.Timer(0.3, folder_probe._make, [late, "token"])
    maker.start()
    folder_probe._read_and_write(late, "token", 1)
    maker.join()
    assert list(late.parent.iterdir()) == [late]


@ranks(2)
@pytest.mark.parametrize("blocked", ["rank 0", "rank 1"])
def test_a_folder_that_cannot_be_written_is_refused_by_all(blocked: str, tmp_path: Path) -> None:
    write = Path.write_text

    def full(path: Path, *args: Any) -> int:
        if path.name.endswith("-1") if blocked == "rank 1" else not path.name.endswith("-1"):
            raise OSError(28, "No space left on device", str(path))
        return write(path, *args)

    with mock.patch.object(Path, "write_text", full):
        told = refusal(tmp_path)
    assert len(set(gathered(told))) == 1 and "cannot write to" in str(told) and "No space left" in str(told)


@ranks(2)
def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with mock.patch.object(shutil, "disk_usage", lambda _: mock.Mock(free=1000)):
        told = refusal(tmp_path)
    assert len(set(gathered(told))) == 1
    assert "has 1000 B free; 2 checkpoints of about 1.9 KiB need 3.9 KiB" in str(told)  # 83 parameters of float64


def test_the_room_that_a_run_needs() -> None:
    adamw = partial(torch.optim.AdamW, lr=0.1)
    assert [num_states(make) for make in (adamw, partial(torch.optim.SGD, lr=0.1))] == [2, 0]
    assert num_states(partial(torch.optim.SGD, lr=0.1, momentum=0.9)) == 1
    assert room_for(Steps(total=100, save_every=10, keep=3), adamw, there=0) == Room(
        num_checkpoints=4, values_per_parameter=3
    )
    assert room_for(Steps(total=100, save_every=10, keep=3), adamw, there=3).num_checkpoints == 1
    assert room_for(Steps(total=100, save_every=0), adamw, there=0).num_checkpoints == 1
