"""What codecs of workers keep, in checkpoints: a resumed run equals an unbroken one, whoever had not sent what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, SGD, data_plan, make_trainer, small_gpt, train_on_tokens
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_training import served, server_plan

from weft.checkpoint import worker_parts
from weft.checkpoint.folders import prune
from weft.errors import DamagedCheckpointError
from weft.plan.plan import Codec, Plan

TOPK = Codec(name="topk", density=0.1, dense_below=1)
CODECS = [
    (TOPK, ADAMW),
    (Codec(name="onebit", dense_below=1), SGD),
    (Codec(name="powersgd", rank=1, dense_below=1), SGD),
    (Codec(name="dgc", density=0.1, dense_below=1, warmup_steps=4), SGD),
]


def plan_of(workers: int, codec: Codec = TOPK, **server: Any) -> Plan:
    plain = server_plan(workers, bucket_bytes=4096, **server)
    return Plan(axes=plain.axes, data=plain.data, server=plain.server, comm=plain.comm, codec=codec)


def model_of(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return small_gpt().double()


def resumed_and_unbroken(plan: Plan, optimizer: Any, folder: Path, *, background: bool = False) -> tuple[Any, Any]:
    """Losses and weights of two steps after a checkpoint, of a run that loads it and of the one that wrote it."""
    found = []
    with servers_in_threads(), served(model_of(), plan, optimizer=optimizer) as trainer:
        train_on_tokens(trainer, 3)
        trainer.save(folder / "saved", wait=not background)
        losses = train_on_tokens(trainer, 3)
        found.append((losses, dict(trainer.named_model.named_parameters())))
    gathered(None)
    with servers_in_threads(), served(model_of(seed=9), plan, optimizer=optimizer) as trainer:
        trainer.load(folder / "saved")
        losses = train_on_tokens(trainer, 3)
        found.append((losses, dict(trainer.named_model.named_parameters())))
    return found[1], found[0]


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[0] == expected[0]
    for name, one in found[1].items():
        assert torch.equal(one, expected[1][name]), name


@pytest.mark.sampled(2, long=2)
@ranks(2)
@pytest.mark.parametrize(("codec", "optimizer"), CODECS)
def test_a_resumed_run_equals_an_unbroken_one(codec: Codec, optimizer: Any, tmp_path: Path) -> None:
    background = codec.name == "onebit"
    assert_equal(*resumed_and_unbroken(plan_of(2, codec, shards=2), optimizer, tmp_path, background=background))
    names = [one["name"] for one in json.loads((tmp_path / "saved" / "checkpoint.json").read_text())["files"]]
    assert "worker-00001-00000.safetensors" in names  # with checksums
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
@ranks(1)
@pytest.mark.parametrize(("codec", "optimizer"), CODECS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_alone(mode: str, codec: Codec, optimizer: Any, tmp_path: Path) -> None:
    assert_equal(*resumed_and_unbroken(plan_of(1, codec, mode=mode), optimizer, tmp_path))


@ranks(2)
def test_a_damaged_file_of_a_worker_is_found(tmp_path: Path) -> None:
    with servers_in_threads(), served(model_of(), plan_of(2), optimizer=SGD) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved")
    gathered(None)
    path = tmp_path / "saved" / worker_parts.worker_file(1, 0)
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    gathered(None)
    with servers_in_threads(), served(model_of(), plan_of(2), optimizer=SGD) as trainer:
        with pytest.raises(DamagedCheckpointError, match="worker-00001"):
            trainer.load(tmp_path / "saved")


@ranks(2)
def test_a_worker_whose_file_does_not_come(tmp_path: Path) -> None:
    """Another one of the same name, of an earlier run, does not count. The run goes on, as one whose worker died."""
    rank = dist.get_rank()
    plan = plan_of(2)
    warnings: list[str] = []
    warn = mock.patch.object(worker_parts.log, "warning", lambda text, *given: warnings.append(text % given))
    with warn, servers_in_threads(), served(model_of(), plan, optimizer=SGD) as trainer:
        train_on_tokens(trainer, 2)
        of_another_run = mock.patch.object(worker_parts, "_mark_of", lambda folder, name: "another run/2")
        with mock.patch.object(worker_parts, "PATIENCE_S", 0.1), of_another_run:
            trainer.save(tmp_path / "step-2")
        losses = train_on_tokens(trainer, 1)
    if rank == 0:
        assert "will lack what 1 of 1 ranks of other workers had not sent" in warnings.pop()
        shutil.rmtree(tmp_path / ".step-2.workers", ignore_errors=True)
    gathered(None)
    with warn, servers_in_threads(), served(model_of(seed=9), plan, optimizer=SGD) as trainer:
        trainer.load(tmp_path / "step-2")
        begins_anew = "codecs of worker 1 had not sent: they begin with nothing"
        assert [begins_anew in one for one in warnings] == [True] * rank
        assert train_on_tokens(trainer, 1) == losses  # of weights before what is lost would have been sent


@ranks(2)
def test_what_was_kept_is_dropped_where_the_run_has_gone_on(tmp_path: Path) -> None:
    """A worker that is started again loads the last checkpoint, in case that servers have nothing. What it had not sent
    then, it has sent since."""
    with servers_in_threads(), served(model_of(), plan_of(2), optimizer=SGD) as trainer:
        train_on_tokens(trainer, 2)
        trainer.save(tmp_path / "saved")
    gathered(None)
    with servers_in_threads(), served(model_of(), plan_of(2), optimizer=SGD) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.steps_done -= dist.get_rank()  # as if this worker had found an earlier checkpoint than the first one
        kept = trainer.sync.kept  # type: ignore[attr-defined]
        trainer.sync.take_part()
        lost = all(not one.any() for name, one in kept.tensors().items() if "residual" in name)
        assert trainer.steps_done == 2 and lost == (dist.get_rank() == 1)


def test_what_came_too_late_is_deleted_with_the_next_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(model_of(), data_plan(1), optimizer=SGD)
    trainer.save(tmp_path / "step-5")
    for step in (4, 5, 6):
        (tmp_path / f".step-{step}.workers").mkdir()
    prune(tmp_path, keep=1)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".step-6.workers", "step-5"]
