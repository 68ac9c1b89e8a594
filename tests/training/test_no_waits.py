"""No host synchronisation in a steady step: every kind of plan on a pretended GPU, and skipped steps found late."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from by_hand import masters, mixed
from oracle import (
    MLP,
    batch_of,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from pretend_gpu import HostWaitError, no_waits, pretended_gpu
from ranks import ranks
from torch import nn

from weft.parallel.sequence.device_assertion import DeviceAssertion
from weft.plan.plan import Average, Axes, Codec, Data, Plan, Recompute, Step
from weft.training.step import precision, update
from weft.training.step.async_scalars import AsyncScalars
from weft.training.step.precision import LossScale
from weft.training.trainer import Trainer

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
CLIPPED: dict[str, Any] = {"microbatches": 2, "clip_norm": 1.0}
AVERAGE = Average(decay=0.9)
NESTEROV: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
PLANS: dict[str, Plan] = {
    "data": dataclasses.replace(data_plan(2, **CLIPPED), average=AVERAGE),
    "data, balanced": Plan(axes=Axes(data=2), step=Step(microbatches=2), data=Data(balance=True)),
    "zero 1, bf16": mixed(data_plan(2, shard="optimizer", **CLIPPED), compute="bf16"),
    "zero 3, fp16": dataclasses.replace(
        mixed(data_plan(2, shard="parameters", **CLIPPED), compute="fp16"), average=AVERAGE
    ),
    "tensor": tensor_plan(2, **CLIPPED),
    "tensor, split tokens": tensor_plan(2, sequence=True, **CLIPPED),
    "ring": sequence_plan(ring=2, **CLIPPED),
    "ring self-attention": sequence_plan(ring=2, variant="ring-self-attention", **CLIPPED),
    "ulysses": sequence_plan(ulysses=2, **CLIPPED),
    "ulysses, recomputed": dataclasses.replace(
        sequence_plan(ulysses=2, **CLIPPED), recompute=Recompute(policy="selective")
    ),
    "1f1b": pipeline_plan(2, **CLIPPED),
    "zero-bubble, not clipped": pipeline_plan(2, schedule="zero-bubble", microbatches=2),
    "2bw": pipeline_plan(2, schedule="2bw", **CLIPPED),
    "local": dataclasses.replace(data_plan(2, **CLIPPED), data=Data(sync="local", every=2), average=AVERAGE),
    "local, nesterov, fp16": mixed(
        dataclasses.replace(data_plan(2, **CLIPPED), data=Data(sync="local", every=2, **NESTEROV)), compute="fp16"
    ),
}
"""Of local steps the fourth exchanges, and is looked at as the others are."""


QUICK = ("zero 3, fp16", "tensor, split tokens", "ulysses", "1f1b", "local, nesterov, fp16")


@pytest.mark.sampled(3, long=3)
@ranks(2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_a_steady_step_never_waits(name: str) -> None:
    heads = {"heads": 6, "kv_heads": 3, "hidden": 24} if "ulysses" in name else {}
    trainer = trainer_of(small_gpt(**heads), PLANS[name], example=token_batch(4)[0])
    parts = [cut_evenly(token_batch(8, seed=step), trainer.data_size)[trainer.data_rank] for step in range(5)]
    with pretended_gpu():
        for part in parts[:3]:
            trainer.step(*part)
        with no_waits():
            losses = [trainer.step(*part) for part in parts[3:]]
        trainer.flush()
        for parameter in trainer.model.parameters():
            parameter.detach()  # what is still gathered after the last update is waited for while there is a "GPU"
    assert all(loss.isfinite() for loss in losses) and trainer.num_skipped == 0


CODECS = {
    "topk": Codec(name="topk", density=0.05),
    "topk, 8 bits": Codec(name="topk", density=0.05, bits=8),
    "topk, 2 bits": Codec(name="topk", density=0.05, bits=2),
    "dgc": Codec(name="dgc", density=0.05),
    "dgc, clipped": Codec(name="dgc", density=0.05, clip=1.0),
    "onebit": Codec(name="onebit"),
    "sign": Codec(name="sign"),
    "qsgd": Codec(name="qsgd"),
    "terngrad": Codec(name="terngrad"),
    "powersgd": Codec(name="powersgd", rank=2),
}


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dgc" else pytest.mark.long) for name in CODECS]
)
def test_a_steady_step_with_a_codec_never_waits(name: str) -> None:
    """The device decides whether the step counts, and codecs and DGC's momentum follow it."""
    plan = Plan(axes=Axes(data=2), codec=dataclasses.replace(CODECS[name], dense_below=64))
    trainer = trainer_of(
        small_gpt().float(), plan, optimizer=functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)
    )
    parts = [cut_evenly(token_batch(8, seed=step), 2)[trainer.data_rank] for step in range(5)]
    with pretended_gpu():
        for part in parts[:3]:
            trainer.step(*part)
        with no_waits():
            losses = [trainer.step(*part) for part in parts[3:]]
        trainer.flush()
    assert all(loss.isfinite() for loss in losses) and trainer.num_skipped == 0


@ranks(2)
def test_batch_norm_never_waits() -> None:
    trainer = trainer_of(small_convnet().float(), data_plan(2, **CLIPPED))
    images, classes = cut_evenly(image_batch(8), 2)[trainer.data_rank]
    with pretended_gpu():
        for _ in range(3):
            trainer.step(images.float(), classes)
        with no_waits():
            trainer.step(images.float(), classes)


