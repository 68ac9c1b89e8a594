"""Replicas in one process against real ranks under the same plan: losses, weights, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from pretend_gpu import no_waits, pretended_gpu
from ranks import ranks
from torch import Tensor, nn

from weft.errors import DamagedCheckpointError, DataError, ModelError, NotFiniteError, PlanError
from weft.plan.plan import ALL, Average, Axes, Codec, Data, Plan, Precision, Step
from weft.training.parallelize import parallelize
from weft.training.replicas_in_process import ReplicasInProcess
from weft.training.step import update
from weft.training.trainer import Trainer
from weft.world import World

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUM_STEPS = 11
DILOCO = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def local(data: int, **settings: Any) -> Plan:
    return Plan(axes=Axes(data=data), data=Data(**{"sync": "local", **settings}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, a model, and what it is trained with."""

    plan: Plan
    model: Callable[[], nn.Module] = functools.partial(small_gpt, dropout=0.2)
    optimizer: Any = ADAMW

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Of 8 samples; the last of an epoch of three steps is short."""
        make = image_batch if self.model is small_convnet else token_batch
        inputs, targets = make(8 if step % 3 else 7, seed=step)
        return inputs.float() if inputs.is_floating_point() else inputs, targets


CASES = {
    "local SGD": Case(plan=local(2, every=3)),
    "DiLoCo": Case(plan=local(2, every=4, **DILOCO)),
    "DiLoCo after steps together": Case(
        plan=dataclasses.replace(local(2, every=3, switch_step=4, **DILOCO), average=Average(decay=0.5, start=2))
    ),
    "BatchNorm": Case(plan=local(2, every=2), model=small_convnet, optimizer=MOMENTUM),
    "delayed": Case(plan=local(2, sync="delayed", delay=3, every=2)),
    "streaming": Case(plan=local(2, every=4, fragments=2, delay=1, mix=0.5, **DILOCO)),
    "streaming after steps together": Case(
        plan=dataclasses.replace(
            local(2, every=3, delay=1, switch_step=2), codec=Codec(name="topk", density=0.1, dense_below=100)
        )
    ),
    "delayed, compressed": Case(
        plan=dataclasses.replace(local(2, sync="delayed", delay=3), codec=Codec(name="onebit", dense_below=100)),
        optimizer=MOMENTUM,
    ),
    "half": Case(plan=dataclasses.replace(local(2, every=3, **DILOCO), codec=Codec(name="half"))),
    "bf16, clipped, microbatches": Case(
        plan=dataclasses.replace(
            local(2, every=2), precision=Precision(compute="bf16"), step=Step(clip_norm=0.5, microbatches=2)
        )
    ),
}
FOUR = {
    "DiLoCo": Case(plan=local(4, every=3, **DILOCO)),
    "BatchNorm": dataclasses.replace(CASES["BatchNorm"], plan=local(4, every=3)),
}


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.flush()
    return {name: tensor.detach().clone() for name, tensor in trainer.named_model.state_dict().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What replicas in process gave: for every replica its losses and its weights."""

    losses: list[list[float]]
    weights: list[dict[str, Tensor]]
    spread: float
    held_out: list[float]
    """Of the weights, and of their average where one is kept."""


def make(case: Case, **changes: Any) -> ReplicasInProcess:
    torch.manual_seed(0)
    given = {"loss": "cross-entropy", "optimizer": case.optimizer, "device": "cpu", **changes}
    trainer = parallelize(case.model(), case.plan, replicas_in_process=True, **given)
    assert isinstance(trainer, ReplicasInProcess)
    torch.manual_seed(1)
    return trainer


