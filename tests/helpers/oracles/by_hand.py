"""Mixed precision by hand, in one process and plain torch, and error bounds for sums in other orders and formats.

The loop (`ByHand`) keeps float32 masters, runs the model on a 16-bit copy of them and updates the masters with AdamW.
Given the same microbatches, each backward pass gives the same 16-bit gradients as on the ranks, to the bit. Only
their sum may differ: every addition and every change of format rounds by at most `UNIT` of that format. The loop sums
in float64, and also sums absolute values, so the bound on a sum's error is exact and holds for each entry:

    |error| <= sum over formats of (number of roundings of a term in it x its UNIT) x sum of |terms|

After a step the loop can continue from the trainer's masters: a last bit that falls on the other side of a rounding to
16 bits would become a difference of 2**-8, and would hide real errors.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from oracle import Batch, cross_entropy
from torch import Tensor, nn
from whole_tensors import whole_tensors

from weft.checkpoint.local_parts import Held, held_parameters
from weft.plan.plan import Plan, Precision
from weft.training.data.trees import split_microbatches
from weft.training.trainer import Trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding: half the distance of neighbours, for 24, 8 and 11 significant bits."""
SMALLEST = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}
"""Smallest number above zero. A rounding below the normal range is off by at most half of it."""
LR, EPS = 1e-2, 1e-3
"""A large epsilon: Adam divides by the size of a gradient, and would amplify the rounding of small entries."""
SHARDS = ["nothing", "optimizer", "gradients", "parameters"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.1)


def mixed(plan: Plan, **fields: Any) -> Plan:
    return dataclasses.replace(plan, precision=Precision(**fields))


def whole(trainer: Trainer, part_of: Callable[[Held], Tensor | None]) -> dict[str, Tensor]:
    """A tensor per parameter, whole, on every rank."""
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    return {name: tensor.clone() for name, tensor in whole_tensors(held, trainer.mesh, lambda name, one: part_of(one))}


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return whole(trainer, lambda held: held.tensor)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return whole(trainer, lambda held: None if held.piece is None else held.piece.grad)


class ByHand:
    """float32 masters and a 16-bit copy of the model, in one process."""

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


def worst_excess(trainer: Trainer, by_hand: ByHand, roundings: dict[str, int]) -> float:
    """Errors of gradients and masters relative to their bounds; at most 1 on success."""
    worst = 0.0
    relative = math.prod((1 + UNIT[name]) ** times for name, times in roundings.items()) - 1
    absolute = sum(times * SMALLEST[name] for name, times in roundings.items()) / by_hand.scale
    found, updated = gradients(trainer), masters(trainer)
    assert found.keys() == updated.keys() == by_hand.masters.keys()
    for name, expected in by_hand.sums.items():
        bound = relative * by_hand.sizes[name] + absolute
        worst = max(worst, float(((found[name].double() - expected).abs() / bound).max()))
        # m / (sqrt(v) + eps) moves by at most 3 / eps times the error of its gradients so far, since |m| < 2 sqrt(v)
        # in the first steps; weight decay and the addition round in float32.
        master = by_hand.masters[name].detach().double()
        allowed = 3 * LR / EPS * bound.max() + 4 * UNIT["fp32"] * (master.abs() + LR)
        worst = max(worst, float(((updated[name].double() - master).abs() / allowed).max()))
    return worst


class TorchsScale:
    """torch's own scaler, told step by step whether gradients were finite."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.parameter = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)

    def update(self, *, is_finite: bool) -> None:
        self.scaler.scale(self.parameter.sum()).backward()
        self.parameter.grad = torch.tensor([1.0 if is_finite else float("inf")])
        self.scaler.step(self.optimizer)
        self.scaler.update()
