"""`verify` on plans with servers: right ones equal one process, or a replay of it, and planted faults are found."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, MLP, SGD, batch_of, image_batch, small_convnet, small_gpt, token_batch
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_training import leave_group, server_plan
from torch import nn

from weft.cli import verify as command
from weft.errors import VerifyError
from weft.plan.plan import Plan, Precision
from weft.server.protocol.client import ServerClient
from weft.server.weights import updates
from weft.sync import served
from weft.sync.served import ServedSync
from weft.training.data.datasets import TensorSamples
from weft.training.parallelize import parallelize
from weft.training.run.job import Job, Part, Steps
from weft.training.trainer import Trainer
from weft.verification import verify as verify_module
from weft.verification.served_record import WorkerRecord, orders_of
from weft.verification.verify import Verification, verify

STEPS = (8, 5, 8)


def run(plan: Plan, *, model: nn.Module | None = None, sizes: Any = STEPS, **changes: Any) -> Verification:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "loss": "cross-entropy",
        "optimizer": SGD,
        "batches": [batch_of(size, seed) for seed, size in enumerate(sizes)],
        "device": "cpu",
        **changes,
    }
    with servers_in_threads():
        return verify(MLP() if model is None else model, plan, **given)


@ranks(2)
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (server_plan(2, clip_norm=0.05, microbatches=2), ADAMW),
        (server_plan(2, shards=2), SGD),
        (server_plan(2, mode="bounded", clip_norm=0.05), SGD),
    ],
)
def test_workers_that_share_a_batch_equal_one_process(plan: Plan, optimizer: Any) -> None:
    outcome = run(plan, optimizer=optimizer, sizes=(8, 5, 1)).require()
    assert outcome.rule == "one process" and outcome.deviation is None
    compared = {one.what for one in outcome.differences}
    assert compared == {"loss", "gradient", "state", "weight"}
    assert all(one == str(outcome) for one in gathered(str(outcome)))


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "bounded", "staleness": 2}])
def test_one_worker_that_waits_for_nobody_equals_one_process(mode: dict[str, Any]) -> None:
    outcome = run(server_plan(1, clip_norm=0.05, compensation=0.5, lr_scaling="staleness", shards=2, **mode)).require()
    assert outcome.rule == "one process"
    assert {one.what for one in outcome.differences} == {"loss", "gradient", "state", "weight"}


@ranks(2)
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (server_plan(2, mode="async", shards=2, microbatches=2), ADAMW),
        (server_plan(2, mode="async", clip_norm=0.05, compensation=0.7, lr_scaling="staleness"), SGD),
        (server_plan(2, mode="bounded", staleness=1, shards=2), SGD),
    ],
)
def test_asynchronous_workers_equal_a_replay_of_the_order_of_updates(plan: Plan, optimizer: Any) -> None:
    def slow(step: int) -> None:
        time.sleep(0.03 * dist.get_rank() * (step % 2))

    def schedule(step: int) -> float:
        return 1 / (1 + step)

    outcome = run(plan, optimizer=optimizer, schedule=schedule, sizes=(8, 5, 1, 8), on_step=slow).require()
    assert outcome.rule == "one process that replays the order of updates"
    assert {one.what for one in outcome.differences} == {"loss", "gradient", "weight"}
    assert outcome.deviation is not None and outcome.deviation.movement is not None
    assert 1e-6 < outcome.deviation.movement < 2, "updates of parts are no updates of whole batches"
    assert all(one == str(outcome) for one in gathered(str(outcome)))


@pytest.mark.sampled(1, long=2)
@ranks(4, fresh=True)
@pytest.mark.parametrize(
    ("axes", "server"),
    [
        ({"tensor": 2}, {"shards": 2}),
        ({"pipeline": 2}, {"mode": "async", "shards": 2, "compensation": 0.5}),
        ({"tensor": 2}, {"pull": "bf16"}),  # whose rounding is measured in another run of the same workers
    ],
)
def test_workers_of_two_ranks(axes: dict[str, int], server: dict[str, Any]) -> None:
    leave_group()
    plan = server_plan(2, bucket_bytes=4096, microbatches=2, clip_norm=0.05, **server)
    plan = dataclasses.replace(plan, axes=dataclasses.replace(plan.axes, **axes))
    batches = [token_batch(size, seed=seed) for seed, size in enumerate((8, 6, 8))]
    outcome = run(plan, model=small_gpt(), batches=batches).require()
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight", "buffer"}


@ranks(2)
def test_batch_norms_are_those_of_each_worker() -> None:
    model = small_convnet()
    batches = [image_batch(size, seed=seed) for seed, size in enumerate((8, 6))]
    outcome = run(server_plan(2), model=model, batches=batches).require()
    assert any(one.what == "buffer" and "running" in one.name for one in outcome.differences)


@ranks(2)
def test_backups_are_waited_for_and_16_bits_measured() -> None:
    plan = dataclasses.replace(server_plan(2, backups=1, pull="bf16"), precision=Precision(compute="bf16"))
    outcome = run(plan, model=small_gpt(), batches=[token_batch(8, seed=seed) for seed in range(2)]).require()
    assert any("backups = 0 instead of 1" in note for note in outcome.notes)
    assert any("weights were not rounded" in note for note in outcome.notes)
    assert outcome.deviation is not None and 0 < outcome.deviation.loss < 0.05


def model() -> MLP:
    return MLP()


def samples() -> TensorSamples:
    return TensorSamples(*batch_of(16))


@ranks(2, fresh=True)
def test_what_a_rank_of_the_command_does() -> None:
    leave_group()
    job = Job(
        model=Part(name=f"{__name__}:model"),
        loss="cross-entropy",
        dataset=Part(name=f"{__name__}:samples"),
        optimizer=Part(name="sgd", settings={"lr": 0.1}),
        schedule=Part(name="constant"),
        steps=Steps(total=2, global_batch=8),
        plan=server_plan(2),
    )
    with servers_in_threads():
        outcome = command._run_rank(
            folder=None, attempt=0, job=job, num_steps=2, global_batch=8, dtype_name="float64"
        ).require()
    assert (outcome.rule, outcome.num_steps) == ("one process", 2)


# ---- what is refused ----


@ranks(2)
def test_workers_with_other_first_values() -> None:
    torch.manual_seed(dist.get_rank())
    model = MLP()
    with pytest.raises(VerifyError, match=r"worker 1 was given a model with other first values.*manual_seed"):
        run(server_plan(2), model=model)


# ---- what is found ----


def find(plan: Plan, plant: Any, **changes: Any) -> Any:
    """The first difference of a plan with a plant, the same on all ranks; without it the plan passes."""
    run(plan, **changes).require()
    with pytest.MonkeyPatch.context() as patch:

        def planted(*args: Any, **kwargs: Any) -> Trainer:
            trainer = parallelize(*args, **kwargs)
            plant(patch, trainer)
            return trainer

        patch.setattr(verify_module, "parallelize", planted)
        outcome = run(plan, **changes)
    assert not outcome.ok and outcome.first is not None
    if dist.is_initialized():
        assert len(set(gathered(str(outcome.first)))) == 1
    return outcome.first


def scaled_pushes(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """What is sent is not what was computed."""
    real = ServerClient.push

    def push(self: Any, server: int, bucket: int, gradients: Any) -> None:
        real(self, server, bucket, [None if one is None else 2.0 * one for one in gradients])

    patch.setattr(ServerClient, "push", push)


@ranks(2)
def test_a_factor_that_adam_would_hide() -> None:
    first = find(server_plan(2), scaled_pushes, optimizer=ADAMW)
    assert (first.step, first.what, first.phase) == (1, "state", "update"), first
    assert first.name.endswith(" exp_avg") and first.ranks == (0,) and first.places == "every worker"
    assert (first.cause.kind, first.cause.axes) == ("factor", ("data",)), first.cause


@ranks(2)
def test_a_server_that_divides_by_another_number() -> None:
    def plant(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        real = updates.add_up

        def add_up(*given: Any, num_targets: float, **named: Any) -> Any:
            return real(*given, num_targets=2 * num_targets, **named)

        patch.setattr(updates, "add_up", add_up)

    first = find(server_plan(2, shards=2), plant)
    assert (first.step, first.what, first.places) == (1, "state", "every worker"), first
    assert first.cause.kind == "factor" and "too small by exactly 2" in first.cause.text


@ranks(2)
def test_a_factor_in_asynchronous_updates() -> None:
    first = find(server_plan(2, mode="async"), scaled_pushes)
    assert (first.step, first.what) == (1, "weight"), first


@ranks(2)
def test_gradients_that_one_worker_divides_by_another_number() -> None:
    def plant(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        sync = trainer.sync
        assert isinstance(sync, ServedSync)
        real = sync.commit
        wrong = 2.0 if dist.get_rank() == 1 else 1.0

        def commit(*, divisor: float, **said: Any) -> None:
            real(divisor=divisor * wrong, **said)

        sync.commit = commit  # type: ignore[method-assign]

    first = find(server_plan(2), plant)
    assert (first.step, first.what, first.ranks, first.places) == (1, "gradient", (1,), "worker 1"), first
    assert first.cause.kind == "factor" and "exactly 2" in first.cause.text


@pytest.mark.sampled(1, long=2)
@ranks(2)
@pytest.mark.parametrize("field", ["compensation", "lr_scaling"])
def test_a_rule_that_servers_do_not_follow(field: str) -> None:
    def plant(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        real = served.settings_of

        def settings(*args: Any, **kwargs: Any) -> Any:
            return dataclasses.replace(real(*args, **kwargs), **{field: {"compensation": 0.0}.get(field, "none")})

        patch.setattr(served, "settings_of", settings)

    asked: dict[str, Any] = {"compensation": 0.9} if field == "compensation" else {"lr_scaling": "staleness"}
    # Of two workers that begin together one is two updates behind in the end, and one at least at once.
    first = find(server_plan(2, mode="bounded", staleness=3, **asked), plant, sizes=(8, 8, 8, 8, 8, 8), on_step=hurry)
    assert first.what in ("loss", "gradient", "weight"), first


def hurry(step: int) -> None:
    time.sleep(0.1 * dist.get_rank())


def test_an_update_that_was_lost_or_made_twice() -> None:
    def record(ages: list[int]) -> WorkerRecord:
        return WorkerRecord(versions=[[0], [2], [3]], ages=[[one] for one in ages], is_made=[True] * len(ages))

    one = WorkerRecord(versions=[[0], [1]], ages=[[0]], is_made=[True])
    assert orders_of([one, record([1, 0])]) == [[(0, 0), (1, 0), (1, 1)]]
    with pytest.raises(VerifyError, match="step 1 of worker 0 and step 1 of worker 1 are both update 0 of server 0"):
        orders_of([one, record([0, 0])])
    with pytest.raises(VerifyError, match="update 2 of server 0 was made of no worker's gradient"):
        orders_of([one, record([1, 1])])
    with pytest.raises(VerifyError, match="update 0 of server 0 was made of no"):
        orders_of([record([1])])
