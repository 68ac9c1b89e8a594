"""Exchanges that are merged later, with one mistake in them: `weft verify` finds it in the steps it takes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from meshes import verify
from oracle import ADAMW, small_gpt, token_batch
from ranks import ranks

from weft.plan.check import check
from weft.plan.late_merges import steps_to_verify
from weft.plan.plan import Axes, Codec, Comm, Data, Plan
from weft.sync import streaming
from weft.sync.delayed import DelayedSync
from weft.sync.exchange.in_flight import ExchangesInFlight
from weft.sync.late_merge import LateMergeSync
from weft.verification.replicas import with_an_exchange

Fault = tuple[Any, str, Callable[..., Any]]
CODECS = {
    "none": Codec(),
    "topk": Codec(name="topk", density=0.1, dense_below=100),
    "terngrad": Codec(name="terngrad", dense_below=100),
    "powersgd": Codec(name="powersgd", rank=2, dense_below=100),
}


def without_anchor(self: Any, number: int, sent: Any) -> None:
    bucket = self._buckets[number]
    correction = sent.own[number][: bucket.numel].sub_(sent.mean[number][: bucket.numel])
    bucket.add(correction)
    self._add_norms(correction, self._anchors[number])


def anchor_stays(self: Any, number: int, weights: torch.Tensor) -> None:
    torch.sub(self._anchors[number], weights, out=weights)


def one_late(self: Any) -> bool:
    self.steps_done -= 1
    try:
        return MERGE_DUE(self)
    finally:
        self.steps_done += 1


def one_state(self: Any) -> Any:
    return self._turns[0] if self._turns else self._compressed


def forgetting(anchor: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor, **rates: float) -> None:
    NESTEROV(anchor, change, momentum.zero_(), **rates)


def without_residual(self: Any) -> Any:
    sent = NEW_EXCHANGE(self)
    for codec in sent.codecs.codecs:
        for name, tensor in codec.tensors().items():
            if name.startswith("residual"):
                tensor.zero_()
    return sent


def other_step(self: Any, *given: Any, step: int, **named: Any) -> Any:
    return CODED_MEAN(self, *given, step=step + 1, **named)


MERGE_DUE, NEW_EXCHANGE = LateMergeSync._merge_due, LateMergeSync.new_exchange
NESTEROV = streaming.nesterov_
CODED_MEAN = ExchangesInFlight.coded_mean
NOTHING: Fault = (DelayedSync, "_merge_bucket", DelayedSync._merge_bucket)
FAULTS: dict[str, Fault] = {
    "none": NOTHING,
    "the anchor is not corrected": (DelayedSync, "_merge_bucket", without_anchor),
    "the anchor stays behind": (DelayedSync, "_read_change", anchor_stays),
    "merged a step late": (LateMergeSync, "_merge_due", one_late),
    "exchanges share a state of powersgd": (DelayedSync, "_codecs_of_next", one_state),
    "outer momentum is forgotten": (streaming, "nesterov_", forgetting),
    "what was not sent is forgotten": (LateMergeSync, "new_exchange", without_residual),
    "random numbers of another step": (ExchangesInFlight, "coded_mean", other_step),
}


def delayed(delay: int | str, every: int = 1, codec: str = "none") -> Plan:
    data = Data(sync="delayed", delay=delay, every=every)
    return Plan(axes=Axes(data=2), data=data, codec=CODECS[codec], comm=Comm(bucket_bytes=2000))


def streamed(codec: str = "none") -> Plan:
    outer = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
    data = Data(sync="local", every=3, fragments=2, delay=2, mix=0.25, **outer)  # type: ignore[arg-type]
    return Plan(axes=Axes(data=2), data=data, codec=CODECS[codec], comm=Comm(bucket_bytes=2000))


REAL_SUM = ExchangesInFlight._sum


def sum_in_two_phases_wrong(self: Any, tensor: torch.Tensor, total: torch.Tensor, *, at_once: bool) -> Any:
    yield from REAL_SUM(self, tensor, total, at_once=at_once)
    if not at_once:
        total.mul_(1.5)


FAULTS["two phases sum wrong"] = (ExchangesInFlight, "_sum", sum_in_two_phases_wrong)
NUM_STEPS = 12
"""The most that `weft verify` takes by itself."""
LONG_STREAMING = Plan(
    axes=Axes(data=2),
    data=Data(sync="local", every=20, fragments=4, delay=4, outer="nesterov", outer_lr=0.7, outer_momentum=0.9),
)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        ("none", LONG_STREAMING),
        ("outer momentum is forgotten", LONG_STREAMING),
        ("the anchor is not corrected", delayed(20, 10)),
        ("what was not sent is forgotten", delayed(20, 10, codec="topk")),
        ("two phases sum wrong", delayed("auto")),
        ("the anchor is not corrected", delayed("auto")),
    ],
)
def test_verify_shortens_a_plan_so_that_it_still_finds_it(fault: str, plan: Plan) -> None:
    place, name, wrong = FAULTS[fault]
    num_steps = min(steps_to_verify(plan), NUM_STEPS)
    batches = [token_batch(6, seed=step) for step in range(num_steps)]
    model = small_gpt(num_layers=4 if plan.data.fragments > 1 else 1)
    with mock.patch.object(place, name, wrong):
        found = verify(model, plan, batches=batches, loss="cross-entropy", optimizer=ADAMW, device="cpu")
    assert (found.first is None) == (fault == "none"), found
    assert any("instead of" in note for note in found.notes)
    assert not any("sent after a merge" in note for note in found.notes)


def test_verify_says_what_too_few_steps_do_not_show() -> None:
    _, notes = with_an_exchange(delayed(4), num_steps=1)
    assert notes[1] == "nothing is merged in 1 steps; 3 show that, too"


@pytest.mark.parametrize("num_steps", range(1, 13))
@pytest.mark.parametrize("plan", [delayed(20, 10), delayed("auto"), LONG_STREAMING])
def test_a_shortened_plan_is_one_that_may_run(plan: Plan, num_steps: int) -> None:
    shorter, notes = with_an_exchange(plan, num_steps=num_steps)
    assert check(shorter, num_ranks=2) == []
    is_seen = steps_to_verify(shorter) <= num_steps
    assert is_seen or any(" is merged in " in note for note in notes)
    assert is_seen or num_steps < 6


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        ("none", delayed(2)),
        ("the anchor is not corrected", delayed(2)),
        ("the anchor is not corrected", delayed(4, 2)),
        ("the anchor stays behind", delayed(2, 2)),
        ("merged a step late", delayed(3)),
        ("merged a step late", streamed()),
        ("exchanges share a state of powersgd", delayed(2, codec="powersgd")),
        ("outer momentum is forgotten", streamed()),
        ("what was not sent is forgotten", delayed(2, codec="topk")),
        ("what was not sent is forgotten", streamed("topk")),
        ("random numbers of another step", delayed(2, codec="terngrad")),
    ],
)
def test_verify_finds_it(fault: str, plan: Plan) -> None:
    place, name, wrong = FAULTS[fault]
    batches = [token_batch(6, seed=step) for step in range(steps_to_verify(plan))]
    with mock.patch.object(place, name, wrong):
        found = verify(small_gpt(), plan, batches=batches, loss="cross-entropy", optimizer=ADAMW, device="cpu")
    assert (found.first is None) == (fault == "none"), found
    assert not any("sent after a merge" in note for note in found.notes)
