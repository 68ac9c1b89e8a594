"""Flush-free pipelines between runs: checkpoints go on to the bit, and other plans can write and read them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from oracle import ADAMW, data_plan
from ranks import gathered, ranks
from sequential import Weights
from streamed import Net, assert_same, batches_of, expect, make_streaming, run, stream_plan, streaming
from torch import Tensor

from weft.plan.pipeline.communication import FLUSH_FREE
from weft.training.trainer import Trainer

SCHEDULES = pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
PLAIN = functools.partial(torch.optim.SGD, lr=0.1)
BATCHES = batches_of(6, 7, 6, 5, 6, 9)


def copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.named_model.named_parameters()}


@pytest.mark.sampled(1)
@ranks(2)
@SCHEDULES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_goes_on_to_the_bit(schedule: str, dropout: float, tmp_path: Path) -> None:
    plan = stream_plan(schedule, 2, 3)
    whole = make_streaming(plan, Net(dropout=dropout), optimizer=ADAMW)
    kept = run(whole, BATCHES[:3])
    whole.save(tmp_path / "three")
    on = run(whole, BATCHES[3:])
    resumed = make_streaming(plan, Net(dropout=dropout), optimizer=ADAMW)
    run(resumed, BATCHES[4:])
    resumed.load(tmp_path / "three")
    assert float(streaming(resumed)._latest) == kept[-1]
    assert run(resumed, BATCHES[3:]) == on
    assert_same(resumed, copied(whole))
    if schedule == "2bw" and not dropout:
        assert_same(resumed, expect(plan, BATCHES, optimizer=ADAMW).run.history[-1])
        assert streaming(resumed).versions.live == (5, 6)


def with_weights(weights: Weights) -> Net:
    net = Net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(weights[name])
    return net


PLANS = {
    "pipedream": stream_plan("pipedream", 2, 3),
    "2bw": stream_plan("2bw", 2, 3),
    "2bw, other cuts": dataclasses.replace(
        stream_plan("2bw", 2, 3), pipeline=dataclasses.replace(stream_plan("2bw", 2, 3).pipeline, cuts=(3,))
    ),
    "1f1b": stream_plan("1f1b", 2, 3),
    "data": data_plan(2, microbatches=3),
}


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2bw", "1f1b"),
        ("pipedream", "data"),
        ("1f1b", "2bw"),
        ("data", "pipedream"),
        ("pipedream", "2bw"),
        ("2bw", "pipedream"),
        ("2bw", "2bw, other cuts"),
    ],
)
def test_another_plan_goes_on(before: str, after: str, tmp_path: Path) -> None:
    """From the newest weights alone: what is learnt next is what the plan learns from such a beginning."""
    first = make_streaming(PLANS[before], optimizer=PLAIN)
    for inputs, targets in BATCHES[:2]:
        first.step(inputs, targets)
    first.save(tmp_path / "two")
    held = {name: weight for part in gathered(copied(first)) for name, weight in part.items()}
    second = make_streaming(PLANS[after], optimizer=PLAIN)
    for batch in BATCHES[3:5]:
        second.step(*batch)
    second.load(tmp_path / "two")
    assert second.steps_done == 2
    assert_same(second, held)
    if PLANS[after].pipeline.schedule in FLUSH_FREE:
        run(second, BATCHES[2:])
        expected = expect(PLANS[after], BATCHES[2:], optimizer=PLAIN, model=with_weights(held))
        assert_same(second, expected.run.history[-1])
