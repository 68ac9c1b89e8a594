"""Faults in codecs and around them: `verify` must fail, at the step and in the tensors where the rule is broken."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from planting import Patch, Plant, find
from ranks import ranks

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Axes, Codec, Data, Plan
from weft.sync.exchange.compressed_exchange import CompressedExchange
from weft.training.trainer import Trainer
from weft.verification.verdict import Finding

LARGE = {"embedding", "attention", "mlp"}


def plan_of(name: str, *, sharded: bool = False, **settings: Any) -> Plan:
    axes, shard = (Axes(replicate=2, data=2), "gradients") if sharded else (Axes(data=2), "nothing")
    return Plan(axes=axes, data=Data(shard=shard), codec=Codec(name=name, dense_below=64, **settings))


def compressed(trainer: Trainer) -> CompressedExchange:
    assert trainer.sync.compressed is not None
    return trainer.sync.compressed


def after_each_exchange(change: Any) -> Plant:
    """A change of the codecs' state once an exchange has ended."""

    def plant(patch: Patch, trainer: Trainer) -> None:
        exchange = compressed(trainer)
        before = {name: tensor.clone() for name, tensor in exchange.tensors().items()}
        end = exchange.end

        def end_and_change(**given: Any) -> None:
            end(**given)
            with torch.no_grad():
                change(exchange.tensors(), before)

        exchange.end = end_and_change  # type: ignore[method-assign]

    return plant


def made_anew(trainer: Trainer) -> None:
    """Codecs that are made again see what was changed since."""
    compressed(trainer).lay_out(compressed(trainer)._buckets)


def check_cause(first: Finding, *, step: int) -> None:
    assert (first.step, first.phase, first.what, first.places) == (step, "exchange", "gradient", "every rank"), first
    assert first.cause.kind == "codec" and "look at what it sends, keeps and draws" in first.cause.text, first
    assert any(part in first.name for part in LARGE), first


def drop_residuals(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.startswith("residual/"):
            tensor.zero_()


def restart_powers(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.startswith("start/"):
            tensor.copy_(before[name])


@ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "topk")) for name in ("topk", "onebit", "powersgd")]
)
def test_a_residual_that_is_dropped(name: str) -> None:
    settings = {"density": 0.1} if name == "topk" else {"rank": 1} if name == "powersgd" else {}
    first = find(plan_of(name, **settings), after_each_exchange(drop_residuals), num_steps=2)
    check_cause(first, step=2)
    assert first.cause.axes == ("data",)


@pytest.mark.long
@ranks(4)
def test_a_residual_that_is_dropped_on_shards() -> None:
    first = find(plan_of("topk", sharded=True, density=0.1), after_each_exchange(drop_residuals), num_steps=2)
    assert (first.step, first.cause.kind, first.cause.axes) == (2, "codec", ("replicate",)), first


@pytest.mark.long
@ranks(2)
def test_powers_that_start_anew() -> None:
    first = find(plan_of("powersgd", rank=1), after_each_exchange(restart_powers), num_steps=2)
    check_cause(first, step=2)


@pytest.mark.long
@ranks(2)
def test_momentum_that_is_not_masked() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        exchange = compressed(trainer)
        exchange._section = replace(exchange._section, masking=False)
        made_anew(trainer)

    first = find(plan_of("dgc", density=0.1), plant, num_steps=3)
    # In the second step other entries are sent; at the latest in the third one of them was sent before.
    assert first.step in (2, 3)
    check_cause(first, step=first.step)


@pytest.mark.long
@ranks(2)
def test_momentum_that_the_optimizer_adds_again() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        patch.setattr("weft.optim.momentum_correction.MomentumTakenOver.during", lambda self, overflow: nullcontext())

    first = find(plan_of("dgc", density=0.1), plant, num_steps=2)
    assert (first.step, first.phase, first.what) == (2, "update", "weight"), first


@pytest.mark.long
@ranks(2)
def test_means_of_other_columns() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        patch.setattr(CodedTensor, "num_columns", property(lambda self: self.shape[0]))
        made_anew(trainer)

    check_cause(find(plan_of("onebit"), plant), step=1)


@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_replicas_that_draw_the_same_numbers(name: str) -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        compressed(trainer).replica = 0
        made_anew(trainer)

    check_cause(find(plan_of(name), plant), step=1)


@pytest.mark.long
@ranks(2)
def test_numbers_that_are_the_same_in_every_step() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        begin = compressed(trainer).begin
        compressed(trainer).begin = lambda step: begin(0)  # type: ignore[method-assign]

    check_cause(find(plan_of("qsgd"), plant, num_steps=2), step=2)


@ranks(2)
def test_small_tensors_that_are_compressed() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        sync: Any = trainer.sync
        sync._coded = frozenset(range(len(sync.pieces)))
        sync._lay_out(sync._order)

    first = find(plan_of("topk", density=0.1), plant)
    assert (first.step, first.what, first.name) == (1, "gradient", "norm.weight"), first


@pytest.mark.long
@ranks(2)
def test_a_tensor_that_is_not_compressed() -> None:
    def plant(patch: Patch, trainer: Trainer) -> None:
        sync: Any = trainer.sync
        last = next(place for place, piece in enumerate(sync.pieces) if piece.name == "blocks.1.mlp.down.weight")
        sync._coded = sync._coded - {last}
        patch.setattr(sync._exchange, "lay_out_again", sync._exchange.lay_out)  # there is one residual less
        sync._lay_out(sync._order)

    first = find(plan_of("topk", density=0.1), plant)
    assert (first.name, first.phase, first.cause.kind) == ("blocks.1.mlp.down.weight", "exchange", "not compressed")
    assert '[codec] name = "topk" left it out' in first.cause.text


@pytest.mark.long
@ranks(2)
def test_what_is_kept_where_replicas_differ() -> None:
    plan = Plan(
        axes=Axes(data=2), data=Data(sync="local", every=1), codec=Codec(name="topk", density=0.1, dense_below=64)
    )
    first = find(plan, after_each_exchange(drop_residuals), num_steps=2)
    assert (first.step, first.what) == (2, "weight"), first
