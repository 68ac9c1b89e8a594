"""A step that fails in the middle leaves messages under way: the pipeline stays failed, and says so."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks

from weft.errors import PlanError
from weft.training.trainer import Trainer


def plant_error(trainer: Trainer) -> None:
    """Let both stages raise: the first in its second forward pass, the last in the first one that it gets."""
    step = trainer.pipeline_step
    assert step is not None
    call, allowed = step.call, 1 - trainer.mesh.index("pipeline")

    def raising(microbatch: int) -> Any:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise ZeroDivisionError("planted")
        return call(microbatch)

    step.call = raising  # type: ignore[method-assign]


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("transport", [None, "c10d"])
@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_a_pipeline_that_failed_stays_failed(schedule: str, transport: str | None) -> None:
    inputs, targets = token_batch(4)
    plan = pipeline_plan(2, schedule=schedule, microbatches=2, transport=transport)
    trainer = make_trainer(small_gpt(tied=False), plan, example=inputs[:2], mesh=None)
    trainer.step(inputs, targets)
    trainer.flush()
    plant_error(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.step(inputs, targets)
    told = r"failed \(ZeroDivisionError: planted\).*make a new trainer, and load the last checkpoint"
    for again in (lambda: trainer.step(inputs, targets), trainer.flush, lambda: trainer.evaluate([(inputs, targets)])):
        with pytest.raises(RuntimeError, match=told):
            again()
    with pytest.raises(PlanError, match="make a new mesh"):
        make_trainer(small_gpt(tied=False), plan, example=inputs[:2], mesh=trainer.mesh)
    trainer.close()  # waits for nothing
