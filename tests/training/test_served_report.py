"""What a run with servers says of itself: ages of updates and late gradients, its rule, its compression."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import MLP, SGD, batch_of
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_rules import some_codec
from served_training import served, server_plan

import weft
from weft.cli.progress import _of_servers
from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.sync.served import ServedSync
from weft.training.run.compression_report import compression_of_run
from weft.training.run.metrics import StepRecord, served_fields


@ranks(2)
def test_ages_of_all_updates_are_counted() -> None:
    """A worker that is slow in one step: its gradient is as old as the others' updates in between."""
    with servers_in_threads(), served(MLP(), server_plan(2, mode="async")) as trainer:
        sync = trainer.sync
        assert isinstance(sync, ServedSync)
        ages = []
        for seed in range(4):
            if dist.get_rank() == 0 and seed == 2:
                time.sleep(0.3)
            trainer.step(*batch_of(4, seed))
            ages.append(sync.told[0][1].age)
        dist.barrier()
        trainer.step(*batch_of(4, 9))
        ages.append(sync.told[0][1].age)
        dist.barrier()
        trainer.step(*batch_of(4, 10))  # what is told now counts all that was made before the barrier
        found, all_ages = served_fields(trainer)["staleness"], [age for part in gathered(ages) for age in part]
        counted = [all_ages.count(age) for age in range(len(found))]
        assert len(all_ages) == 10 and 11 <= sum(found) <= 12
        assert all(0 <= more - less <= 2 for more, less in zip(found, counted, strict=True))
        assert sum(found) - sum(counted) == sum(found) - 10 and max(all_ages) >= 2


@ranks(2)
def test_synchronous_servers_count_what_came_too_late() -> None:
    with servers_in_threads(), served(MLP(), server_plan(2)) as trainer:
        for seed in range(2):
            trainer.step(*batch_of(4, seed))
        assert served_fields(trainer) == {"num_dropped": 0}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (server_plan(1), "worker 0 of 1 with a server: an update per step of the gradients of all workers; gradients"),
        (
            server_plan(1, mode="async", shards=2, lr_scaling="staleness", compensation=0.5, pull="bf16"),
            "worker 0 of 1 with 2 servers: every worker's gradient is an update, with a rate divided by its age, "
            "compensated by 0.5; gradients are sent as they are, weights come back in bf16; the optimizer's state is",
        ),
        (server_plan(1, mode="bounded", staleness=3), "at most 3 clocks ahead of the slowest worker; gradients"),
        (server_plan(1, mode="bounded"), "an update per step of the gradients of all workers; gradients"),
        (
            dataclasses.replace(server_plan(1), codec=some_codec("topk")),
            "gradients are sent through codec topk; the optimizer's state is there",
        ),
    ],
)
def test_a_trainer_describes_its_servers(plan: Plan, says: str) -> None:
    with servers_in_threads(), served(MLP(), plan) as trainer:
        assert says in trainer.describe()


def test_servers_are_for_workers_that_run() -> None:
    with torch.device("meta"):
        model = MLP()
    with pytest.raises(
        PlanError, match=r'"server" every worker is a world of its own.*look at one worker: \[axes\] data'
    ):
        weft.parallelize(model, server_plan(2), loss="cross-entropy", optimizer=SGD, device="meta")
    with pytest.raises(PlanError, match="exchange through servers, which are processes of their own; start real"):
        weft.parallelize(MLP(), server_plan(2), loss="cross-entropy", optimizer=SGD, replicas_in_process=True)


def test_what_is_sent_to_servers_is_compression(tmp_path: Path) -> None:
    plan = dataclasses.replace(server_plan(1), codec=some_codec("topk"))
    with servers_in_threads(), served(MLP(), plan) as trainer:
        lines, before = [], 0
        for seed in range(3):
            trainer.step(*batch_of(4, seed))
            sent = trainer.mesh.traffic["servers"].sent_bytes
            lines.append({"step": seed + 1, "sent_bytes": {"servers": sent - before}})
            before = sent
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = compression_of_run(trainer, tmp_path / "metrics.jsonl")
        assert found is not None and found.is_served and found.sent_bytes == before
        assert found.dense_bytes == 3 * 4 * sum(one.numel() for one in MLP().parameters())


def record(**fields: object) -> StepRecord:
    known: dict[str, object] = dict.fromkeys(
        ("lr", "units_per_s", "step_s", "exchange_s", "bubble_s", "compute_s"), 0.1
    )
    known |= dict(step=4, loss=1.0, unit="samples", sent_bytes={"servers": 9}, memory_bytes=1, grad_norm=None)
    return StepRecord(**{**known, "num_skipped": 0, "loss_scale": None, "spike": None, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            dict(staleness=[1, 2, 0, 1]),
            "staleness: 1.2 updates on average between a gradient and its weights, 3 at most",
        ),
        (
            dict(staleness=[*[0] * 14, 1, 1]),  # of which the last may be older
            "staleness: 14.5 or more updates on average between a gradient and its weights, 15 or more",
        ),
        (dict(num_dropped=3), "3 gradients came too late for their version, and were dropped"),
        (dict(num_dropped=0), ""),
        ({}, ""),
    ],
)
def test_a_run_ends_with_how_old_its_gradients_were(fields: dict[str, object], says: str) -> None:
    assert _of_servers(record(**fields)) == says
