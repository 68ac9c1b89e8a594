"""Pipeline stages that sleep instead of computing, as if each had its own core: predicted and recorded timelines.

    forward 60 ms    backward 120 ms: input gradient 60 ms, weight gradient 60 ms

With several chunks per rank, each sleeps its part of that.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from pipeline_sides import sgd
from torch import nn

import weft
from weft.plan.pipeline.communication import schedule_of
from weft.plan.pipeline.timeline import Timeline
from weft.plan.plan import Plan
from weft.planning.simulate import Durations, simulate

FORWARD_S, INPUT_GRAD_S, WEIGHT_GRAD_S = 0.06, 0.06, 0.06


class Slept(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.backward_s)
        return gradient, None, None


class SleepingBlock(nn.Module):
    """Module that sleeps in the forward pass and in either half of the backward pass."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = Slept.apply(self.scale, 0.0, WEIGHT_GRAD_S * self.share)
        return Slept.apply(x + self.shift, FORWARD_S * self.share, INPUT_GRAD_S * self.share) * scale


def predict(plan: Plan, num_fed: int) -> Timeline:
    """Predicted timeline. A first stage has no input gradient, so all its backward pass is the weight half."""
    share, num_stages = 1 / plan.pipeline.chunks, plan.axes.pipeline * plan.pipeline.chunks
    whole_s = share * (INPUT_GRAD_S + WEIGHT_GRAD_S)
    durations = Durations(
        forward_s=share * FORWARD_S,
        backward_s=whole_s,
        input_grad_s=(0.0, *(share * INPUT_GRAD_S for _ in range(num_stages - 1))),
        weight_grad_s=(whole_s, *(share * WEIGHT_GRAD_S for _ in range(num_stages - 1))),
    )
    first = plan.step.microbatches  # one warm-up step has run and was flushed
    return simulate(schedule_of(plan, num_microbatches=num_fed, first=first, start=first), durations)


def record(plan: Plan, num_steps: int) -> Timeline:
    """Recorded timeline of a few steps, computation only."""
    num_stages = plan.axes.pipeline * plan.pipeline.chunks
    model = nn.Sequential(*(SleepingBlock(1 / plan.pipeline.chunks) for _ in range(num_stages)))
    trainer = weft.parallelize(
        model,
        plan,
        loss=lambda output, targets: (output - targets).square().mean(),
        optimizer=sgd,
        example=torch.zeros(1, 8),
        device="cpu",
    )
    batch = torch.zeros(plan.step.microbatches, 8)
    trainer.step(batch, batch)
    trainer.flush()
    trainer.keep_trace()
    dist.barrier()
    started = torch.tensor([time.time()], dtype=torch.float64)
    dist.all_reduce(started, op=dist.ReduceOp.MIN)
    for _ in range(num_steps):
        trainer.step(batch, batch)
    trainer.flush()
    spans = trainer.trace().spans
    kept = tuple(span for span in spans if span.action.is_compute and span.start_s >= float(started))
    return Timeline(spans=kept, num_ranks=plan.axes.pipeline)
