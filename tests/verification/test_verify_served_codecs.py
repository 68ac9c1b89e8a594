"""`verify` on plans with servers and codecs: every codec equals its rule, and what is not done by it is found."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import MLP, batch_of, small_gpt, token_batch
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_rules import some_codec
from served_training import leave_group, server_plan
from torch import Tensor, nn

from weft.plan.plan import CODECS, Codec, Plan
from weft.server.weights.decoder import Decoder
from weft.sync.push_codecs import PushCodecs
from weft.verification.verify import Verification, verify

COMPRESSING = [name for name in CODECS if name != "half"]


def nesterov(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True)


def coded(name: str, *, workers: int = 2, settings: dict[str, Any] | None = None, **server: Any) -> Plan:
    return dataclasses.replace(server_plan(workers, **server), codec=some_codec(name, **(settings or {})))


def run(plan: Plan, *, model: nn.Module | None = None, sizes: Any = (8, 5, 1, 8), **changes: Any) -> Verification:
    torch.manual_seed(0)
    batches = [batch_of(size, seed) for seed, size in enumerate(sizes)]
    given = {"loss": "cross-entropy", "optimizer": nesterov, "batches": batches, "device": "cpu", **changes}
    with servers_in_threads():
        return verify(MLP() if model is None else model, plan, **given)


def require_compared(outcome: Verification, *more: str) -> None:
    outcome.require()
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight", *more}
    # What the rule does to training, which is no rounding.
    assert outcome.deviation is not None and outcome.deviation.movement is not None
    assert outcome.deviation.movement > 1e-6


@pytest.mark.sampled(2, long=7)
@ranks(2)
@pytest.mark.parametrize("name", COMPRESSING)
def test_workers_that_share_a_batch_equal_the_rules_of_their_codecs(name: str) -> None:
    """With batches of which one worker has little or nothing, and a norm that is clipped where that goes."""
    clip_norm = 0.0 if name in ("dgc", "sign") else 0.05
    outcome = run(coded(name, shards=2, clip_norm=clip_norm, bucket_bytes=300))
    assert outcome.rule == "one process that compresses for all workers"
    require_compared(outcome, "state")
    assert len(set(gathered(str(outcome)))) == 1


@pytest.mark.sampled(1, long=3)
@pytest.mark.parametrize(
    "plan",
    [
        coded("topk", workers=1, mode="async", shards=2),
        coded("dgc", workers=1, mode="bounded", staleness=2, compensation=0.5),
        coded("powersgd", workers=1, settings=dict(rank=1)),
        coded("dgc", workers=1, settings=dict(clip=0.02)),
    ],
)
def test_one_worker_equals_the_rule_of_its_codec(plan: Plan) -> None:
    require_compared(run(plan), "state")


@pytest.mark.sampled(1, long=6)
@ranks(2)
@pytest.mark.parametrize(
    "plan",
    [
        *(
            coded(name, mode="async", shards=2, compensation=0.7, lr_scaling="staleness")
            for name in COMPRESSING
            if name != "sign"  # a vote of one worker
        ),
        coded("topk", mode="bounded", staleness=1, settings=dict(bits=8, density=0.3)),
    ],
)
def test_asynchronous_workers_equal_a_replay_with_the_rules_of_their_codecs(plan: Plan) -> None:
    def slow(step: int) -> None:
        time.sleep(0.03 * dist.get_rank() * (step % 2))

    outcome = run(plan, on_step=slow, sizes=(8, 5, 1, 8, 8))
    assert outcome.rule == "one process that replays the order of updates"
    require_compared(outcome)


@pytest.mark.long
@ranks(2)
def test_dgc_clips_the_share_of_each_worker_and_warms_up() -> None:
    for mode in ("sync", "async"):
        outcome = run(coded("dgc", mode=mode, settings=dict(clip=0.02, warmup_steps=500)))
        require_compared(outcome)
        assert any("warm-up was cut from 500 steps" in note for note in outcome.notes)


@pytest.mark.sampled(long=2)
@pytest.mark.long
@ranks(4, fresh=True)
@pytest.mark.parametrize(
    ("name", "axes", "server"),
    [
        ("topk", {"tensor": 2}, {"shards": 2}),
        ("qsgd", {"pipeline": 2}, {"mode": "async", "shards": 2}),
        ("powersgd", {"tensor": 2}, {"mode": "async"}),
        ("dgc", {"pipeline": 2}, {"shards": 2}),
        ("onebit", {"ring": 2}, {"shards": 2}),
    ],
)
def test_workers_of_two_ranks_compress_what_each_has(name: str, axes: dict[str, int], server: dict[str, Any]) -> None:
    leave_group()
    plan = coded(name, bucket_bytes=4096, microbatches=2, **server)
    plan = dataclasses.replace(plan, axes=dataclasses.replace(plan.axes, **axes))
    batches = [token_batch(size, seed=seed) for seed, size in enumerate((8, 6, 8))]
    require_compared(run(plan, model=small_gpt(), batches=batches))


class Routed(nn.Module):
    """The first value of a batch says which of two layers it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers[int(inputs[0, 0] > 0)](inputs)
        return output


def test_what_was_kept_is_sent_without_a_gradient_too() -> None:
    batches = []
    for step, route in enumerate([0, 0, 1, 1, 0]):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 6, dtype=torch.float64, generator=generator)
        inputs[:, 0] = 1.0 if route else -1.0
        batches.append((inputs, torch.randint(0, 3, (4,), generator=generator)))
    require_compared(run(coded("topk", workers=1, settings=dict(density=0.2)), model=Routed(), batches=batches))


@ranks(2)
def test_half_is_measured_and_not_compared() -> None:
    batches = [token_batch(8, seed=seed) for seed in range(2)]
    plan = dataclasses.replace(server_plan(2), codec=Codec(name="half"))
    outcome = run(plan, model=small_gpt(), batches=batches).require()
    assert outcome.rule == "one process" and outcome.deviation is not None
    assert 0 < outcome.deviation.loss < 0.05


# ---- what is found ----


def find(plan: Plan) -> Any:
    outcome = run(plan)
    assert not outcome.ok and outcome.first is not None
    return outcome.first


def test_a_codec_that_forgets_what_it_did_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PushCodecs.end

    def end(self: PushCodecs, *, is_made: bool, unit: float = 1.0) -> None:
        real(self, is_made=False, unit=unit)

    monkeypatch.setattr(PushCodecs, "end", end)
    first = find(coded("topk", workers=1))
    assert first.what in ("state", "weight") and first.step == 2, first
    assert first.cause.kind == "codec" and "gradients are right, and servers updated with others" in first.cause.text


def test_a_unit_of_what_is_kept_that_is_not_that_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PushCodecs.end

    def end(self: PushCodecs, *, is_made: bool, unit: float = 1.0) -> None:
        real(self, is_made=is_made, unit=1.0)

    monkeypatch.setattr(PushCodecs, "end", end)
    first = find(coded("topk", workers=1))
    assert first.what in ("state", "weight") and first.step == 3, first  # sizes change in the second step
    assert first.cause.kind == "codec", first.cause


def test_servers_that_decode_to_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.decode

    def decode(self: Decoder, bucket: int, push: Any, *, scale: float) -> Any:
        return real(self, bucket, push, scale=2 * scale)

    monkeypatch.setattr(Decoder, "decode", decode)
    first = find(coded("qsgd", workers=1))
    assert first.what in ("state", "weight") and first.step == 1, first
    assert first.cause.kind == "factor" and "exactly 2 times" in first.cause.text
