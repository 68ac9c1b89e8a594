"""Mixed precision against a loop written by hand in one process: every format, every ZeRO stage, 1, 2 and 4 ranks.

The loop (`ByHand`) keeps float32 masters, runs the model on a 16-bit copy of them and updates the masters with AdamW.
It is given the same micro-batches, so each backward pass gives the same 16-bit gradients as on the ranks, to the bit.
What may differ is their sum: every addition and every change of format rounds by at most `UNIT` of that format. The
loop adds up in float64, and adds up sizes beside it, so the bound on a sum's error is exact and holds for each entry:

    |error| <= roundings on the way x UNIT of the coarsest format on the way x sum of |terms|

After each step the loop goes on from the trainer's masters: a last bit that falls on the other side of a rounding to
16 bits would be a difference of 2**-8 afterwards, and would hide what this looks for.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import (
    ADAMW,
    Batch,
    cross_entropy,
    cut,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    small_convnet,
    small_gpt,
    token_batch,
)
from ranks import ranks
from torch import Tensor, nn

from weft.plan.plan import Plan, Precision
from weft.plan.wire import ShardedFlat, sharded_bytes
from weft.training import precision
from weft.training.held import Held, held_parameters, whole_tensors
from weft.training.trainer import Trainer
from weft.training.trees import split_microbatches
from weft.training.verify import verify

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""The largest relative error of one rounding: half the distance of neighbours, for 24, 8 and 11 significant bits."""
SMALLEST = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}
"""The smallest number above zero. A rounding below the normal range is off by half of it at most."""
LR, EPS = 1e-2, 1e-3
"""A large epsilon: Adam divides by the size of a gradient, and would make nothing of one entry's rounding too large."""
SHARDS = ["nothing", "optimizer", "gradients", "parameters"]
FIXED_SCALE = 256


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.1)


def mixed(plan: Plan, **fields: Any) -> Plan:
    return dataclasses.replace(plan, precision=Precision(**fields))


def whole(trainer: Trainer, part_of: Callable[[Held], Tensor | None]) -> dict[str, Tensor]:
    """Something of every parameter, whole, on every rank."""
    held = held_parameters(trainer.named_model, trainer.sync)
    return {name: tensor.clone() for name, tensor in whole_tensors(held, lambda name, one: part_of(one))}


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return whole(trainer, lambda held: held.tensor)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return whole(trainer, lambda held: None if held.piece is None else held.piece.grad)


