"""Workers that join a running job, and leave it: updates stay those of whole batches."""

from __future__ import annotations

import copy
import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, MLP, SGD, batch_of, train_alone
from ranks import gathered, ranks
from served_training import served, server_plan
from torch import Tensor

import weft
from weft.errors import LaunchError, PlanError
from weft.plan.plan import ALL, Axes, Data, Plan
from weft.server import worker_mesh
from weft.server.protocol.keys import write_key
from weft.server.worker_mesh import WorkerMesh
from weft.training.data.datasets import TensorSamples
from weft.training.trainer import Trainer

GLOBAL_BATCH, NUM_SAMPLES = 6, 40
AFTER = 4
"""Times that a worker sees all of them, before its first step or after one; they all end with the same step."""


def address_of(trainer: Trainer) -> str:
    assert isinstance(trainer.mesh, WorkerMesh)
    return trainer.mesh.run.addresses[0]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def train_while(trainer: Trainer, dataset: TensorSamples, *, workers: int) -> list[float]:
    """Train until so many workers have been there `AFTER` times; returns the losses by step."""
    losses, together = [], int(trainer.data_size == workers)
    for batch in weft.batches(dataset, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=1, epochs=None):
        losses.append(float(trainer.step(*batch)))
        together += trainer.data_size == workers
        if together == AFTER:
            return losses
        assert len(losses) < 1000
        time.sleep(0.01)
    raise AssertionError


@ranks(3, fresh=True)
@pytest.mark.parametrize(("optimizer", "num_frozen"), [(SGD, 2), (ADAMW, 0)])
def test_a_worker_joins_and_updates_stay_those_of_whole_batches(
    optimizer: Any, num_frozen: int, tmp_path: Path
) -> None:
    rank = dist.get_rank()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = gathered(probe.getsockname()[1])[0]
    dist.destroy_process_group()
    torch.manual_seed(7 + 10 * (rank == 2))  # whoever joins has other weights of its own
    model = MLP()
    for one in [*model.parameters()][:num_frozen]:
        one.requires_grad_(False)
    alone = copy.deepcopy(model)
    inputs, targets = batch_of(NUM_SAMPLES, 0)
    dataset = TensorSamples(inputs, targets)
    plan = server_plan(2, shards=2)
    if rank == 2:
        os.environ["WEFT_JOIN"] = wait_for(tmp_path / "address")
        with served(model, plan, optimizer=optimizer) as trainer:
            assert trainer.data_rank == 2 and trainer.data_size == 3
            first = trainer.steps_done
            assert first > 0 and trainer.seeds.base is not None
            losses = train_while(trainer, dataset, workers=3)
            assert trainer.steps_done == first + len(losses) and len(losses) == AFTER - 1
    else:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with served(model, plan, optimizer=optimizer) as trainer:
            assert trainer.data_size == 2
            if rank == 0:
                (tmp_path / "being-written").write_text(address_of(trainer))
                (tmp_path / "being-written").rename(tmp_path / "address")
            losses = train_while(trainer, dataset, workers=3)
    found = {name: one.detach().clone() for name, one in trainer.named_model.named_parameters()}
    torch.save((losses, found), tmp_path / f"found-{rank}")
    if rank == 0:
        compare_with_one_process(alone, dataset, losses, found, optimizer)


def compare_with_one_process(
    alone: MLP, dataset: TensorSamples, losses: list[float], found: dict[str, Tensor], optimizer: Any
) -> None:
    reader = mock.Mock(spec=["data_rank", "data_size", "data_position"], data_rank=0, data_size=1, data_position=0)
    batches = iter(weft.batches(dataset, reader, global_batch=GLOBAL_BATCH, shuffle_seed=1, epochs=None))
    seen = train_alone(alone, [next(batches) for _ in losses], optimizer=lambda model: optimizer(model.parameters()))
    assert losses == pytest.approx([one.loss for one in seen], rel=1e-9)
    for name, one in found.items():
        torch.testing.assert_close(one, seen[-1].weights[name], rtol=1e-9, atol=1e-11)