def held_out_losses(trainer: Trainer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    kinds = (False,) if trainer.average is None else (False, True)
    return [trainer.evaluate(batches, average=average) for average in kinds]


def play(case: Case) -> Played:
    trainer = make(case)
    losses = []
    for step in range(NUM_STEPS):
        mean = trainer.step(*case.batch(step))
        losses.append([float(loss) for loss in trainer.replica_losses])
        assert float(mean) == pytest.approx(sum(losses[-1]) / len(losses[-1]))
    held_out = held_out_losses(trainer, [case.batch(100), case.batch(101)])
    assert trainer.sync.spread is not None
    return Played(
        losses=losses,
        weights=[weights_of(one) for one in trainer.replicas],
        spread=float(trainer.sync.spread),
        held_out=held_out,
    )


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Played:
    """Of the case of this test, in pytest's own process."""
    return play(request.getfixturevalue("cases")[request.getfixturevalue("name")])


def compare(case: Case, played: Played, *, tolerance: float) -> None:
    """Train by this rank, and compare with the replica of its number."""
    torch.manual_seed(0)
    trainer = make_trainer(case.model(), case.plan, optimizer=case.optimizer)
    torch.manual_seed(1)
    for step in range(NUM_STEPS):
        batch = cut_evenly(case.batch(step), trainer.data_size)[trainer.data_rank]
        loss = float(trainer.step(*batch))
        assert loss == pytest.approx(played.losses[step][trainer.data_rank], rel=tolerance, abs=0), f"step {step}"
    for name, tensor in weights_of(trainer).items():
        expected = played.weights[trainer.data_rank][name]
        torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance, msg=name)
    if trainer.data_rank == 0:
        assert float(trainer.sync.spread) == pytest.approx(played.spread, rel=max(tolerance, 1e-12))
    parts = [cut_evenly(case.batch(number), trainer.data_size)[trainer.data_rank] for number in (100, 101)]
    assert held_out_losses(trainer, parts) == pytest.approx(played.held_out, rel=1e-6)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("cases", [CASES], ids=[""])
@pytest.mark.parametrize("name", CASES)
def test_two_replicas_equal_two_ranks_to_the_bit(name: str, cases: dict[str, Case], played: Played) -> None:
    compare(cases[name], played, tolerance=0)


@ranks(4)
@pytest.mark.parametrize("cases", [FOUR], ids=[""])
@pytest.mark.parametrize("name", ["DiLoCo", pytest.param("BatchNorm", marks=pytest.mark.long)])
def test_four_replicas_equal_four_ranks(name: str, cases: dict[str, Case], played: Played) -> None:
    compare(cases[name], played, tolerance=1e-6)


def go_on(trainer: Trainer, case: Case, until: int) -> list[list[float]]:
    """Losses of this process's replicas, up to a number of steps."""
    losses = []
    while trainer.steps_done < until:
        batch = case.batch(trainer.steps_done)
        if isinstance(trainer, ReplicasInProcess):
            trainer.step(*batch)
            losses.append([float(loss) for loss in trainer.replica_losses])
        else:
            losses.append([float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank]))])
    return losses


RESUMED = dataclasses.replace(CASES["DiLoCo"].plan, average=Average(decay=0.5), step=Step(microbatches=2))


@pytest.mark.parametrize(
    ("case", "wait"),
    [(Case(plan=RESUMED), False), (CASES["BatchNorm"], True)],
    ids=["DiLoCo, averaged, in the background", "BatchNorm"],
)
def test_a_resumed_run_goes_on_to_the_bit(case: Case, wait: bool, tmp_path: Path) -> None:
    with make(case) as whole:
        go_on(whole, case, 5)  # between two exchanges
        whole.extra_state["note"] = 7
        whole.data_position = 40
        whole.save(tmp_path / "five", wait=wait)
        expected = go_on(whole, case, 9)
        weights = [weights_of(one) for one in whole.replicas]
        held_out = held_out_losses(whole, [case.batch(100)])
        again = make(case)
        again.extra_state["note"] = 0
        whole.wait_for_save()
        again.load(tmp_path / "five")
        assert (again.steps_done, again.data_position, again.extra_state["note"]) == (5, 40, 7)
        assert go_on(again, case, 9) == expected
        for one, others in zip(again.replicas, weights, strict=True):
            for name, tensor in weights_of(one).items():
                torch.testing.assert_close(tensor, others[name], rtol=0, atol=0, msg=name)
        assert held_out_losses(again, [case.batch(100)]) == held_out


