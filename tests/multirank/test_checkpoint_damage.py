"""Checkpoints when something goes wrong: damage, other models, full disks, kills. The last whole one always loads."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import ADAMW, SGD, cut_evenly, data_plan, make_trainer, small_gpt, token_batch
from ranks import ranks
from torch import Tensor

from weft.errors import CheckpointError
from weft.training import checkpoint, checkpoint_folders
from weft.training.checkpoint_folders import all_checkpoints, prune
from weft.training.trainer import Trainer


def trainer_of(num_ranks: int, *, seed: int = 0, **changes: Any) -> Trainer:
    torch.manual_seed(seed)
    return make_trainer(small_gpt(**changes), data_plan(num_ranks), optimizer=ADAMW)


def train(trainer: Trainer, num_steps: int = 1) -> float:
    for _ in range(num_steps):
        batch = token_batch(8, seed=trainer.steps_done)
        loss = trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
    return float(loss)


def state(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {name: p.detach() for name, p in trainer.named_model.named_parameters()}
    for number, values in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"{number} {key}": value for key, value in values.items()}
    tensors |= {"rng": torch.get_rng_state(), "step": torch.tensor([trainer.steps_done, trainer.data_position])}
    return {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def refused(trainer: Trainer, *words: str) -> Iterator[None]:
    """The body raises a CheckpointError with these words and leaves the trainer exactly as it was."""
    before = state(trainer)
    with pytest.raises(CheckpointError) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    after = state(trainer)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


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
    with mock.patch.object(checkpoint, "FORMAT", 2):
        trainer.save(tmp_path / "saved")
    with refused(trainer, "format 2", "reads 1"):
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
        "and 1 more difference",
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


def failing(function: Callable[..., Any], *, at_call: int, then: Callable[[], None]) -> Callable[..., Any]:
    """A function that does something else when it is called for the n-th time, before or instead of its work."""
    calls = 0

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            then()
        return function(*arguments, **settings)

    return wrapped


MOMENTS = {
    "model file": (checkpoint, "write_tensors", 1),
    "optimizer file": (checkpoint, "write_tensors", 2),
    "rank file": (checkpoint, "write_tensors", 3),
    "index": (checkpoint, "_write_index", 1),
    "before the renames": (checkpoint_folders, "_sync_folder", 1),
    "after the renames": (checkpoint_folders, "_sync_folder", 2),
}
"""Where a save can be cut: what is patched, and at which of its calls."""


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "the-file")


@ranks(2)
@pytest.mark.parametrize("where", ["model file", "optimizer file", "rank file", "index", "before the renames"])
def test_a_full_disk_on_one_rank_raises_on_all(tmp_path: Path, where: str) -> None:
    trainer = trainer_of(2)
    train(trainer)
    for name in ("step-1", "latest"):
        trainer.save(tmp_path / name)
    train(trainer)
    module, name, at_call = MOMENTS[where]
    culprit = 1 if name == "write_tensors" else 0  # only rank 0 writes the index
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


@pytest.mark.parametrize("where", MOMENTS)
def test_kill_during_a_save_leaves_the_last_one_whole(tmp_path: Path, where: str) -> None:
    save_and_kill_the_first(folder=tmp_path, where=where)
    load_what_is_left(folder=tmp_path, expected=2 if where == "after the renames" else 1)


@pytest.mark.parametrize("where", ["model file", "rank file"])
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
    with mock.patch.object(checkpoint, "write_tensors", side_effect=OSError(errno.EIO, "I/O error")):
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


@pytest.mark.long
@pytest.mark.parametrize("number", range(40))
def test_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path, number: int) -> None:
    folder, done = tmp_path / "run", tmp_path / "done"
    done.write_text("1")
    save_until_the_first_is_killed(folder=folder, after_s=random.Random(number).uniform(0.0, 0.3))
    load_latest(folder=folder, at_least=json.loads(done.read_text()))