@ranks(3)
def test_a_slow_worker_goes_on_where_the_others_are() -> None:
    """Its gradients come too late, and its next batch is the one that the others have."""
    rank, total = dist.get_rank(), 12
    inputs, targets = batch_of(36, 0)
    taken = 0
    with served(MLP(), server_plan(3, backups=1, shards=2)) as trainer:
        for batch in weft.batches(TensorSamples(inputs, targets), trainer, global_batch=6, epochs=None):
            trainer.step(*batch)
            taken += 1
            time.sleep(0.2 if rank == 2 else 0.02)
            assert trainer.data_position == 6 * trainer.steps_done
            if trainer.steps_done >= total:
                break
    assert taken < total if rank == 2 else taken <= total


@pytest.fixture
def running() -> Any:
    """The address of a run of one worker."""
    with served(MLP(), server_plan(1)) as trainer:
        trainer.step(*batch_of(4, 0))
        yield address_of(trainer)


def join(address: str, model: Any, plan: Plan, **changes: Any) -> None:
    with mock.patch.dict(os.environ, {"WEFT_JOIN": address}), served(model, plan, **changes) as trainer:
        trainer.step(*batch_of(4, 0))


def test_another_model_does_not_join(running: str) -> None:
    with pytest.raises(LaunchError, match="the model is another one"):
        join(running, torch.nn.Linear(4, 3).double(), server_plan(1))


def test_another_job_does_not_join(running: str) -> None:
    with pytest.raises(PlanError, match=r"\[step\] clip_norm is 0.5 here and 0.0 in the run that is to be joined"):
        join(running, MLP(), server_plan(1, clip_norm=0.5))


def test_nobody_answers(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    key = mock.patch.dict(os.environ, {"WEFT_KEY": str(tmp_path / "key")})
    with key, mock.patch.object(worker_mesh, "JOIN_TIMEOUT_S", 1.0):
        with pytest.raises(LaunchError, match="no server answers at tcp://127.0.0.1:9 "):
            join("tcp://127.0.0.1:9", MLP(), server_plan(1))


def test_a_worker_of_another_size_and_a_plan_that_does_not_count_workers(running: str) -> None:
    plan = server_plan(1)
    with pytest.raises(PlanError, match="has 2 ranks, and 1 were launched"):
        join(running, MLP(), Plan(axes=Axes(data=1, tensor=2), data=plan.data, server=plan.server))
    with pytest.raises(PlanError, match="give the number"):
        join(running, MLP(), Plan(axes=Axes(data=ALL), data=Data(sync="server")))


def on_hosts_of_their_own() -> Any:
    return mock.patch.object(worker_mesh, "host_id", lambda: f"host {dist.get_rank()}")


@ranks(2)
def test_workers_of_several_hosts_meet_at_an_address_with_the_key(tmp_path: Path) -> None:
    environment = {"WEFT_KEY": str(tmp_path / "key")} | ({} if dist.get_rank() else {"WEFT_LISTEN": "127.0.0.1"})
    inputs, targets = batch_of(8, 0)
    half = slice(None, 4) if dist.get_rank() == 0 else slice(4, None)
    model = MLP()
    alone = copy.deepcopy(model)
    with mock.patch.dict(os.environ, environment), on_hosts_of_their_own():
        with served(model, server_plan(2, shards=2)) as trainer:
            assert all(one.startswith("tcp://127.0.0.1:") for one in trainer.mesh.run.addresses)
            losses = [float(trainer.step(inputs[half], targets[half])) for _ in range(3)]
    seen = train_alone(alone, [(inputs, targets)] * 3, optimizer=lambda model: SGD(model.parameters()))
    assert losses == pytest.approx([one.loss for one in seen], rel=1e-9)


@ranks(2)
def test_workers_of_several_hosts_without_an_address() -> None:
    with on_hosts_of_their_own():
        if dist.get_rank():
            with pytest.raises(LaunchError, match=r"set WEFT_LISTEN \(--listen HOST\) on the first host, and WEFT_KEY"):
                with served(MLP(), server_plan(2)):
                    pass
        else:
            with worker_mesh.join_run(server_plan(2), "cpu", timeout_s=60).servers:  # type: ignore
                pass


def test_a_worker_asks_for_hardware_queues_before_it_looks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other run does: its ranks have a stream for each of their communicators."""
    for device, expected in (("cpu", None), (None, "32")):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # what was there comes back after the test
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        worker_mesh._world_of_worker(None, 0, 0, 1, device, 1.0)
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
