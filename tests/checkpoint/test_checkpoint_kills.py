"""kill -9 in the middle of a save, at every moment it has: the last whole checkpoint always loads."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from faults import MOMENTS, failing, refused, train, trainer_of
from ranks import ranks

from weft.checkpoint import save as saving
from weft.checkpoint.folders import all_checkpoints, prune
from weft.training.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def marked(trainer: Trainer, number: int) -> Trainer:
    """All weights and the step are this number, so that parts of two checkpoints cannot pass for one."""
    with torch.no_grad():
        for parameter in trainer.named_model.parameters():
            parameter.fill_(number)
    trainer.steps_done = number
    return trainer


def mark_of(trainer: Trainer) -> int:
    values = {float(value) for p in trainer.named_model.parameters() for value in p.detach().flatten()}
    assert values == {float(trainer.steps_done)}
    return trainer.steps_done


def save_and_die(folder: Path, where: str, victim: int) -> None:
    trainer = trainer_of(2)
    train(trainer)
    for name in ("step-1", "latest"):
        marked(trainer, 1).save(folder / name)
    module, name, at_call = MOMENTS[where]
    deadly = failing(getattr(module, name), at_call=at_call, then=die)
    with mock.patch.object(module, name, deadly if trainer.data_rank == victim else getattr(module, name)):
        with pytest.raises(RuntimeError, match="(?i)connection|peer|closed"):
            marked(trainer, 2).save(folder / "latest")


@ranks(2, dies=[0])
def save_and_kill_the_first(folder: Path, where: str) -> None:
    save_and_die(folder, where, 0)


@ranks(2, dies=[1])
def save_and_kill_the_second(folder: Path, where: str) -> None:
    save_and_die(folder, where, 1)


@ranks(2)
def load_what_is_left(folder: Path, expected: int) -> None:
    trainer = trainer_of(2)
    for name, step in (("latest", expected), ("step-1", 1)):
        trainer.load(folder / name)
        assert mark_of(trainer) == step
    marked(trainer, 7).save(folder / "latest")
    trainer.load(folder / "latest")
    assert mark_of(trainer) == 7
    torch.distributed.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-1"]


@pytest.mark.sampled(1, long=3)
@pytest.mark.parametrize("where", MOMENTS)
def test_kill_during_a_save_leaves_the_last_one_whole(tmp_path: Path, where: str) -> None:
    save_and_kill_the_first(folder=tmp_path, where=where)
    load_what_is_left(folder=tmp_path, expected=2 if where == "after the renames" else 1)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.parametrize("where", ["headers", "first tensor", "later tensor", "checksums"])
def test_kill_of_another_rank_during_a_save(tmp_path: Path, where: str) -> None:
    save_and_kill_the_second(folder=tmp_path, where=where)
    load_what_is_left(folder=tmp_path, expected=1)


@pytest.mark.parametrize("name", ["latest", "step-5"])
def test_kill_between_the_two_renames(tmp_path: Path, name: str) -> None:
    """The one moment in which neither the old nor the new checkpoint has its name."""
    trainer = marked(trainer_of(1), 1)
    trainer.save(tmp_path / name)

    class Killed(BaseException):
        pass

    rename = Path.rename

    def rename_or_die(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise Killed
        return rename(self, target)

    with mock.patch.object(Path, "rename", rename_or_die), pytest.raises(Killed):
        marked(trainer, 2).save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{name}.old", f".{name}.partial"]
    copies = [tmp_path.with_name(f"{tmp_path.name}-{use}") for use in ("load", "save", "prune")]
    for copy in copies:
        shutil.copytree(tmp_path, copy)
        assert all_checkpoints(copy) == ([copy / name] if name == "step-5" else [])
    trainer.load(copies[0] / name)
    assert mark_of(trainer) == 1
    with mock.patch.object(saving, "write_runs", side_effect=OSError(errno.EIO, "I/O error")):
        with refused(trainer, "I/O error"):
            trainer.save(copies[1] / name)
    trainer.load(copies[1] / name)
    if name == "step-5":
        prune(copies[2], keep=1)
        assert [path.name for path in copies[2].iterdir()] == ["step-5"]
        trainer.load(copies[2] / name)


def save_until_killed(folder: Path, after_s: float) -> None:
    trainer = trainer_of(2)
    marked(trainer, 1).save(folder / "latest")
    torch.distributed.barrier()
    if trainer.data_rank == 0:
        threading.Thread(target=lambda: (time.sleep(after_s), die()), daemon=True).start()
    with pytest.raises(RuntimeError, match="(?i)connection|peer|closed"):
        for number in range(2, 10_000):
            marked(trainer, number).save(folder / "latest")
            if trainer.data_rank == 1:
                (folder.parent / "done").write_text(json.dumps(number))


@ranks(2, dies=[0])
def save_until_the_first_is_killed(folder: Path, after_s: float) -> None:
    save_until_killed(folder, after_s)


@ranks(2)
def load_latest(folder: Path, at_least: int) -> None:
    trainer = trainer_of(2)
    trainer.load(folder / "latest")
    assert mark_of(trainer) >= at_least


@pytest.mark.sampled(long=5)
@pytest.mark.long
@pytest.mark.parametrize("number", range(16))
def test_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path, number: int) -> None:
    folder, done = tmp_path / "run", tmp_path / "done"
    done.write_text("1")
    save_until_the_first_is_killed(folder=folder, after_s=random.Random(number).uniform(0.0, 0.3))
    load_latest(folder=folder, at_least=json.loads(done.read_text()))