@ranks(2)
@pytest.mark.parametrize("name", ["DiLoCo", pytest.param("BatchNorm", marks=pytest.mark.long)])
def test_real_ranks_go_on_from_a_checkpoint_of_theirs_and_they_from_one_of_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def real() -> Trainer:
        torch.manual_seed(0)
        made = make_trainer(case.model(), case.plan, optimizer=case.optimizer)
        torch.manual_seed(1)
        return made

    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    trainer = real()
    go_on(trainer, case, 5)
    trainer.save(tmp_path / "real")
    expected = go_on(trainer, case, 9)
    if dist.get_rank() == 0:
        with mock.patch("weft.training.parallelize.join_world", return_value=alone):
            played, second = make(case), make(case)
        go_on(second, case, 5)
        second.save(tmp_path / "played")
        played.load(tmp_path / "real")
        assert [losses[:1] for losses in go_on(played, case, 9)] == expected
        for key, tensor in weights_of(trainer).items():
            torch.testing.assert_close(tensor, weights_of(played)[key], rtol=0, atol=0)
    dist.barrier()
    trainer = real()
    trainer.load(tmp_path / "played")
    assert go_on(trainer, case, 9) == expected


def test_a_checkpoint_loads_from_the_average_under_another_plan(tmp_path: Path) -> None:
    case = CASES["DiLoCo"]
    trainer = make(case)
    go_on(trainer, case, 6)
    trainer.save(tmp_path / "six")
    trainer.export(tmp_path / "weights")
    alone = parallelize(case.model(), Plan(), loss="cross-entropy", optimizer=ADAMW, device="cpu")
    alone.load(tmp_path / "six")
    read = parallelize(
        case.model(), Plan(), loss="cross-entropy", optimizer=ADAMW, weights=tmp_path / "weights", device="cpu"
    )
    first, second = (weights_of(one) for one in trainer.replicas)
    for name, tensor in weights_of(alone).items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weights_of(read)[name], tensor, rtol=0, atol=0)
    batch = case.batch(100)
    assert alone.evaluate([batch]) == pytest.approx(trainer.evaluate([batch]), rel=1e-6)
    assert not torch.equal(first["head.weight"], second["head.weight"])
    for name, tensor in weights_of(trainer).items():
        torch.testing.assert_close(tensor, first[name], rtol=0, atol=0)
    assert alone.generate([1, 2], num_tokens=5, context=8) == trainer.generate([1, 2], num_tokens=5, context=8)
    trainer.close()
    for name, tensor in trainer.named_model.state_dict().items():
        torch.testing.assert_close(tensor, weights_of(alone)[name], rtol=1e-6, atol=1e-7)


def test_a_damaged_checkpoint_changes_no_replica(tmp_path: Path) -> None:
    case = CASES["DiLoCo"]
    trainer = make(case)
    go_on(trainer, case, 2)
    trainer.save(tmp_path / "two")
    file = tmp_path / "two" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    other = make(dataclasses.replace(case, model=functools.partial(small_gpt, dropout=0.1)))
    before = [weights_of(one) for one in other.replicas]
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        other.load(tmp_path / "two")
    for one, kept in zip(other.replicas, before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in weights_of(one).items())


