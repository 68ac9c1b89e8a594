"""The sides of a pipeline benchmark: the same GPT under weft's schedules and under torch.distributed.pipelining's.

Both have the same weights, batch and cuts, and a fused SGD. torch gets hand-written stage modules, static shapes and
no gradient scaling. `check` compares a side's loss and gradients with one process's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Pipeline, Plan, Step

Batch = tuple[torch.Tensor, torch.Tensor]

RIVALS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
NUM_CHUNKS = {"interleaved": 2}
BLOCKS_PER_RANK = 2
"""Two stages per rank if there are chunks, so that stages are as small as blocks."""
TOLERANCE = 1e-3
"""Tolerance relative to a gradient's largest entry; several times the effect of the order of float32 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, its microbatch, and the number of steps per turn."""

    config: GPTConfig
    """Everything except the number of blocks."""
    num_samples: int
    steps: int
    goal: float
    """Target speed relative to torch."""

    def on(self, num_ranks: int) -> GPTConfig:
        return replace(self.config, num_layers=BLOCKS_PER_RANK * num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(GPTConfig):
    """A GPT without attention: its blocks are two products, a few dozen microseconds each."""


class PlainBlock(nn.Module):
    """A transformer block without attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.hidden, 2 * config.hidden), nn.Linear(2 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor, rotary: object) -> torch.Tensor:
        del rotary
        return x + self.down(torch.relu(self.up(x)))


SIZES = {
    "tiny": Size(
        config=PlainConfig(vocab_size=64, context=8, hidden=64, heads=1, tied=False),
        num_samples=1,
        steps=16,
        goal=1.3,
    ),
    "small": Size(
        config=GPTConfig(vocab_size=256, context=32, hidden=64, heads=4, tied=False),
        num_samples=1,
        steps=8,
        goal=1.3,
    ),
    "large": Size(
        config=GPTConfig(vocab_size=1024, context=128, hidden=512, heads=8, tied=False),
        num_samples=1,
        steps=1,
        goal=1.0,
    ),
}


def make_model(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config)
    if isinstance(config, PlainConfig):
        model.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
    return model


def make_batch(size: Size, num_microbatches: int) -> Batch:
    shape = (num_microbatches * size.num_samples, size.config.context + 1)
    text = torch.randint(size.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def make_plan(
    schedule: str, num_ranks: int, num_microbatches: int, *, num_blocks: int | None = None, transport: str = "auto"
) -> Plan:
    """A pipeline whose stages have equally many blocks, by default those of `Size.on`."""
    num_blocks = num_blocks or BLOCKS_PER_RANK * num_ranks
    num_stages = num_ranks * NUM_CHUNKS.get(schedule, 1)
    cuts = tuple(num_blocks * stage // num_stages for stage in range(1, num_stages))
    return Plan(
        axes=Axes(pipeline=num_ranks),
        step=Step(microbatches=num_microbatches),
        pipeline=Pipeline(schedule=schedule, chunks=NUM_CHUNKS.get(schedule, 1), cuts=cuts),
        comm=Comm(transport=transport),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation of training, on this rank."""

    step: Callable[[torch.Tensor, torch.Tensor], float | None]
    """Returns the loss on ranks that know it."""
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    trainer: weft.Trainer | None = None


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, fused=True)


def weft_side(model: GPT, plan: Plan, batch: Batch, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> Side:
    trainer = weft.parallelize(
        model,
        plan,
        loss="cross-entropy",
        optimizer=optimizer,
        example=batch[0][: len(batch[0]) // plan.step.microbatches],
        device="cpu",
    )
    return Side(
        step=lambda inputs, targets: float(trainer.step(inputs, targets)),
        optimizer=trainer.optimizer,
        parameters=dict(trainer.named_model.named_parameters()),
        trainer=trainer,
    )


class TorchStage(nn.Module):
    """Some blocks of a GPT, with its embedding or head at the model's ends."""

    def __init__(self, model: GPT, start: int, stop: int) -> None:
        super().__init__()
        self.embedding = model.embedding if start == 0 else None
        self.rotary = model.rotary
        self.blocks = model.blocks[start:stop]
        self.end = nn.Sequential(model.norm, model.head) if stop == len(model.blocks) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rotary = self.rotary(None, x.shape[1])
        for block in self.blocks:
            x = block(x, rotary)
        return x if self.end is None else self.end(x)


def torch_side(model: GPT, plan: Plan, batch: Batch) -> Side:
    """The same schedule of torch.distributed.pipelining."""
    rank, num_ranks, m = dist.get_rank(), dist.get_world_size(), plan.step.microbatches
    bounds = (0, *plan.pipeline.cuts, len(model.blocks))
    num_stages, config = len(bounds) - 1, model.config
    num_samples, num_tokens = len(batch[0]) // m, batch[0].shape[1]
    between = torch.empty(num_samples, num_tokens, config.hidden, device="meta", requires_grad=True)
    logits = torch.empty(num_samples, num_tokens, config.vocab_size, device="meta", requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            TorchStage(model, bounds[number], bounds[number + 1]),
            number,
            num_stages,
            torch.device("cpu"),
            input_args=between if number else batch[0][:num_samples].to("meta"),
            output_args=between if number < num_stages - 1 else logits,
        )
        for number in range(rank, num_stages, num_ranks)
    ]

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / m

    kind = RIVALS[plan.pipeline.schedule]
    is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, m, loss_fn=loss, scale_grads=False)
    own = {id(parameter) for stage in stages for parameter in stage.submod.parameters()}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}
    optimizer = sgd(parameters.values())
    is_first, is_last = rank == 0, rank == num_ranks - 1

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        given = (inputs,) if is_first else ()
        schedule.step(*given, target=targets if is_last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(sum(each.detach() for each in losses)) if is_last else None

    return Side(step=step, optimizer=optimizer, parameters=parameters)


def check(name: str, side: Side, config: GPTConfig, batch: Batch) -> None:
    """Check a side's first step against one process: its loss, and the gradients from its update."""
    alone = make_model(config)
    loss = F.cross_entropy(alone(batch[0]).flatten(0, 1), batch[1].flatten())
    loss.backward()
    wanted = {key: parameter.grad for key, parameter in alone.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        found.update({key: parameter.grad.clone() for key, parameter in side.parameters.items()})

    handle = side.optimizer.register_step_pre_hook(look)
    got = side.step(*batch)
    handle.remove()
    if got is not None and not math.isclose(got, loss.item(), rel_tol=TOLERANCE):
        raise RuntimeError(f"{name} has the loss {got}, one process {loss.item()}; it does not compute the same")
    for key, gradient in found.items():
        difference, largest = (gradient - wanted[key]).abs().max(), wanted[key].abs().max()
        if not difference <= TOLERANCE * largest:
            raise RuntimeError(
                f"{name}: the gradient of {key} is off by {difference:.3g}, its largest is {largest:.3g}"
            )
