"""Checkpoints when something is wrong: damage, other models, full disks. Nothing is half-read and nothing is lost."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults import MOMENTS, failing, refused, train, trainer_of
from oracle import SGD, data_plan, make_trainer, small_gpt
from ranks import ranks

from weft.checkpoint import load as checkpoint
from weft.checkpoint import snapshot
from weft.checkpoint.folders import all_checkpoints, prune
from weft.errors import CheckpointError
from weft.training.trainer import Trainer


def on_first(trainer: Trainer, action: Callable[[], Any]) -> None:
    """One rank touches the disk, and all go on when it is done."""
    if trainer.mesh.world.rank == 0:
        action()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def check_damage(folder: Path, num_ranks: int) -> None:
    writer = trainer_of(num_ranks)
    train(writer, 2)
    writer.save(folder / "whole")
    reader = trainer_of(num_ranks, seed=1)
    train(reader)
    kinds = set()
    for path in sorted((folder / "whole").iterdir()):
        kinds.add(path.name.split("-")[0])
        size = path.stat().st_size
        damages: dict[str, Callable[[Path], None]] = {
            "flipped first byte": lambda file: flip(file, 0, 0),
            "flipped byte in the middle": lambda file, size=size: flip(file, size // 2, 3),  # type: ignore[misc]
            "flipped last byte": lambda file, size=size: flip(file, size - 1, 6),  # type: ignore[misc]
            "cut short": lambda file, size=size: os.truncate(file, size - 1),  # type: ignore[misc]
            "empty": lambda file: os.truncate(file, 0),
            "too long": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
            "missing": lambda file: file.unlink(),
        }
        for damage, apply in damages.items():
            copy = folder / f"{path.name} {damage}"

            def prepare(copy: Path = copy, apply: Callable[[Path], None] = apply, name: str = path.name) -> None:
                shutil.copytree(folder / "whole", copy)
                apply(copy / name)

            on_first(reader, prepare)
            with refused(reader, path.name):
                reader.load(copy)
    assert kinds == {"checkpoint.json", "model", "model.safetensors.index.json", "optimizer", "rank"}
    reader.load(folder / "whole")
    assert train(reader) == train(writer)


def test_every_damage_to_every_file_is_found(tmp_path: Path) -> None:
    check_damage(tmp_path, 1)


@ranks(2)
def test_every_damage_to_every_file_is_found_by_all_of_two_ranks(tmp_path: Path) -> None:
    check_damage(tmp_path, 2)


@pytest.mark.long
@ranks(4)
def test_every_damage_to_every_file_is_found_by_all_of_four_ranks(tmp_path: Path) -> None:
    check_damage(tmp_path, 4)


def test_every_byte_of_the_index_counts(tmp_path: Path) -> None:
    trainer = trainer_of(1, num_layers=1)
    trainer.save(tmp_path / "saved")
    path = tmp_path / "saved" / "checkpoint.json"
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            checkpoint.read_index(tmp_path / "saved")
    path.write_bytes(content)
    assert checkpoint.read_index(tmp_path / "saved")["step"] == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b'{"format": 1}', b"\xff\xfe", b'"\\ud800"', b"7"])
def test_an_index_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "checkpoint.json").write_bytes(content)
    with refused(trainer := trainer_of(1), "is damaged"):
        trainer.load(tmp_path / "saved")


def test_another_format_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(1)
    for other in (1, 3):
        with mock.patch.object(snapshot, "FORMAT", other):
            trainer.save(tmp_path / "saved")
        with refused(trainer, f"format {other}, this weft reads 2; use the weft that wrote it"):
            trainer.load(tmp_path / "saved")


def test_something_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = trainer_of(1)
    for name in ("nowhere", "file", "."):
        with refused(trainer, "is not a checkpoint"):
            trainer.load(tmp_path / name)


@ranks(2)
def test_one_rank_that_cannot_read_stops_all(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    trainer.save(tmp_path / "saved")
    real, rank = checkpoint.read_index, trainer.data_rank

    def read_index(directory: Path) -> dict[str, Any]:
        return real(directory if rank == 0 else tmp_path / "only here")

    with mock.patch.object(checkpoint, "read_index", read_index), refused(trainer, "only here", "No such file"):
        trainer.load(tmp_path / "saved")


@ranks(2)
def test_a_checkpoint_of_another_model_says_all_differences(tmp_path: Path) -> None:
    trainer_of(2, num_layers=1, positions="learned").save(tmp_path / "saved")
    other = trainer_of(2, num_layers=2, mlp_hidden=48)
    with refused(
        other,
        "is a checkpoint of another model",
        '"positions.weight" of the checkpoint is not in this model',
        '"blocks.1.mlp.up.weight" is missing from the checkpoint',
        "and 1 more",
    ):
        other.load(tmp_path / "saved")
    wider = make_trainer(small_gpt(num_layers=1, positions="learned", mlp_hidden=32), data_plan(2), optimizer=SGD)
    with refused(
        wider,
        '"blocks.0.mlp.up.weight" has shape [32, 16] here, [24, 16] in the checkpoint',
        '"blocks.0.mlp.down.weight" has shape [16, 32] here, [16, 24] in the checkpoint',
        "was written with optimizer AdamW, this run's is SGD",
    ):
        wider.load(tmp_path / "saved")
    same = make_trainer(small_gpt(num_layers=1, positions="learned"), data_plan(2), optimizer=SGD)
    with pytest.raises(CheckpointError, match="optimizer AdamW") as caught:
        same.load(tmp_path / "saved")
    assert "another model" not in str(caught.value)


@ranks(2)
def test_saving_over_a_checkpoint_replaces_it(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    for _ in range(3):
        train(trainer)
        trainer.save(tmp_path / "latest")
    assert checkpoint.read_index(tmp_path / "latest")["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@ranks(2)
def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    trainer = trainer_of(2)

    def make_things() -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter-1.tex").write_text("all my work")
        (tmp_path / "notes").write_text("more work")
        (tmp_path / "empty").mkdir()

    on_first(trainer, make_things)
    for name in ("thesis", "notes"):
        with refused(trainer, f"{tmp_path / name} exists and is not a checkpoint", "nothing was saved"):
            trainer.save(tmp_path / name)
    trainer.save(tmp_path / "empty")
    assert (tmp_path / "thesis" / "chapter-1.tex").read_text() == "all my work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes", "thesis"]


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "the-file")


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("where", [where for where in MOMENTS if where != "after the renames"])
def test_a_full_disk_on_one_rank_raises_on_all(tmp_path: Path, where: str) -> None:
    trainer = trainer_of(2)
    train(trainer)
    for name in ("step-1", "latest"):
        trainer.save(tmp_path / name)
    train(trainer)
    module, name, at_call = MOMENTS[where]
    culprit = 0 if where in ("index", "before the renames") else 1  # only rank 0 writes the index
    broken = failing(getattr(module, name), at_call=at_call, then=no_space)
    for target in ("latest", "step-2"):
        patch = mock.patch.object(module, name, broken if trainer.data_rank == culprit else getattr(module, name))
        with patch, refused(trainer, f"rank {culprit} cannot", "the-file: No space left", "nothing was saved"):
            trainer.save(tmp_path / target)
        broken = failing(getattr(module, name), at_call=at_call, then=no_space)
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert all_checkpoints(tmp_path) == [tmp_path / "step-1"]
    for name in ("step-1", "latest"):
        trainer_of(2).load(tmp_path / name)
        assert checkpoint.read_index(tmp_path / name)["step"] == 1
    trainer.save(tmp_path / "latest")
    assert checkpoint.read_index(tmp_path / "latest")["step"] == 2


@ranks(2)
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    on_first(trainer, lambda: (tmp_path / "file").write_text(""))
    with refused(trainer, "rank 0 cannot create", "Not a directory"):
        trainer.save(tmp_path / "file" / "step-1")


class Odd(torch.optim.SGD):
    """Keeps something beside tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = ["a", "b"]
        return super().step(closure)


@ranks(2)
def test_optimizer_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), data_plan(2), optimizer=functools.partial(Odd, lr=0.1))
    train(trainer)
    with pytest.raises(CheckpointError, match='Odd keeps a list "history" for "embedding.weight"'):
        trainer.save(tmp_path / "saved")
    torch.distributed.barrier()
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_sweeps_up(tmp_path: Path) -> None:
    trainer = trainer_of(1)
    for step in (2, 10, 9, 100):
        trainer.save(tmp_path / f"step-{step}")
    trainer.save(tmp_path / "best")
    (tmp_path / ".step-11.partial").mkdir()
    (tmp_path / "step-7").mkdir()
    shutil.copy(tmp_path / "step-9" / "rank-00000.safetensors", tmp_path / "step-7")  # deleted halfway
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "notes.txt").write_text("not a checkpoint")
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-2", "step-9", "step-10", "step-100"]
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-10", "step-100", "step-8"]
    prune(tmp_path, keep=5)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-10", "step-100"]
    trainer.load(tmp_path / "step-10")