def test_one_replica_that_is_not_finite_is_named_and_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(plan=local(2, every=3), model=small_convnet, optimizer=MOMENTUM)
    trainer = make(case, skip_at_most=1)
    inputs, targets = case.batch(1)
    inputs[-1] = float("nan")  # replica 1's
    with pytest.raises(NotFiniteError, match="replica 1"):
        for _ in range(6):
            trainer.step(inputs, targets)
    assert {one.steps_done for one in trainer.replicas} == {trainer.steps_done}
    assert trainer.num_skipped == trainer.steps_done
    assert "step 1 of replica 1 is skipped" in caplog.text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(axes=Axes(data=2)), "nothing differs"),
        (Plan(axes=Axes(data=2, tensor=2), data=Data(sync="local")), "tensor = 2"),
        (Plan(axes=Axes(replicate=2, data=2), data=Data(sync="local", shard="optimizer")), "data = 2"),
        (Plan(axes=Axes(data=ALL), data=Data(sync="local")), "write the number of replicas"),
    ],
    ids=["all-reduce", "tensor", "ZeRO", "all"],
)
def test_other_plans_are_refused_with_what_to_do(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parallelize(small_gpt(), plan, loss="cross-entropy", optimizer=ADAMW, device="cpu", replicas_in_process=True)


def test_a_steady_step_of_all_replicas_never_waits() -> None:
    """The steps looked at are one between exchanges, and one with."""
    plan = dataclasses.replace(local(2, every=2, **DILOCO), step=Step(clip_norm=1.0), average=Average(decay=0.9))
    case = Case(plan=plan, model=small_gpt, optimizer=functools.partial(ADAMW, fused=True))
    with mock.patch.object(update, "can_skip_on_device", lambda _: True):
        trainer = make(case)
    with pretended_gpu():
        for step in range(4):
            trainer.step(*case.batch(3 * step + 1))
        with no_waits():
            losses = [trainer.step(*case.batch(3 * step + 1)) for step in (4, 5)]
        trainer.flush()
    assert all(loss.isfinite() for loss in losses) and trainer.num_skipped == 0


def test_what_has_no_meaning_in_one_process_is_refused() -> None:
    case = CASES["DiLoCo"]
    with pytest.raises(PlanError, match="leave mesh out"):
        make(case, mesh=make(case).mesh)
    with pytest.raises(PlanError, match="on the meta device"):
        make(case, device="meta")


@pytest.mark.parametrize("start", [0, 5], ids=["average has begun", "average has not begun"])
def test_replicas_are_left_alone_while_the_model_has_an_average(start: int, tmp_path: Path) -> None:
    """Also before the average begins: what the model has then is the mean of its replicas, not their weights."""
    plan = dataclasses.replace(local(2, every=3), average=Average(decay=0.9, start=start))
    trainer = make(Case(plan=plan))
    trainer.step(*token_batch(4))
    trainer.save(tmp_path / "saved")
    before = [weights_of(one) for one in trainer.replicas]
    with trainer.averaged():
        for call in (
            lambda: trainer.step(*token_batch(4)),
            lambda: trainer.save(tmp_path / "inside"),
            lambda: trainer.export(tmp_path / "inside"),
            lambda: trainer.load(tmp_path / "saved"),
        ):
            with pytest.raises(ModelError, match=r"inside trainer\.averaged\(\)"):
                call()
    after = [weights_of(one) for one in trainer.replicas]
    assert all(torch.equal(one[name], old[name]) for one, old in zip(after, before, strict=True) for name in old)
    assert [one.steps_done for one in trainer.replicas] == [1, 1]


def test_an_empty_global_batch_is_refused() -> None:
    trainer = make(Case(plan=local(2, every=3)))
    with pytest.raises(DataError, match="global batch is empty"):
        trainer.step(*token_batch(0))
    assert trainer.steps_done == 0


def test_a_resume_warns_of_a_missing_average_only_where_it_would_have_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of replicas that differ the average begins after an exchange: here after step 3, not after step 1."""
    plan = dataclasses.replace(local(2, every=3), average=Average(decay=0.9, start=1))
    trainer = make(Case(plan=plan))
    for step in range(2):
        trainer.step(*token_batch(4, seed=step))
    trainer.save(tmp_path / "saved")
    make(Case(plan=plan)).load(tmp_path / "saved")
    assert "no average" not in caplog.text
