"""Checkpoints of runs with parameter servers: as of any other run, with the optimizer's state from the servers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, data_plan, make_trainer, small_gpt, token_batch, train_on_tokens
from ranks import gathered, ranks
from served_training import served, server_plan
from torch import Tensor

from weft.errors import CheckpointError
from weft.plan.plan import Axes, Plan
from weft.server.protocol.message import Kind, Malformed, Message
from weft.server.protocol.optimizer_state import pack_states, read_states
from weft.training.trainer import Trainer
from weft.world import leave_world


def model_of(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return small_gpt().double()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in trainer.named_model.named_parameters()}


def plan_of(workers: int, **server: Any) -> Plan:
    return server_plan(workers, bucket_bytes=4096, **server)


@ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_equals_an_unbroken_one(background: bool, tmp_path: Path) -> None:
    with served(model_of(), plan_of(2, shards=2), optimizer=ADAMW) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved", wait=not background)
        assert not trainer.optimizer.state
        losses = train_on_tokens(trainer, 2)
        unbroken = weights_of(trainer)
    gathered(None)  # the other worker's part of a checkpoint is none, so it may be ahead
    with served(model_of(seed=9), plan_of(2, shards=2), optimizer=ADAMW) as trainer:
        trainer.load(tmp_path / "saved")
        assert trainer.steps_done == 2
        assert train_on_tokens(trainer, 2) == losses
        for name, one in weights_of(trainer).items():
            assert torch.equal(one, unbroken[name]), name
        assert not trainer.optimizer.state


@ranks(2)
def test_any_plan_goes_on_from_any_other(tmp_path: Path) -> None:
    """Ranks that all-reduce write, workers go on; these write, and ranks that shard optimizer state go on."""
    unbroken = make_trainer(model_of(), data_plan(2), optimizer=ADAMW)
    train_on_tokens(unbroken, 2)
    unbroken.save(tmp_path / "saved")
    expected, last = train_on_tokens(unbroken, 2), train_on_tokens(unbroken, 1)
    with served(model_of(seed=9), plan_of(2, shards=3), optimizer=ADAMW) as trainer:
        trainer.load(tmp_path / "saved")
        assert train_on_tokens(trainer, 2) == pytest.approx(expected, rel=1e-10)
        trainer.save(tmp_path / "of-servers")
    gathered(None)
    sharded = make_trainer(model_of(seed=9), data_plan(2, shard="optimizer"), optimizer=ADAMW)
    sharded.load(tmp_path / "of-servers")
    assert train_on_tokens(sharded, 1) == pytest.approx(last, rel=1e-10)


@ranks(2, fresh=True)
def test_another_number_of_workers_and_servers(tmp_path: Path) -> None:
    with served(model_of(), plan_of(2, shards=2), optimizer=ADAMW) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved")
        trainer.export(tmp_path / "exported")
        losses = train_on_tokens(trainer, 2)
    gathered(None)
    if dist.get_rank():
        return
    dist.destroy_process_group()
    with served(model_of(seed=9), plan_of(1, shards=3), optimizer=ADAMW) as trainer:
        trainer.load(tmp_path / "saved")
        assert train_on_tokens(trainer, 2) == pytest.approx(losses, rel=1e-10)
    assert list((tmp_path / "exported").glob("model*.safetensors"))


def test_a_checkpoint_is_refused_where_servers_have_weights(tmp_path: Path) -> None:
    with served(model_of(), plan_of(1), optimizer=ADAMW) as trainer:
        trainer.save(tmp_path / "saved")
        train_on_tokens(trainer, 1)
        with pytest.raises(CheckpointError, match="before the first step"):
            trainer.load(tmp_path / "saved")


def test_weights_of_an_asynchronous_run_are_saved_with_their_state(tmp_path: Path) -> None:
    with served(model_of(), plan_of(1, mode="async", shards=2), optimizer=ADAMW) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved")
        losses = train_on_tokens(trainer, 2)
    with served(model_of(seed=9), plan_of(1), optimizer=ADAMW) as trainer:
        trainer.load(tmp_path / "saved")
        assert train_on_tokens(trainer, 2) == pytest.approx(losses, rel=1e-10)


@ranks(4, fresh=True)
@pytest.mark.parametrize("axes", [dict(tensor=2), dict(pipeline=2)])
def test_workers_of_two_ranks_save_for_one_process(axes: dict[str, int], tmp_path: Path) -> None:
    rank = dist.get_rank()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = gathered(probe.getsockname()[1])[0]
    dist.destroy_process_group()
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    plain = plan_of(2, shards=2)
    plan = Plan(axes=Axes(data=2, **axes), data=plain.data, server=plain.server, step=plain.step, comm=plain.comm)
    with served(model_of(), plan, optimizer=ADAMW, example=token_batch(2)[0]) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved")
        losses = train_on_tokens(trainer, 2)
    leave_world()
    if rank:
        return
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    alone = make_trainer(model_of(seed=9), data_plan(1), optimizer=ADAMW)
    alone.load(tmp_path / "saved")
    assert train_on_tokens(alone, 2) == pytest.approx(losses, rel=1e-9)


def states_message(frames: Any) -> Message:
    return Message(kind=Kind.STATE, job=0, session=0, worker=0, server=0, frames=tuple(frames))


def test_states_travel_as_they_are() -> None:
    states: list[dict[str, Any]] = [
        {"step": torch.tensor(3.0), "mean": torch.arange(4.0), "number": 0.5},
        {},
        {"mean": torch.arange(2.0, dtype=torch.float64)},
    ]
    found = read_states(states_message(pack_states(states)), [4, 7, 2])
    assert [sorted(one) for one in found] == [["mean", "number", "step"], [], ["mean"]]
    assert found[0]["step"].shape == () and found[0]["number"] == 0.5
    assert torch.equal(found[0]["mean"], torch.arange(4.0))
    assert torch.equal(found[2]["mean"], torch.arange(2.0, dtype=torch.float64))


@pytest.mark.parametrize("numels", [[4], [5, 7, 2], [4, 7]])
def test_states_of_other_parts_are_refused(numels: list[int]) -> None:
    frames = pack_states([{"mean": torch.arange(4.0)}, {}, {"mean": torch.arange(2.0)}])
    with pytest.raises(Malformed):
        read_states(states_message(frames), numels)
    with pytest.raises(Malformed, match="no state has"):
        read_states(states_message([*frames, b"more"]), [4, 7, 2])
    with pytest.raises(Malformed):
        read_states(states_message(frames[:-1]), [4, 7, 2])
