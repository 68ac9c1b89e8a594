"""Saving while training goes on: the checkpoint is of the moment of the call, and no failure is lost."""

from __future__ import annotations

import errno
import gc
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import (
    ADAMW,
    data_plan,
    make_trainer,
    pipeline_plan,
    small_gpt,
    tensor_plan,
    token_batch,
    train_on_tokens,
)
from ranks import ranks
from torch import nn

from weft.checkpoint import save as saving
from weft.checkpoint.load import read_index
from weft.comm.objects import gather_values
from weft.errors import CheckpointError
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

PLANS = {
    "data 2": data_plan(2),
    "zero 3": data_plan(2, shard="parameters"),
    "tensor 2": tensor_plan(2),
    "pipeline 2": pipeline_plan(2, microbatches=2, cuts=(1,)),
    "2bw": pipeline_plan(2, schedule="2bw", microbatches=2, cuts=(1,)),
}


def make(plan: Plan) -> Trainer:
    torch.manual_seed(3)
    return make_trainer(small_gpt(dropout=0.1), plan, optimizer=ADAMW, example=token_batch(2)[0])


def held_back(release: threading.Event) -> Any:
    """Nothing is written before the event."""
    real = saving.write_runs

    def write_runs(*arguments: Any) -> None:
        assert release.wait(60)
        real(*arguments)

    return mock.patch.object(saving, "write_runs", write_runs)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_is_of_the_moment_of_the_call(tmp_path: Path, name: str) -> None:
    trainer, release = make(PLANS[name]), threading.Event()
    train_on_tokens(trainer, 2)
    trainer.data_position = 17
    trainer.save(tmp_path / "waited for")
    with held_back(release):
        trainer.save(tmp_path / "beside", wait=False)
        losses = train_on_tokens(trainer, 2)
        trainer.data_position = 99
        assert not trainer.saving.is_over and not (tmp_path / "beside").exists()
        release.set()
        trainer.wait_for_save()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited for")
    assert read_index(tmp_path / "beside")["data_position"] == 17
    again = make(PLANS[name])
    again.load(tmp_path / "beside")
    assert train_on_tokens(again, 2) == losses
    for one in (trainer, again):  # tests share groups, in which nothing may be left under way
        one.flush()


@ranks(2)
def test_saves_and_loads_come_one_after_another(tmp_path: Path) -> None:
    trainer = make(PLANS["zero 3"])
    for step in range(1, 4):
        train_on_tokens(trainer, 1)
        trainer.save(tmp_path / f"step-{step}", wait=False)
    trainer.load(tmp_path / "step-3")
    assert trainer.steps_done == 3
    assert [read_index(tmp_path / f"step-{step}")["step"] for step in (1, 2, 3)] == [1, 2, 3]


@ranks(2)
def test_a_failure_is_reported_and_raised_by_the_next_save(tmp_path: Path) -> None:
    trainer = make(PLANS["data 2"])
    rank = trainer.mesh.world.rank
    broken = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "the-file"))
    with mock.patch.object(saving, "write_runs", broken if rank == 1 else saving.write_runs):
        with mock.patch.object(saving.log, "error") as said:
            trainer.save(tmp_path / "lost", wait=False)
            train_on_tokens(trainer, 1)
            assert trainer.saving._thread is not None
            trainer.saving._thread.join()
            assert said.call_count == (rank == 0)
    assert not trainer.saving.is_over
    with pytest.raises(CheckpointError, match="rank 1 cannot write the-file: No space left"):
        trainer.save(tmp_path / "next", wait=False)
    trainer.save(tmp_path / "next", wait=False)
    trainer.wait_for_save()
    torch.distributed.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


@ranks(2)
def test_a_rank_copies_its_share_only_and_into_the_same_memory(tmp_path: Path) -> None:
    trainer = make(PLANS["data 2"])
    train_on_tokens(trainer, 1)
    whole_bytes = 3 * sum(parameter.nbytes for parameter in trainer.named_model.parameters())
    places = []
    for _ in range(2):
        trainer.save(tmp_path / "saved", wait=False)
        trainer.wait_for_save()
        places.append(trainer.saving._copies._memory.data_ptr())
    mine = trainer.saving._copies._memory.nbytes
    both = sum(gather_values(mine, trainer.mesh.everyone("control")))
    assert places[0] == places[1]
    assert whole_bytes <= both < 1.5 * whole_bytes


class Large(nn.Module):
    """Four matrices of 8 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 4096, bias=False) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).view(*hidden.shape, 8).sum(-1)
        return hidden[..., :17]


def most_extra_bytes(action: Any) -> int:
    """By how much this process's own memory rose at most."""

    def read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmHWM")
    action()
    return read("VmHWM") - before


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_no_rank_needs_room_for_more_than_two_tensors(tmp_path: Path, shard: str) -> None:
    trainer = make_trainer(Large(), data_plan(2, shard=shard))
    train_on_tokens(trainer, 1)
    largest = 512 * 4096 * 4
    trainer.save(tmp_path / "first")  # what is made once does not count
    assert most_extra_bytes(lambda: trainer.save(tmp_path / "saved")) < 2 * largest
    with mock.patch.object(trainer.sync, "load_state"):  # makes the gradients' buffers anew, which are no part of it
        assert most_extra_bytes(lambda: trainer.load(tmp_path / "saved")) < 2 * largest
