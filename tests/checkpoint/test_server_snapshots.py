"""What servers have saved of a run of which everybody is gone: any plan goes on from it, as if it had not broken."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, SGD, data_plan, make_trainer, small_gpt, token_batch, train_on_tokens
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_training import leave_group, served, server_plan
from served_workers import make_settings, play
from torch import nn

from weft.checkpoint.server_snapshots import save_servers
from weft.plan.plan import Axes, Plan
from weft.server.snapshot import take
from weft.server.snapshot_file import SNAPSHOT, common_snapshots, read_snapshot, write_snapshot
from weft.training.trainer import Trainer
from weft.world import leave_world

NUM_STEPS, BREAKS_AFTER = 6, 3


def model_of(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model: nn.Module = small_gpt().double()
    next(one for name, one in model.named_parameters() if "mlp" in name).requires_grad_(False)
    model.register_buffer("number", torch.tensor(seed))
    model.register_buffer("table", torch.full((2, 3), float(seed)), persistent=False)
    return model


def plan_of(workers: int = 2, **server: Any) -> Plan:
    return server_plan(workers, bucket_bytes=4096, **server)


def broken_off(folder: Path, plan: Plan, optimizer: Any, **changes: Any) -> tuple[list[float], Path]:
    """The losses of a run whose servers save all the time, and what was on the disk in the middle of it, copied file by
    file while servers went on."""
    run, losses = folder / "being-run", []
    with servers_in_threads(run / "servers"), served(model_of(), plan, optimizer=optimizer, **changes) as trainer:
        while trainer.steps_done < NUM_STEPS:
            losses += train_on_tokens(trainer, 1)
            if trainer.steps_done == BREAKS_AFTER and trainer.mesh.leads and trainer.mesh.world.rank == 0:
                copy_of(run, folder / "run", has_common=plan.server.updates_together)
    return losses, folder / "run"


def copy_of(run: Path, copy: Path, *, has_common: bool) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            shutil.copytree(run, copy)
        except (shutil.Error, FileNotFoundError):  # a file was renamed meanwhile
            pass
        folders = [copy / "servers" / one.name for one in (run / "servers").glob("saved-*")]
        if all(any(common_snapshots(one)) or not has_common for one in folders):
            return
        assert time.monotonic() < deadline
        shutil.rmtree(copy, ignore_errors=True)


def assert_goes_on(trainer: Trainer, path: Path, losses: list[float]) -> None:
    trainer.load(path)
    step = trainer.steps_done
    assert 0 < step <= BREAKS_AFTER and path.name == f"step-{step}"
    assert train_on_tokens(trainer, NUM_STEPS - step) == pytest.approx(losses[step:], rel=1e-10)
    assert trainer.named_model.get_buffer("number").item() == 3


@pytest.mark.sampled(1, long=1)
@ranks(2)
@pytest.mark.parametrize(("shards", "optimizer", "clip_norm"), [(3, ADAMW, 0.0), (2, SGD, 0.5)])
def test_any_plan_goes_on(shards: int, optimizer: Any, clip_norm: float, tmp_path: Path) -> None:
    losses, run = broken_off(tmp_path, plan_of(shards=shards, clip_norm=clip_norm), optimizer)
    gathered(None)
    written = save_servers(run, run / "checkpoints") if dist.get_rank() == 0 else None
    path = Path(gathered(str(written))[0])
    assert not (run / "servers").exists()
    trainer = make_trainer(model_of(seed=9), data_plan(2, clip_norm=clip_norm), optimizer=optimizer)
    assert_goes_on(trainer, path, losses)
    gathered(None)
    again = plan_of(shards=1, clip_norm=clip_norm)
    with servers_in_threads(), served(model_of(seed=9), again, optimizer=optimizer) as trainer:
        assert_goes_on(trainer, path, losses)


@ranks(1)
def test_of_an_asynchronous_server(tmp_path: Path) -> None:
    """One worker: its updates are those of one process."""
    losses, run = broken_off(tmp_path, plan_of(1, mode="async"), ADAMW)
    path = save_servers(run, run / "checkpoints")
    assert path is not None
    assert_goes_on(make_trainer(model_of(seed=9), data_plan(1), optimizer=ADAMW), path, losses)
    assert save_servers(run, run / "checkpoints") is None


@pytest.mark.long
@ranks(4, fresh=True)
@pytest.mark.parametrize("axes", [dict(tensor=2), dict(pipeline=2)])
def test_parts_of_workers_of_two_ranks_are_put_together(axes: dict[str, int], tmp_path: Path) -> None:
    rank = dist.get_rank()
    leave_group()
    plain = plan_of(shards=2)
    plan = Plan(axes=Axes(data=2, **axes), data=plain.data, server=plain.server, step=plain.step, comm=plain.comm)
    losses, run = broken_off(tmp_path, plan, ADAMW, example=token_batch(2)[0])
    leave_world()
    if rank == 0:
        path = save_servers(run, run / "checkpoints")
        assert path is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RANK")
            patch.delenv("WORLD_SIZE")
            assert_goes_on(make_trainer(model_of(seed=9), data_plan(1), optimizer=ADAMW), path, losses)


def written(folder: Path, *, versions: tuple[int, int]) -> Path:
    """The snapshots of two servers, at these versions."""
    for server, version in enumerate(versions):
        made = play(make_settings(num_workers=1, num_servers=2), version)
        (folder / "servers" / f"saved-{server}").mkdir(parents=True)
        write_snapshot(folder / "servers" / f"saved-{server}", take(made.servers[server]))
    return folder


def test_servers_of_two_versions_without_a_common_one_are_no_checkpoint(tmp_path: Path) -> None:
    run = written(tmp_path, versions=(2, 3))
    assert save_servers(run, run / "checkpoints") is None
    assert not (run / "servers").exists() and not (run / "checkpoints").exists()


def test_a_server_whose_files_are_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = written(tmp_path, versions=(2, 2))
    shutil.rmtree(run / "servers" / "saved-1")
    assert save_servers(run, run / "checkpoints") is None
    assert "has snapshots of 1 of 2 servers" in caplog.text


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = written(tmp_path, versions=(2, 2))
    (run / "servers" / "saved-1" / SNAPSHOT).write_bytes(b"half")
    assert save_servers(run, run / "checkpoints") is None
    assert "put aside as servers.damaged" in caplog.text and (run / "servers.damaged").is_dir()


def test_the_last_two_common_snapshots_are_kept(tmp_path: Path) -> None:
    """One server may have written one more than another."""
    for version in (1, 2, 3):
        server = play(make_settings(num_workers=1), version).servers[0]
        write_snapshot(tmp_path, take(server), is_common=True)
    server = play(make_settings(num_workers=1), 4).servers[0]
    write_snapshot(tmp_path, take(server))
    assert common_snapshots(tmp_path) == [2, 3]
    found = [read_snapshot(tmp_path, name) for name in ("common-2", "common-3", SNAPSHOT)]
    assert [one.version for one in found if one is not None] == [2, 3, 4]
