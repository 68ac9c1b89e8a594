"""Flush-free pipelines on ranks against the plain loops of `sequential.py`, on the same model and stream of batches.

A rank checks the weights of its own stage; the plain loop runs on every rank, since it takes milliseconds. Losses are
compared as sums divided by counts, the way a trainer averages, so that they too are equal to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from oracle import Batch, cut_evenly, make_trainer
from sequential import Run, Weights, pipedream, two_bw
from torch import Tensor, nn
from torch.func import functional_call

from weft.parallel.state.rng import PlaceSeeds
from weft.plan.plan import Axes, Data, Pipeline, Plan, Recompute, Step
from weft.training.data.trees import split_microbatches
from weft.training.step.pipeline_stream import PipelineStream
from weft.training.trainer import Trainer

VOCABULARY, CLASSES, HIDDEN, LENGTH, NUM_BLOCKS = 11, 5, 6, 4, 5
CUTS = {2: (2,), 3: (1, 3), 4: (1, 2, 4)}
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}


class Block(nn.Module):
    """Layers of several kinds whose backward passes need their weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.drop = nn.Dropout(dropout)
        self.near = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.spread = nn.GroupNorm(2, HIDDEN)
        self.scale = nn.BatchNorm1d(HIDDEN, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.drop(self.mix(self.norm(x)).tanh()).transpose(1, 2)
        return x + self.scale(self.spread(self.near(inner))).transpose(1, 2)


class Net(nn.Module):
    """Maps tokens to one class per sample, or to the next tokens, with the embedding as the head if it is tied."""

    def __init__(self, *, dropout: float = 0.0, next_token: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(HIDDEN, VOCABULARY if next_token else CLASSES, bias=False)
        if next_token:
            with torch.no_grad():
                self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight
        self.next_token = next_token
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.next_token else x.mean(1))


def batch_of(num_samples: int, *, seed: int, next_token: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=draw)
    shape, values = ((num_samples, LENGTH), VOCABULARY) if next_token else ((num_samples,), CLASSES)
    return tokens, torch.randint(values, shape, generator=draw)


def batches_of(*sizes: int, next_token: bool = False) -> list[Batch]:
    return [batch_of(size, seed=step, next_token=next_token) for step, size in enumerate(sizes)]


def stream_plan(
    schedule: str,
    num_stages: int,
    microbatches: int,
    *,
    vertical_sync: bool = False,
    data: int = 1,
    clip_norm: float = 0.0,
    recompute: str = "none",
) -> Plan:
    return Plan(
        axes=Axes(pipeline=num_stages, data=data),
        step=Step(microbatches=microbatches, clip_norm=clip_norm),
        pipeline=Pipeline(schedule=schedule, cuts=CUTS[num_stages], vertical_sync=vertical_sync),
        data=Data(check_every=1),
        recompute=Recompute(policy=recompute),
    )


def make_streaming(plan: Plan, model: nn.Module | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(3)  # the trainer's seeds come from this state
    return make_trainer(model or Net(), plan, **{"example": batch_of(3, seed=0)[0], **changes})


def streaming(trainer: Trainer) -> PipelineStream:
    assert isinstance(trainer.pipeline_step, PipelineStream)
    return trainer.pipeline_step


def run(trainer: Trainer, batches: Sequence[Batch], *, flushes: Collection[int] = ()) -> list[float]:
    """Losses that every step returned, and the last flush; the pipeline is flushed before the steps in `flushes`."""
    losses = []
    for step, batch in enumerate(batches):
        if step in flushes:
            trainer.flush()
        losses.append(float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])))
    trainer.flush()
    return [*losses, float(streaming(trainer)._latest)]


