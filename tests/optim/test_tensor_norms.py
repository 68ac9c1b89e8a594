"""LARS and LAMB under plans that split tensors equal one process, which sees whole ones; and what they exchange."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import verify
from oracle import (
    Batch,
    cut_evenly,
    data_plan,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_gpt,
    tensor_plan,
    token_batch,
)
from pretend_gpu import no_waits, pretended_gpu
from ranks import ranks
from strict_nccl.mode import StrictMode
from strict_plans import verify_over_strict
from torch import nn

from weft.errors import PlanError
from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.plan.partition.wire import tensor_norm_bytes
from weft.plan.plan import Plan, Precision
from weft.training.setup.probe_optimizer import takes_parts
from weft.training.trainer import Trainer

Make = Callable[..., torch.optim.Optimizer]
LAMBS: Make = functools.partial(LAMB, lr=0.02, weight_decay=0.1)
SCALED: Make = functools.partial(LARS, lr=1.0, trust=0.02, weight_decay=0.1)
NORMALISED: Make = functools.partial(LARS, lr=0.02, weight_decay=0.1, variant="normalised-momentum")


def gpt(**changes: Any) -> nn.Module:
    return small_gpt(positions="learned", norm="layer", bias=True, heads=4, **changes)


def check(plan: Plan, optimizer: Make, model: nn.Module | None = None, *, adapts_all: bool = False) -> None:
    verify(
        model or gpt(),
        plan,
        loss="cross-entropy",
        optimizer=optimizer,
        groups=None if adapts_all else exclude_one_dim,
        batches=[token_batch(size, seed=seed) for seed, size in enumerate((8, 5))],
        dtype=torch.float64,
        device="cpu",
    ).require()


@ranks(2)
def test_a_rank_without_a_gradient_takes_part() -> None:
    plan = data_plan(2, shard="optimizer")
    with make_trainer(gpt(), plan, optimizer=LAMBS) as trainer:
        assert isinstance(trainer.optimizer, LAMB)
        norms = trainer.optimizer._norms
        assert norms is not None and norms.exchanges
        is_first = trainer.mesh.world.rank == 0
        mine = torch.ones(2, 1 if is_first else 0, dtype=torch.float64)
        assert torch.equal(norms.complete(mine, (0,) if is_first else ()), mine)


@ranks(2)
def test_on_2_ranks() -> None:
    check(data_plan(2, shard="optimizer"), LAMBS)
    check(data_plan(2, shard="gradients"), SCALED, adapts_all=True)
    check(tensor_plan(2), LAMBS, adapts_all=True)  # a norm's weight is on both ranks, and counts once
    check(pipeline_plan(2, microbatches=2), NORMALISED)  # a tied weight is on both stages, whole


@pytest.mark.long
@ranks(4)
def test_on_4_ranks() -> None:
    check(data_plan(4, shard="parameters"), LAMBS, adapts_all=True)  # ranks keep nothing of some tensors
    check(data_plan(2, shard="parameters", replicate=2), SCALED)
    check(tensor_plan(2, data=2, shard="optimizer"), NORMALISED, adapts_all=True)
    check(tensor_plan(4), LAMBS, gpt(kv_heads=2))  # two ranks hold the same keys and values


@pytest.mark.long
@ranks(4)
def test_on_4_ranks_further() -> None:
    check(sequence_plan(ring=2, data=2, shard="optimizer"), LAMBS)
    check(sequence_plan(ulysses=2, data=2, shard="parameters"), SCALED)
    check(pipeline_plan(2, data=2, microbatches=2, shard="gradients"), LAMBS)  # tied and sharded
    check(tensor_plan(2, pipeline=2, microbatches=2), SCALED)
    check(tensor_plan(4, shard="optimizer"), NORMALISED, gpt(kv_heads=2), adapts_all=True)
    check(tensor_plan(2, pipeline=2, microbatches=2, schedule="2bw"), LAMBS)
    check(tensor_plan(2, pipeline=2, microbatches=2, schedule="pipedream"), SCALED, gpt(tied=False))
    offloaded = data_plan(2, shard="parameters", replicate=2, clip_norm=0.1)
    offloaded = dataclasses.replace(
        offloaded, data=dataclasses.replace(offloaded.data, offload=True), precision=Precision(compute="bf16")
    )
    check(offloaded, LAMBS)


@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("mode", [StrictMode(), StrictMode(delay_ms=2.0)], ids=["lazy", "delays"])
def test_by_the_rules_of_nccl(mode: StrictMode) -> None:
    for plan, optimizer in (
        (tensor_plan(2, data=2, shard="parameters"), LAMBS),
        (tensor_plan(2, pipeline=2, microbatches=2), SCALED),
        (pipeline_plan(2, data=2, microbatches=2, shard="optimizer"), NORMALISED),
    ):
        verify_over_strict(
            gpt(),
            plan,
            mode,
            loss="cross-entropy",
            optimizer=optimizer,
            batches=[token_batch(8, seed=seed) for seed in range(2)],
            dtype=torch.float64,
        ).require()


@ranks(4)
def test_bytes_are_those_of_the_wire_arithmetic() -> None:
    plan, counted = tensor_plan(2, data=2, shard="optimizer"), {}
    for name, optimizer in (("lamb", LAMBS), ("adamw", functools.partial(torch.optim.AdamW, lr=0.02))):
        torch.manual_seed(0)
        with make_trainer(gpt(), plan, optimizer=optimizer) as trainer:
            for step in range(2):
                before = {axis: trainer.mesh.traffic[axis].sent_bytes for axis in ("data", "tensor")}
                trainer.step(*token_batch(4, seed=step))
                counted[name] = {axis: trainer.mesh.traffic[axis].sent_bytes - before[axis] for axis in before}
            num_tensors = len(trainer.sync.pieces)
    for axis in ("data", "tensor"):
        assert counted["lamb"][axis] - counted["adamw"][axis] == tensor_norm_bytes(num_tensors, 2) > 0


@ranks(2)
def test_whole_tensors_exchange_nothing() -> None:
    calls = {}
    for name, optimizer in (("lamb", LAMBS), ("sgd", functools.partial(torch.optim.SGD, lr=0.1))):
        torch.manual_seed(0)
        with make_trainer(gpt(), data_plan(2), optimizer=optimizer) as trainer:
            for step in range(2):
                before = trainer.mesh.traffic["data"].num_calls
                trainer.step(*token_batch(4, seed=step))
                calls[name] = trainer.mesh.traffic["data"].num_calls - before
    assert calls["lamb"] == calls["sgd"]


@ranks(2)
def test_a_steady_step_never_waits() -> None:
    for plan in (data_plan(2, shard="parameters", microbatches=2), tensor_plan(2, microbatches=2)):
        with make_trainer(gpt(), plan, optimizer=LAMBS, groups=exclude_one_dim) as trainer, pretended_gpu():
            parts = [cut_evenly(token_batch(8, seed=step), trainer.data_size)[trainer.data_rank] for step in range(4)]
            for part in parts[:3]:
                trainer.step(*part)
            with no_waits():
                trainer.step(*parts[3])
            trainer.flush()


@ranks(2)
def test_another_plan_goes_on_with_its_state(tmp_path: Path) -> None:
    batches = [token_batch(4, seed=step) for step in range(4)]

    def step_on(trainer: Trainer, batch: Batch) -> float:
        return float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank]))

    torch.manual_seed(0)
    with make_trainer(gpt().double(), data_plan(2, shard="parameters"), optimizer=LAMBS) as trainer:
        for batch in batches[:2]:
            step_on(trainer, batch)
        trainer.save(tmp_path / "saved")
        losses = [step_on(trainer, batch) for batch in batches[2:]]
    with make_trainer(gpt().double(), tensor_plan(2), optimizer=LAMBS) as other:
        other.load(tmp_path / "saved")
        assert [step_on(other, batch) for batch in batches[2:]] == pytest.approx(losses, rel=1e-10)
        assert {int(state["step"]) for state in other.optimizer.state.values()} == {4}


class Lamb(torch.optim.SGD):
    """Of another library: it takes the norms of what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-12), alpha=group["lr"])


def test_only_those_of_weft_are_followed() -> None:
    cpu = torch.device("cpu")
    assert [takes_parts(make, cpu) for make in (LAMBS, SCALED, NORMALISED)] == [True] * 3
    assert takes_parts(functools.partial(Lamb, lr=0.1), cpu) is False
    make_trainer(gpt(), data_plan(1, shard="parameters"), optimizer=LAMBS).close()
    with pytest.raises(PlanError, match="Lamb needs whole tensors.*weft.optim's LARS or LAMB"):
        make_trainer(gpt(), data_plan(1, shard="parameters"), optimizer=functools.partial(Lamb, lr=0.1))
