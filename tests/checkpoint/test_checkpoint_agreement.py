"""Checkpoints where ranks or folders do not agree: nothing is mixed, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from by_hand import mixed
from faults import refused, train, trainer_of
from oracle import SGD, data_plan, make_trainer, small_gpt
from ranks import ranks
from safetensors.torch import load_file

from weft.checkpoint import folders as checkpoint_folders
from weft.checkpoint import save as saving
from weft.checkpoint.folders import INDEX, all_checkpoints, prune
from weft.errors import CheckpointError, JobError
from weft.training.data.datasets import TensorSamples
from weft.training.run import loop
from weft.training.run.job import default_job
from weft.training.trainer import Trainer


def run_of(trainer: Trainer, folder: Path) -> loop._Run:
    samples = TensorSamples(torch.zeros(64, 4), torch.zeros(64))
    prepared = mock.Mock(train_data=samples, held_out=None, optimizer=SGD)
    return loop._Run(default_job(), prepared, trainer, folder, mock.Mock())


# ---- ranks ----


@ranks(2)
def test_ranks_that_list_different_checkpoints_load_the_newest(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    run_of(trainer, tmp_path).open(resume=False)
    for _ in range(2):
        train(trainer)
        trainer.save(tmp_path / "checkpoints" / f"step-{trainer.steps_done}")
    after = train(trainer)
    for behind in (0, 1):
        again = trainer_of(2, seed=1)
        listed = all_checkpoints(tmp_path / "checkpoints")
        late = listed[:-1] if again.mesh.world.rank == behind else listed
        with mock.patch.object(loop, "all_checkpoints", lambda folder, late=late: late):
            run_of(again, tmp_path).open(resume=True)
        assert again.steps_done == 2 and train(again) == after
    with pytest.raises(JobError, match="holds a run already"):
        run_of(trainer, tmp_path).open(resume=False)


@ranks(2)
def test_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    for name in "ab":
        train(trainer)
        trainer.save(tmp_path / name)
    with refused(trainer, "is not the same checkpoint on all ranks"):
        trainer.load(tmp_path / "ab"[trainer.mesh.world.rank])


@ranks(2)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no room")])
def test_a_rank_that_cannot_read_is_known_to_all(tmp_path: Path, error: Exception) -> None:
    trainer = trainer_of(2)
    trainer.save(tmp_path / "a")
    broken = mock.patch("weft.checkpoint.portable.Portable._read", mock.Mock(side_effect=error))
    with broken if trainer.mesh.world.rank == 1 else nullcontext():
        with pytest.raises(CheckpointError, match="rank 1 cannot read"):
            trainer.load(tmp_path / "a")


@ranks(2)
def test_after_a_save_that_failed_the_next_one_is_made(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    run = run_of(trainer, tmp_path)
    run.open(resume=False)
    train(trainer)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch.object(saving, "write_runs", full if run.is_first else saving.write_runs):
        run._save(wait=False)
        assert trainer.saving._thread is not None
        trainer.saving._thread.join()
        train(trainer)
    assert run._save(wait=True).name == "step-2"
    assert [path.name for path in all_checkpoints(tmp_path / "checkpoints")] == ["step-2"]


# ---- optimizers ----


class Blockwise(torch.optim.AdamW):
    """Keeps one number for every four elements of what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter, state in self.state.items():
            state["scales"] = parameter.detach().abs().flatten()[::4].clone()


@ranks(2)
def test_state_of_blocks_of_a_part_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), data_plan(2, shard="optimizer"), optimizer=Blockwise)
    train(trainer)
    with pytest.raises(CheckpointError, match=r'Blockwise keeps "scales" of shape .* which weft cannot put together'):
        trainer.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_ranks_that_would_write_different_files_write_none(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    train(trainer)
    if trainer.mesh.world.rank == 1:
        next(iter(trainer.optimizer.state.values()))["more"] = torch.ones(3)
    with pytest.raises(CheckpointError, match="ranks would write different files"):
        trainer.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Counting(torch.optim.SGD):
    """Counts its updates in its parameter groups, as methods without a schedule do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


@ranks(2)
def test_what_an_optimizer_counts_in_its_groups_goes_on(tmp_path: Path) -> None:
    plan = data_plan(2)
    trainer = make_trainer(small_gpt(), plan, optimizer=Counting)
    train(trainer, 4)
    trainer.save(tmp_path / "a")
    again = make_trainer(small_gpt(), plan, optimizer=lambda parameters: Counting(parameters, lr=0.05))
    again.load(tmp_path / "a")
    assert {(group["k"], group["lr"]) for group in again.optimizer.param_groups} == {(4, 0.05)}


@ranks(2)
def test_another_plan_keeps_the_loss_scale(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), mixed(data_plan(2), compute="fp16"))
    trainer.update.load_state({"loss_scale": {"value": 512.0, "num_good": 7}, "num_skipped": 3})
    trainer.save(tmp_path / "a")
    again = make_trainer(small_gpt(), mixed(data_plan(2, shard="optimizer"), compute="fp16"))
    again.load(tmp_path / "a")
    assert again.update.state() == trainer.update.state()


# ---- buffers ----


class Remembering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_gpt()
        self.register_buffer("seen", torch.zeros(5000))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(tokens)


@ranks(2)
def test_a_buffer_that_replicas_do_not_share_is_one_of_theirs(tmp_path: Path) -> None:
    trainer = make_trainer(Remembering(), data_plan(2), optimizer=SGD)
    dict(trainer.named_model.named_buffers())["seen"].fill_(1.0 + trainer.mesh.world.rank)
    trainer.save(tmp_path / "a")
    assert load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")["seen"].unique().numel() == 1


# ---- folders ----


def test_weights_of_another_tool_are_not_taken_for_ours(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("precious")
    trainer = trainer_of(1)
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        trainer.save(folder)
    prune(tmp_path, keep=1)
    assert len(list(folder.iterdir())) == 2


def protected(real: Callable[..., None], name: str) -> Callable[..., None]:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == name and path.name == INDEX:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, missing_ok)

    return unlink


def test_a_checkpoint_that_cannot_be_deleted_stays_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(1)
    for step in range(1, 5):
        trainer.save(tmp_path / f"step-{step}")
    with mock.patch.object(Path, "unlink", protected(Path.unlink, "step-2")), caplog.at_level(logging.WARNING):
        prune(tmp_path, keep=1)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-2", "step-4"]
    assert "step-2/checkpoint.json stays as it is: Operation not permitted" in caplog.text
    trainer.load(tmp_path / "step-2")


def test_what_could_not_be_published_is_not_there(tmp_path: Path) -> None:
    trainer = trainer_of(1)
    trainer.save(tmp_path / "a")
    before = (tmp_path / "a" / INDEX).read_bytes()
    train(trainer)
    real = checkpoint_folders.force_to_disk

    def broken(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(path)

    with mock.patch.object(checkpoint_folders, "force_to_disk", broken):
        with pytest.raises(CheckpointError, match="nothing was saved; older checkpoints are untouched"):
            trainer.save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a" / INDEX).read_bytes() == before