@dataclass(slots=True, kw_only=True)
class Expected:
    """Results of the plain loop."""

    run: Run
    means: list[float] = field(default_factory=list)
    """Mean loss of the microbatches of each update."""

    def losses(self, plan: Plan, num_steps: int, flushes: Collection[int]) -> list[float]:
        """Return values of steps: the latest loss that has passed all stages, and after the last flush the last one."""
        m, at_once, done, found = plan.step.microbatches, updates_after(plan), 0, []
        for step in range(num_steps):
            if step in flushes:
                done = step * m
            done = max(done, (step + 1) * m - (plan.axes.pipeline - 1))
            found.append(self.means[done // at_once - 1] if done >= at_once else float("nan"))
        return [*found, self.means[-1]]


def updates_after(plan: Plan) -> int:
    """Microbatches per update."""
    return 1 if plan.pipeline.schedule == "pipedream" else plan.step.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch of all data ranks together."""

    inputs: Tensor
    targets: Tensor
    step: int
    number: int
    """Index within its step."""
    count: float
    """Number of targets of its update."""


def microbatches_of(plan: Plan, batches: Sequence[Batch]) -> list[list[Microbatch]]:
    """Microbatches of each update."""
    m, at_once, updates = plan.step.microbatches, updates_after(plan), []
    for step, batch in enumerate(batches):
        shares = [[split_microbatches(t, m) for t in part] for part in cut_evenly(batch, plan.axes.data)]
        inputs, targets = ([torch.cat(p) for p in zip(*side, strict=True)] for side in zip(*shares, strict=True))
        for first in range(0, m, at_once):
            inside = range(first, first + at_once)
            count = float(max(1, sum(int((targets[n] != -100).sum()) for n in inside)))
            updates.append(
                [Microbatch(inputs=inputs[n], targets=targets[n], step=step, number=n, count=count) for n in inside]
            )
    return updates


def expect(
    plan: Plan,
    batches: Sequence[Batch],
    *,
    optimizer: Any = SGD,
    flushes: Collection[int] = (),
    model: nn.Module | None = None,
    schedule: Callable[[int], float] | None = None,
    draws: PlaceSeeds | None = None,
) -> Expected:
    """The plain loop on the same batches, cut into the same microbatches; `draws` are the model's random numbers."""
    net, at_once, updates = model or Net(), updates_after(plan), microbatches_of(plan, batches)
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    sums: list[float] = []

    def loss_of(used: Weights, part: Microbatch) -> Tensor:
        if not len(part.inputs):  # depends on no weight, so there is no gradient
            sums.append(0.0)
            return torch.zeros((), requires_grad=True)
        with draws.during(step=part.step, microbatch=part.number, data_rank=0) if draws else nullcontext():
            logits = functional_call(net, used, (part.inputs,))
        total = F.cross_entropy(logits.flatten(0, -2), part.targets.flatten(), reduction="sum")
        sums.append(float(total.detach()))
        return total * (1.0 / part.count)

    make = functools.partial(_with_hooks, optimizer, plan, schedule, len(updates) // len(batches))
    if plan.pipeline.schedule == "2bw":
        found = two_bw(loss_of, weights, updates, optimizer=make)
    else:
        found = pipedream(
            loss_of,
            weights,
            [part for parts in updates for part in parts],
            stage_of=functools.partial(stage_of, plan),
            num_stages=plan.axes.pipeline,
            optimizer=make,
            flushes=[step * plan.step.microbatches for step in flushes],
            vertical_sync=plan.pipeline.vertical_sync,
        )
    means = [sum(sums[n * at_once : (n + 1) * at_once]) / parts[0].count for n, parts in enumerate(updates)]
    return Expected(run=found, means=means)


def stage_of(plan: Plan, name: str) -> int:
    if name.startswith("blocks."):
        return sum(int(name.split(".")[1]) >= cut for cut in plan.pipeline.cuts)
    return plan.axes.pipeline - 1 if name.startswith("head") else 0


def _with_hooks(
    optimizer: Any,
    plan: Plan,
    schedule: Callable[[int], float] | None,
    updates_per_step: int,
    parameters: Any,
) -> torch.optim.Optimizer:
    """torch's optimizer with its own clipping before each update, at the learning rate of the gradient's step."""
    made: torch.optim.Optimizer = optimizer(parameters)
    base, done = made.param_groups[0]["lr"], 0

    def before(*_: object) -> None:
        nonlocal done
        group = made.param_groups[0]
        if plan.step.clip_norm:
            nn.utils.clip_grad_norm_(group["params"], plan.step.clip_norm)
        if schedule is not None:
            group["lr"] = base * schedule(done // updates_per_step)
        done += 1

    made.register_step_pre_hook(before)
    return made


def assert_same(trainer: Trainer, weights: Weights, *, tolerance: float = 0.0) -> None:
    """Compare this stage's weights, by default to the bit."""
    mine = dict(trainer.named_model.named_parameters())
    assert mine
    for name, weight in mine.items():
        off = float((weight.detach() - weights[name]).abs().max())
        assert off <= tolerance, f"{name} is off by {off}"