def test_a_loss_of_the_users_own_waits_in_the_first_step_only() -> None:
    """Also one that is watched for targets of -100, which no trial knows how to add up."""
    parts = [batch_of(6, seed=seed) for seed in range(4)]

    def mixed_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, targets) + output.square().mean()

    for loss in (nn.functional.cross_entropy, mixed_loss):
        with mock.patch.object(update, "can_skip_on_device", lambda _: True):
            trainer = make_trainer(MLP().float(), data_plan(1, **CLIPPED), optimizer=ADAMW, loss=loss)
        with pretended_gpu():
            for inputs, targets in parts[:3]:
                trainer.step(inputs.float(), targets)
            with no_waits():
                trainer.step(parts[3][0].float(), parts[3][1])


def trainer_of(model: nn.Module, plan: Plan, **given: Any) -> Trainer:
    """A trainer whose optimizer skips by itself, as on a GPU."""
    with mock.patch.object(update, "can_skip_on_device", lambda _: True):
        return make_trainer(model, plan, **{"optimizer": ADAMW, "loss": "cross-entropy"} | given)


def test_what_waits_is_found() -> None:
    with pretended_gpu(), no_waits():
        three = torch.ones(3)
        three[:2] = 2.0
        for wait in (lambda: bool(three.sum() > 1), lambda: torch.as_tensor(1.0), lambda: three.__setitem__(0, 1.0)):
            with pytest.raises(HostWaitError):
                wait()


@pytest.mark.parametrize("chance_of_overflow", [0.0, 0.2, 0.9])
def test_the_scale_on_a_device_goes_the_way_of_that_on_the_host(
    chance_of_overflow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to its largest and down to its smallest value."""
    monkeypatch.setattr(precision, "_GROWTH_INTERVAL", 3)
    plan, chance = mixed(Plan(), compute="fp16"), random.Random(0)
    host, device = LossScale.of(plan), LossScale.of(plan)
    for _ in range(60):
        overflow = chance.random() < chance_of_overflow
        host.update(is_finite=not overflow)
        device.update_on_device(torch.tensor(float(overflow)))
        assert device.state() == host.state()
    assert host.value in {0.0: [2.0**24], 0.9: [1.0, 2.0]}.get(chance_of_overflow, [host.value])


@pytest.mark.parametrize("shard", ["nothing", "parameters"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("compute", "bad"), [("fp16", [0, 2, 3]), ("bf16", [2]), ("model", [2])])
def test_a_skip_on_the_device_is_one_on_the_host(
    compute: str,
    bad: list[int],
    kind: str,
    shard: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights, the optimizer's state, the scale and what is told agree to the bit; the average of the weights does to
    rounding, because another kernel takes the flag."""
    kinds = {"adamw": ADAMW, "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)}
    inputs, targets = batch_of(4)
    seen, told = [], []
    for on_device in (False, True):
        monkeypatch.setattr(update, "can_skip_on_device", lambda _, found=on_device: found)
        torch.manual_seed(0)
        plan = dataclasses.replace(mixed(data_plan(1, clip_norm=1.0, shard=shard), compute=compute), average=AVERAGE)
        trainer = make_trainer(MLP().float(), plan, optimizer=kinds[kind])
        caplog.clear()
        for step in range(6):
            trainer.step(inputs.float() * (float("nan") if step in bad else 1.0), targets)
        assert isinstance(trainer.update.skipped, torch.Tensor) == on_device
        assert trainer.num_skipped == len(bad)
        state = [value for one in trainer.optimizer.state.values() for value in one.values()]
        assert trainer.average is not None
        seen.append((masters(trainer), state, trainer.average.means, trainer.update.state()))
        # A step later its gradients are gone, and so they are not named.
        messages = [record.getMessage() for record in caplog.records]
        told.append([message.partition("; gradients of")[0] for message in messages])
    (weights, states, means, rest), (late_weights, late_states, late_means, late_rest) = seen
    torch.testing.assert_close(late_means, means, rtol=1e-6, atol=1e-7)
    assert rest == late_rest and told[0] == told[1] and len(told[0]) == len(bad)
    assert all(torch.equal(late_weights[name], weight) for name, weight in weights.items())
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(states, late_states, strict=True))


def test_an_assertion_is_checked_once_by_the_host_and_then_by_the_device() -> None:
    assertion, holds, fails = DeviceAssertion("it is broken"), torch.tensor(True), torch.tensor(False)
    assert assertion.holds(holds, 1) and not assertion.holds(fails, 1), "a host looks every time"
    with pretended_gpu():
        assert not assertion.holds(fails, 2) and assertion.holds(holds, 2)
        with no_waits():
            assert assertion.holds(holds, 2)
            with pytest.raises(RuntimeError, match="it is broken"):
                assertion.holds(fails, 2)


def test_async_scalars_keep_their_values() -> None:
    number = torch.tensor(3, dtype=torch.int64)
    copied = AsyncScalars(number, 0.5, torch.tensor([2.0**40]))
    number += 1
    assert copied.is_ready and copied.read() == [3.0, 0.5, 2.0**40]
