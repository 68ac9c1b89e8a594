"""Plans that are not plain training: held to the rule they obey, and their deviation from plain training measured."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import mixed
from meshes import verify
from oracle import SGD, data_plan, pipeline_plan, small_gpt, tensor_plan, token_batch
from ranks import ranks
from streamed import ADAMW, Net, batches_of, stream_plan

from weft.errors import VerifyError
from weft.plan.plan import Plan
from weft.training.trainer import Trainer
from weft.verification import verify as verify_module
from weft.verification.oracles import rule_of
from weft.verification.verdict import Deviation, Verification

RATE = [1.0, 0.5, 0.25, 0.8, 0.7, 0.1].__getitem__


def run(model: torch.nn.Module, plan: Plan, batches: list[Any], optimizer: Any = SGD, **more: Any) -> Verification:
    return verify(model, plan, loss="cross-entropy", optimizer=optimizer, batches=batches, device="cpu", **more)


# ---- late weights ----


def flush_free(schedule: str, num_stages: int, microbatches: int, **changes: Any) -> Plan:
    if schedule == "vertical sync":
        return stream_plan("pipedream", num_stages, microbatches, vertical_sync=True, **changes)
    return stream_plan(schedule, num_stages, microbatches, **changes)


def check(plan: Plan, sizes: tuple[int, ...], **settings: Any) -> None:
    outcome = run(Net(), plan, batches_of(*sizes), **settings).require()
    assert outcome.rule == "one process with delayed weights" and outcome.first is None
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight"}
    assert {one.name for one in outcome.differences if one.what == "weight"} == set(dict(Net().named_parameters()))
    deviation = outcome.deviation
    assert deviation is not None and deviation.movement is not None
    assert 1e-4 < deviation.loss < 1 and 1e-3 < deviation.movement < 10, deviation
    assert "deviation from one process without delays: loss" in str(deviation)


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_two_stages_obey_their_rule(schedule: str) -> None:
    check(flush_free(schedule, 2, 3), (6, 7, 5, 9), optimizer=ADAMW, schedule=RATE)


@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("schedule", ["vertical sync", "2bw"])
def test_four_stages_obey_their_rule(schedule: str) -> None:
    clip_norm = 0.4 if schedule == "2bw" else 0.0
    check(flush_free(schedule, 4, 4, clip_norm=clip_norm), (8, 9, 11, 8))


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_beside_data_parallelism(schedule: str) -> None:
    check(flush_free(schedule, 2, 3, data=2), (12, 15, 13, 12))


@ranks(2)
def test_a_tied_gpt_of_two_stages() -> None:
    plan = pipeline_plan(2, schedule="2bw", microbatches=2)
    outcome = run(small_gpt(), plan, [token_batch(6, seed=seed) for seed in range(3)]).require()
    assert outcome.deviation is not None and outcome.deviation.loss > 0


@ranks(2)
def test_a_version_that_is_not_the_rules_is_found() -> None:
    """The rule is changed here, as if no weights were late: the pipeline does not obey that."""
    plan = flush_free("pipedream", 2, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.verification.delayed_weights.version_used", lambda *args, **kwargs: args[3])
        outcome = run(Net(), plan, batches_of(6, 7, 5))
    assert not outcome.ok and outcome.first is not None
    assert (outcome.first.what, outcome.first.step) in (("weight", 1), ("loss", 1)), outcome.first
    with pytest.raises(VerifyError, match="does not give the answer of one process with delayed weights"):
        outcome.require()


def test_every_plan_has_a_rule() -> None:
    assert rule_of(Plan()).rule == rule_of(pipeline_plan(2, microbatches=2)).rule == "one process"
    assert not rule_of(flush_free("2bw", 2, 2)).is_exact


# ---- 16 bits ----


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize(
    ("plan", "loss", "gradient"),
    [
        (mixed(data_plan(2, microbatches=2), compute="bf16"), 1e-2, 1e-1),
        (mixed(data_plan(2, shard="parameters"), compute="bf16", reduce="bf16"), 1e-2, 1e-1),
        (mixed(tensor_plan(2), compute="fp16"), 1e-3, 1e-2),
    ],
    ids=["bf16", "bf16, zero 3", "fp16, tensor"],
)
def test_rounding_is_measured_after_the_algebra(plan: Plan, loss: float, gradient: float) -> None:
    outcome = run(small_gpt(), plan, [token_batch(8, seed=seed) for seed in range(3)]).require()
    assert outcome.tolerance == 1e-10 and outcome.is_equal
    deviation = outcome.deviation
    assert deviation is not None and deviation.against == "one process in float32"
    assert 1e-8 < deviation.loss < loss, deviation
    assert deviation.gradient is not None and 1e-5 < deviation.gradient < gradient, deviation


def run_with_wrong_16_bits(change: Callable[[Trainer, Any], Any]) -> Verification:
    """A plan that is right in float64; in bf16 `change` is applied to the trainer and its loss after every step."""
    real = verify_module.parallelize

    def tampered(model: Any, given: Plan, **settings: Any) -> Trainer:
        trainer = real(model, given, **settings)
        if given.precision.compute == "bf16":
            step = trainer.step
            trainer.step = lambda *args: change(trainer, step(*args))  # type: ignore[method-assign]
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "parallelize", tampered)
        outcome = run(small_gpt(), mixed(data_plan(2), compute="bf16"), [token_batch(8)])
    assert outcome.is_equal and not outcome.ok
    return outcome


@ranks(2)
@pytest.mark.parametrize("wrong", [2.0, math.nan])
def test_a_loss_that_no_rounding_explains_fails(wrong: float) -> None:
    outcome = run_with_wrong_16_bits(lambda trainer, loss: loss * wrong)
    with pytest.raises(VerifyError, match="not finite" if math.isnan(wrong) else "100.0% from one process in float32"):
        outcome.require()


@ranks(2)
def test_gradients_that_no_rounding_explains_fail() -> None:
    """As from a loss scale that is not removed: under Adam the loss would not show it."""

    def double(trainer: Trainer, loss: Any) -> Any:
        for piece in trainer.sync.pieces:
            if piece.tensor.grad is not None:
                piece.tensor.grad *= 2
        return loss

    with pytest.raises(VerifyError, match=r"gradients that are 1\d\d\.\d% from one process in float32"):
        run_with_wrong_16_bits(double).require()


def test_a_plan_that_skipped_every_step_was_not_measured() -> None:
    measured = Deviation(against="one process in float32", loss=0.0, gradient=0.0, limit=0.05, num_steps=3)
    assert measured.problem is None and dataclasses.replace(measured, num_skipped=2).problem is None
    assert "all 3 steps" in str(dataclasses.replace(measured, num_skipped=3).problem)
    assert "gradients" in str(dataclasses.replace(measured, gradient=math.inf).problem)


@ranks(2)
def test_plain_plans_have_no_deviation() -> None:
    outcome = run(small_gpt(), data_plan(2), [token_batch(4)], functools.partial(torch.optim.SGD, lr=0.1))
    assert outcome.require().deviation is None and outcome.rule == "one process"
