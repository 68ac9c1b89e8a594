"""The bytes of a pipeline: those counted equal those predicted by `plan/partition/wire.py`, and the formula."""

from __future__ import annotations

import pytest
from oracle import make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks

from weft.plan.partition.wire import pipeline_bytes
from weft.plan.plan import Plan


def check(plan: Plan, *, tied: bool) -> None:
    """4 samples per microbatch, 8 tokens, 16 channels of 8 bytes; the embedding is 17 x 16."""
    samples = 4 * plan.step.microbatches
    inputs, targets = token_batch(samples)
    trainer = make_trainer(small_gpt(num_layers=4, tied=tied).double(), plan, example=inputs[:4])
    trainer.step(inputs, targets)
    before = trainer.mesh.traffic["pipeline"].sent_bytes
    trainer.step(inputs, targets)
    counted = trainer.mesh.traffic["pipeline"].sent_bytes - before
    crossing = (4 * 8 * 16 * 8, 4 * 8 * 16 * 8)
    num_stages, rank = plan.axes.pipeline * plan.pipeline.chunks, trainer.mesh.index("pipeline")
    is_end = rank in (0, plan.axes.pipeline - 1)
    expected = pipeline_bytes(
        [crossing] * (num_stages - 1), plan, rank=rank, tied=[(17 * 16 * 8, 2)] if tied and is_end else []
    )
    assert counted == expected > 0


PLANS = {
    "1f1b": pipeline_plan(2, microbatches=3, cuts=(2,)),
    "interleaved": pipeline_plan(2, schedule="interleaved", chunks=2, microbatches=4, cuts=(1, 2, 3)),
    "zero-bubble, clipped": pipeline_plan(2, schedule="zero-bubble", microbatches=2, clip_norm=0.1, cuts=(2,)),
}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tied", [False, True])
def test_counted_bytes_are_those_predicted(name: str, tied: bool) -> None:
    check(PLANS[name], tied=tied)


@ranks(4)
def test_a_middle_stage_sends_both_ways() -> None:
    check(pipeline_plan(4, microbatches=2, cuts=(1, 2, 3)), tied=True)


def test_the_formula() -> None:
    """1F1B of p stages and m microbatches: a middle stage sends m activations and m gradients of b s h numbers."""
    crossing = (1000, 1000)
    plan = pipeline_plan(4, microbatches=8)
    sent = [pipeline_bytes([crossing] * 3, plan, rank=rank) for rank in range(4)]
    assert sent == [8000, 16000 + 32, 16000 + 32, 8000 + 32]
    twice = pipeline_plan(4, schedule="interleaved", chunks=2, microbatches=8)
    assert pipeline_bytes([crossing] * 7, twice, rank=1) == 32000 + 32, "v chunks send v times as much"