class ByHand:
    """float32 masters and a 16-bit copy of the model, on one process."""

    def __init__(self, model: nn.Module, compute: torch.dtype, *, scale: float = 1.0, clip_norm: float = 0.0) -> None:
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        self.optimizer = adamw(self.masters.values())
        self.working = copy.deepcopy(model).to(compute)
        self.scale, self.clip_norm = scale, clip_norm
        self.sums: dict[str, Tensor] = {}
        self.sizes: dict[str, Tensor] = {}
        self.norm = 0.0

    def step(self, parts: list[Batch], microbatches: int) -> float:
        """One step on every rank's part of a batch; returns the mean loss."""
        self._cast()
        count = sum(int((targets != -100).sum()) for _, targets in parts)
        self.sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.masters.items()}
        self.sizes = copy.deepcopy(self.sums)
        total = sum(
            self._backward(*micro, self.scale / count)
            for inputs, targets in parts
            for micro in zip(
                split_microbatches(inputs, microbatches), split_microbatches(targets, microbatches), strict=True
            )
            if len(micro[0])
        )
        for name, master in self.masters.items():
            master.grad = self.sums[name].to(master.dtype)
        if self.clip_norm:
            self.norm = float(nn.utils.clip_grad_norm_(self.masters.values(), self.clip_norm))
        self.optimizer.step()
        return total / count

    @torch.no_grad()
    def _cast(self) -> None:
        for name, parameter in self.working.named_parameters():
            parameter.copy_(self.masters[name])

    def _backward(self, inputs: Tensor, targets: Tensor, factor: float) -> float:
        self.working.zero_grad(set_to_none=True)
        loss, _ = cross_entropy(self.working(inputs).float(), targets)
        (loss * factor).backward()
        for name, parameter in self.working.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all()
            self.sums[name] += parameter.grad.double() / self.scale
            self.sizes[name] += parameter.grad.double().abs() / self.scale
        return float(loss.detach())

    @torch.no_grad()
    def go_on_from(self, found: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(found[name])


def worst_excess(trainer: Trainer, by_hand: ByHand, unit: float, smallest: float, roundings: int) -> float:
    """How far gradients and masters are off, relative to how far they may be; 1 is just right."""
    worst = 0.0
    found, updated = gradients(trainer), masters(trainer)
    assert found.keys() == updated.keys() == by_hand.masters.keys()
    for name, expected in by_hand.sums.items():
        bound = roundings * (unit * by_hand.sizes[name] + smallest / by_hand.scale)
        off = (found[name].double() - expected).abs()
        worst = max(worst, float((off / bound.clamp(min=1e-300)).max()))
        # m / (sqrt(v) + eps) moves by at most 3 / eps of what all its gradients so far are off, since |m| < 2 sqrt(v)
        # in the first steps; weight decay and the addition round in float32.
        master = by_hand.masters[name].detach().double()
        allowed = 3 * LR / EPS * bound.max() + 4 * UNIT["fp32"] * (master.abs() + LR)
        worst = max(worst, float(((updated[name].double() - master).abs() / allowed).max()))
    return worst


def check(compute: str, shard: str, microbatches: int, accumulate: str, reduce: str, replicate: int = 1) -> None:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    scale = FIXED_SCALE if compute == "fp16" else 1
    reshard = "microbatch" if shard == "parameters anew" else "step"
    plan = mixed(
        data_plan(
            num_ranks // replicate,
            shard=shard.split()[0],
            reshard=reshard,
            microbatches=microbatches,
            bucket_bytes=4000,
            replicate=replicate,
        ),
        compute=compute,
        accumulate=accumulate,
        reduce=reduce,
        **({"loss_scale": FIXED_SCALE} if compute == "fp16" else {}),
    )
    model = small_gpt()
    by_hand = ByHand(model, DTYPES[compute], scale=scale)
    trainer = make_trainer(model, plan, optimizer=adamw)
    on_the_way = {accumulate, reduce} if num_ranks * microbatches > 1 else set()
    coarsest = max((*on_the_way, "fp32"), key=lambda name: UNIT[name])
    smallest = max(SMALLEST[name] for name in (*on_the_way, "fp32"))
    roundings = num_ranks * microbatches + 2
    is_coarse = False
    for step in range(2):
        parts = cut_evenly(token_batch(5 * num_ranks, seed=step), num_ranks)
        loss = float(trainer.step(*parts[trainer.data_rank]))
        # One float32 number a micro-batch on both sides, added up in float64.
        assert loss == pytest.approx(by_hand.step(parts, microbatches), rel=1e-6)
        assert worst_excess(trainer, by_hand, UNIT[coarsest], smallest, roundings) <= 1
        is_coarse = is_coarse or worst_excess(trainer, by_hand, UNIT["fp32"], SMALLEST["fp32"], roundings) > 1
        for flat in trainer.sync.flats:
            assert flat.master.dtype == torch.float32 and flat.mine.dtype == DTYPES[compute]
            assert torch.equal(flat.mine, flat.master.to(flat.mine.dtype)), "cast back"
        by_hand.go_on_from(masters(trainer))
    rounds = accumulate != "fp32" or (reduce != "fp32" and num_ranks > 1)
    if num_ranks * microbatches > 1:
        assert is_coarse == rounds, "a 16-bit format rounds, float32 does not"


@ranks(2)
def on_2(**case: Any) -> None:
    check(**case)


@ranks(4)
def on_4(**case: Any) -> None:
    check(**case)


ON_RANKS = {1: check, 2: on_2, 4: on_4}


@pytest.mark.parametrize("formats", ["fp32 fp32", "fp32 16", "16 fp32", "16 16"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("shard", [*SHARDS, "parameters anew"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("num_ranks", ON_RANKS)
def test_a_step_by_hand(num_ranks: int, compute: str, shard: str, microbatches: int, formats: str) -> None:
    """`formats`: of accumulation and of the exchange."""
    accumulate, reduce = (compute if name == "16" else name for name in formats.split())
    if shard == "parameters anew" and microbatches == 1:
        pytest.skip("with one micro-batch there is nothing to gather anew")
    if num_ranks == 4 and formats in ("fp32 16", "16 fp32"):
        pytest.skip("two ranks have shown it")
    ON_RANKS[num_ranks](
        compute=compute, shard=shard, microbatches=microbatches, accumulate=accumulate, reduce=reduce
    )
