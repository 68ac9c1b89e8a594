"""The matrix: every plan equals one process that follows its rule, for every kind of model. New capabilities add rows.

A row of `CASES` is a plan, a model and the sizes of its global batches. Each row is verified twice against one process:
in float64, where every gradient, weight, buffer and loss is within 1e-10, and in float32, where losses are within 1e-5
over 10 steps. The number of ranks follows from the plan. Every file in examples/plans is a row by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import verify
from oracle import (
    ADAMW,
    SGD,
    Batch,
    MakeOptimizer,
    data_plan,
    image_batch,
    pipeline_plan,
    sequence_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from served_in_threads import servers_in_threads
from torch import Tensor, nn

from weft.models.gpt import GPT
from weft.plan.partition.one_worker import is_served
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import AXES, Axes, Data, Plan, Recompute, Step
from weft.plan.text import read_plan
from weft.verification.verify import verify as verify_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
NUM_STEPS_IN_SINGLE = 10


class Untrained(nn.Module):
    """A GPT with unused parameters and one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.first_unused = nn.Parameter(torch.ones(3))
        self.gpt = small_gpt()
        self.unused = nn.Linear(4, 4)
        self.sometimes = nn.Parameter(torch.zeros(17))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.gpt(tokens_BT)
        starts_with_0 = tokens_BT[:, 0] < 6
        if starts_with_0.any():
            logits_BTV = logits_BTV + starts_with_0[:, None, None] * self.sometimes
        return logits_BTV


class UNet(nn.Module):
    """Skip connections across several stages, and the model's own weights used by one or more stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 6)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 6))
        self.gain = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        first = x = (self.embedding(tokens_BT) + self.bias).tanh()
        kept = []
        for number, block in enumerate(self.blocks):
            if number >= 3:
                x = x + torch.relu(kept.pop())
            x = block(x).tanh() * self.gain
            if number < 3:
                kept.append(x)
        return (x + first) @ self.embedding.weight.T


def frozen_gpt() -> GPT:
    model = small_gpt(tied=False)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def frozen_convnet() -> nn.Module:
    """A frozen stem whose running statistics still change."""
    model = small_convnet()
    model.stem.requires_grad_(False)
    model.stem_norm.requires_grad_(False)
    return model


def biased_convnet() -> nn.Module:
    """Biases before BatchNorm: their true gradient is zero, and Adam would amplify its rounding."""
    model = small_convnet()
    channels = model.stem.out_channels
    model.stem.bias = nn.Parameter(torch.linspace(-1, 1, channels))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "rotary tied gpt": (small_gpt, token_batch),
    "learned untied gpt": (lambda: small_gpt(positions="learned", tied=False, norm="layer", bias=True), token_batch),
    "grouped gpt": (lambda: small_gpt(hidden=16, heads=4, kv_heads=2, dropout=0.2), token_batch),
    "frozen gpt": (frozen_gpt, token_batch),
    "gpt with unused": (Untrained, token_batch),
    "convnet": (small_convnet, image_batch),
    "frozen convnet": (frozen_convnet, image_batch),
    "biased convnet": (biased_convnet, image_batch),
    "deep gpt": (lambda: small_gpt(num_layers=4, positions="learned"), token_batch),
    "deep convnet": (lambda: small_convnet(num_blocks=4), image_batch),
    "unet": (UNet, token_batch),
    # matrices large enough to be compressed
    "wide gpt": (lambda: small_gpt(hidden=32, heads=4), token_batch),
    "group-normed convnet": (lambda: small_convnet(batch_norm=False), image_batch),
}

ONE, TWO, THREE = "optimizer", "gradients", "parameters"
EVEN, UNEVEN, SHORT = (8, 8, 8), (13, 5, 1, 13), (5, 1, 8, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    plan: Plan
    model: str
    sizes: tuple[int, ...]
    """Samples of each global batch, repeated if there are more steps."""
    optimizer: MakeOptimizer = SGD

    def batches(self, num_steps: int) -> list[Batch]:
        sizes = itertools.islice(itertools.cycle(self.sizes), num_steps)
        return [MODELS[self.model][1](size, seed=seed) for seed, size in enumerate(sizes)]


def row(plan: Plan, model: str, sizes: tuple[int, ...], optimizer: MakeOptimizer = SGD) -> Case:
    return Case(plan=plan, model=model, sizes=sizes, optimizer=optimizer)


DELAYED = {"sync": "delayed", "delay": 2}
STREAMING = {"every": 2, "fragments": 2, "delay": 1, "mix": 0.25}
NESTEROV = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def local_plan(*, microbatches: int = 1, clip_norm: float = 0.0, **fields: Any) -> Plan:
    """Replicas that differ, of which each may have several ranks."""
    axes = {name: fields.pop(name) for name in AXES if name in fields}
    step = Step(microbatches=microbatches, clip_norm=clip_norm)
    return Plan(axes=Axes(**axes), step=step, data=Data(**{"sync": "local", **fields}))


def recomputing(policy: str, plan: Plan) -> Plan:
    return replace(plan, recompute=Recompute(policy=policy))


def outermost(axis: str, plan: Plan) -> Plan:
    """The same plan with this axis outermost."""
    order = (axis, *(other for other in plan.axes.order if other != axis))
    return replace(plan, axes=replace(plan.axes, order=order))


def example_model(name: str, plan: Plan) -> str:
    """Name of the model for an example plan."""
    if name == "image-rows":
        return "convnet"
    if plan.codec.name not in ("none", "half"):
        return "wide gpt"
    return "deep gpt" if plan.axes.pipeline > 1 else "rotary tied gpt"


def acting_early(plan: Plan) -> Plan:
    """The plan, compressing and exchanging within a few steps."""
    if plan.codec.name == "none":
        return plan
    codec = replace(plan.codec, warmup_steps=min(plan.codec.warmup_steps, 1))
    return replace(plan, codec=codec, data=replace(plan.data, every=min(plan.data.every, 2)))


CASES = {
    # one rank: the trainer itself, accumulation and clipping
    "alone": row(data_plan(1), "rotary tied gpt", UNEVEN),
    "alone, 3 microbatches, clipped": row(data_plan(1, microbatches=3, clip_norm=0.1), "learned untied gpt", UNEVEN),
    "alone, convnet, 2 microbatches": row(data_plan(1, microbatches=2), "convnet", SHORT),
    # data 2
    "data 2": row(data_plan(2), "rotary tied gpt", EVEN),
    "data 2, AdamW": row(data_plan(2), "rotary tied gpt", UNEVEN, ADAMW),
    "data 2, uneven, clipped": row(data_plan(2, clip_norm=0.1), "learned untied gpt", UNEVEN),
    "data 2, 2 microbatches": row(data_plan(2, microbatches=2), "grouped gpt", UNEVEN),
    "data 2, 3 microbatches": row(data_plan(2, microbatches=3, clip_norm=0.2), "rotary tied gpt", SHORT),
    "data 2, frozen": row(data_plan(2, microbatches=2, clip_norm=0.1), "frozen gpt", UNEVEN),
    "data 2, unused": row(data_plan(2, microbatches=2), "gpt with unused", UNEVEN, ADAMW),
    "data 2, a bucket per parameter": row(data_plan(2, bucket_bytes=1), "gpt with unused", SHORT),
    "data 2, convnet": row(data_plan(2), "convnet", UNEVEN),
    "data 2, convnet, 2 microbatches": row(data_plan(2, microbatches=2, clip_norm=0.1), "convnet", SHORT),
    "data 2, convnet, 3 microbatches": row(data_plan(2, microbatches=3), "convnet", (13, 5, 2)),
    "data 2, frozen convnet": row(data_plan(2, bucket_bytes=500), "frozen convnet", UNEVEN, ADAMW),
    "data 2, biased convnet": row(data_plan(2), "biased convnet", UNEVEN * 2, ADAMW),
    "data 2, group norm": row(data_plan(2, microbatches=2), "group-normed convnet", UNEVEN),
    # data 3: batches do not divide evenly
    "data 3": row(data_plan(3, microbatches=2), "rotary tied gpt", (8, 2, 7)),
    # data 4
    "data 4": row(data_plan(4), "grouped gpt", EVEN),
    "data 4, uneven, clipped": row(data_plan(4, clip_norm=0.1), "learned untied gpt", UNEVEN),
    "data 4, 3 microbatches, small buckets": row(data_plan(4, microbatches=3, bucket_bytes=999), "frozen gpt", SHORT),
    "data 4, unused": row(data_plan(4), "gpt with unused", SHORT),
    "data 4, convnet": row(data_plan(4, clip_norm=0.1), "convnet", UNEVEN),
    "data 4, convnet, 2 microbatches": row(data_plan(4, microbatches=2), "convnet", SHORT),
    # ZeRO 1: optimizer state is sharded
    "zero 1, forced on one rank": row(data_plan(1, shard=ONE, microbatches=2), "rotary tied gpt", UNEVEN, ADAMW),
    "zero 1, data 2": row(data_plan(2, shard=ONE), "rotary tied gpt", UNEVEN, ADAMW),
    "zero 1, data 2, clipped, unused": row(data_plan(2, shard=ONE, clip_norm=0.1), "gpt with unused", SHORT, ADAMW),
    "zero 1, data 2, 3 microbatches, frozen": row(
        data_plan(2, shard=ONE, microbatches=3, bucket_bytes=999, clip_norm=0.1), "frozen gpt", SHORT
    ),
    "zero 1, data 2, convnet": row(data_plan(2, shard=ONE, microbatches=2), "convnet", UNEVEN),
    "zero 1, data 3": row(data_plan(3, shard=ONE, microbatches=2), "learned untied gpt", (8, 2, 7), ADAMW),
    "zero 1, data 4, a bucket per parameter": row(data_plan(4, shard=ONE, bucket_bytes=1), "gpt with unused", SHORT),
    # ZeRO 2: gradients are sharded too
    "zero 2, forced on one rank": row(data_plan(1, shard=TWO, microbatches=2), "rotary tied gpt", UNEVEN, ADAMW),
    "zero 2, data 2": row(data_plan(2, shard=TWO), "rotary tied gpt", EVEN, ADAMW),
    "zero 2, data 2, 3 microbatches, clipped": row(
        data_plan(2, shard=TWO, microbatches=3, clip_norm=0.1, bucket_bytes=5000), "learned untied gpt", UNEVEN
    ),
    "zero 2, data 2, unused": row(data_plan(2, shard=TWO, microbatches=2), "gpt with unused", UNEVEN, ADAMW),
    "zero 2, data 2, frozen convnet": row(data_plan(2, shard=TWO, bucket_bytes=500), "frozen convnet", UNEVEN, ADAMW),
    "zero 2, data 3": row(data_plan(3, shard=TWO, microbatches=2, clip_norm=0.2), "frozen gpt", (8, 2, 7)),
    "zero 2, data 4": row(data_plan(4, shard=TWO, microbatches=2), "grouped gpt", SHORT, ADAMW),
    # ZeRO 3: parameters are sharded too
    "zero 3, forced on one rank": row(data_plan(1, shard=THREE), "rotary tied gpt", UNEVEN, ADAMW),
    "zero 3, data 2": row(data_plan(2, shard=THREE), "rotary tied gpt", UNEVEN, ADAMW),
    "zero 3, data 2, 3 microbatches, reshard step": row(
        data_plan(2, shard=THREE, microbatches=3, clip_norm=0.1), "learned untied gpt", UNEVEN
    ),
    "zero 3, data 2, 3 microbatches": row(
        data_plan(2, shard=THREE, microbatches=3, reshard="microbatch", clip_norm=0.1), "rotary tied gpt", SHORT, ADAMW
    ),
    "zero 3, data 2, unused": row(data_plan(2, shard=THREE, microbatches=2), "gpt with unused", UNEVEN, ADAMW),
    "zero 3, data 2, frozen": row(data_plan(2, shard=THREE, microbatches=2, reshard="microbatch"), "frozen gpt", SHORT),
    "zero 3, data 2, convnet": row(data_plan(2, shard=THREE), "convnet", UNEVEN),
    "zero 3, data 2, convnet, 2 microbatches": row(
        data_plan(2, shard=THREE, microbatches=2, reshard="microbatch"), "frozen convnet", SHORT, ADAMW
    ),
    "zero 3, data 3": row(data_plan(3, shard=THREE, microbatches=2, clip_norm=0.2), "grouped gpt", (8, 2, 7)),
    "zero 3, data 4": row(data_plan(4, shard=THREE, clip_norm=0.1), "rotary tied gpt", SHORT, ADAMW),
    "zero 3, data 4, group norm": row(
        data_plan(4, shard=THREE, microbatches=2, reshard="microbatch"), "group-normed convnet", UNEVEN
    ),
    # hybrid: shards over data, replicas over replicate
    "hybrid zero 1": row(data_plan(2, shard=ONE, replicate=2, clip_norm=0.1), "rotary tied gpt", UNEVEN, ADAMW),
    "hybrid zero 2": row(data_plan(2, shard=TWO, replicate=2, microbatches=2), "gpt with unused", UNEVEN),
    "hybrid zero 3": row(data_plan(2, shard=THREE, replicate=2, clip_norm=0.1), "learned untied gpt", SHORT, ADAMW),
    "hybrid zero 3, convnet": row(
        data_plan(2, shard=THREE, replicate=2, microbatches=2, reshard="microbatch"), "convnet", UNEVEN
    ),
    "replicas of one part": row(data_plan(1, shard=TWO, replicate=2, microbatches=2), "frozen gpt", UNEVEN),
    # through sockets; all other rows of several ranks go through shared memory
    "sockets": row(data_plan(2, transport="c10d", microbatches=2), "gpt with unused", UNEVEN, ADAMW),
    "sockets, data 4, convnet": row(data_plan(4, transport="c10d", bucket_bytes=999), "convnet", SHORT),
    "sockets, zero 2": row(data_plan(2, shard=TWO, transport="c10d", microbatches=2), "rotary tied gpt", SHORT, ADAMW),
    "sockets, zero 3": row(data_plan(3, shard=THREE, transport="c10d", clip_norm=0.1), "frozen gpt", (8, 2, 7)),
    "sockets, hybrid zero 3": row(
        data_plan(2, shard=THREE, replicate=2, transport="c10d", microbatches=2), "grouped gpt", UNEVEN
    ),
    # recomputation
    "recompute, full": row(recomputing("full", data_plan(2, microbatches=2)), "grouped gpt", UNEVEN),
    "recompute, selective": row(recomputing("selective", data_plan(2, clip_norm=0.1)), "learned untied gpt", SHORT),
    "recompute, full, convnet": row(recomputing("full", data_plan(2, microbatches=2)), "frozen convnet", SHORT),
    "recompute, selective, convnet": row(recomputing("selective", data_plan(2)), "convnet", UNEVEN, ADAMW),
    "recompute, full, zero 3": row(
        recomputing("full", data_plan(2, shard=THREE, microbatches=2, reshard="microbatch")), "grouped gpt", UNEVEN
    ),
    "recompute, selective, zero 3": row(
        recomputing("selective", data_plan(2, shard=THREE)), "rotary tied gpt", SHORT, ADAMW
    ),
    # pipelines
    "naive 2": row(pipeline_plan(2, schedule="naive", microbatches=3), "deep gpt", SHORT),
    "gpipe 3": row(pipeline_plan(3, schedule="gpipe", microbatches=4, clip_norm=0.1), "deep convnet", UNEVEN),
    "1f1b 4": row(pipeline_plan(4, microbatches=6), "deep gpt", UNEVEN, ADAMW),
    "1f1b 2, unused": row(pipeline_plan(2, microbatches=2), "unet", UNEVEN),
    "1f1b 4, skip connections": row(pipeline_plan(4, microbatches=3, clip_norm=0.2), "unet", SHORT, ADAMW),
    "interleaved 2": row(pipeline_plan(2, schedule="interleaved", chunks=2, microbatches=4), "deep gpt", UNEVEN),
    "zero-bubble 4": row(pipeline_plan(4, schedule="zero-bubble", microbatches=5), "deep convnet", UNEVEN),
    "sockets, 1f1b 4": row(pipeline_plan(4, microbatches=4, transport="c10d"), "unet", SHORT),
    "gpipe 2, data 2": row(pipeline_plan(2, schedule="gpipe", data=2, microbatches=2), "deep convnet", UNEVEN),
    "interleaved 2, data 2, zero 1": row(
        pipeline_plan(2, schedule="interleaved", chunks=2, data=2, shard=ONE, microbatches=2, clip_norm=0.1),
        "deep gpt",
        UNEVEN,
        ADAMW,
    ),
    "zero-bubble 2, data 2, zero 2": row(
        pipeline_plan(2, schedule="zero-bubble", data=2, shard=TWO, microbatches=3), "deep gpt", SHORT
    ),
    "1f1b 2, data 2, zero 3": row(pipeline_plan(2, data=2, shard=THREE, microbatches=3), "deep convnet", UNEVEN),
    "1f1b 2, data 2, zero 3, recompute": row(
        recomputing("full", pipeline_plan(2, data=2, shard=THREE, microbatches=2)), "unet", UNEVEN
    ),
    "zero-bubble 2, recompute": row(
        recomputing("selective", pipeline_plan(2, schedule="zero-bubble", microbatches=3)), "deep gpt", SHORT
    ),
    # tensor parallelism
    "tensor 2": row(tensor_plan(2, clip_norm=0.1), "rotary tied gpt", SHORT, ADAMW),
    "tensor 2, 3 microbatches": row(tensor_plan(2, microbatches=3, sequence=True), "learned untied gpt", UNEVEN),
    "tensor 2, unused": row(tensor_plan(2, microbatches=2), "gpt with unused", UNEVEN, ADAMW),
    "tensor 2, frozen": row(tensor_plan(2, clip_norm=0.1, sequence=True), "frozen gpt", SHORT),
    "tensor 2, convnet": row(tensor_plan(2, microbatches=2), "frozen convnet", SHORT, ADAMW),
    "tensor 2, group norm": row(tensor_plan(2, clip_norm=0.1), "group-normed convnet", SHORT),
    "tensor 3": row(tensor_plan(3), "grouped gpt", SHORT),
    "tensor 4, more ranks than key heads": row(tensor_plan(4, clip_norm=0.1, sequence=True), "grouped gpt", SHORT),
    "tensor 2, data 2": row(tensor_plan(2, data=2, microbatches=2), "grouped gpt", UNEVEN, ADAMW),
    "tensor 2, data 2, convnet": row(tensor_plan(2, data=2, clip_norm=0.1), "convnet", UNEVEN),
    "tensor 2, data 2, zero 1": row(tensor_plan(2, data=2, shard=ONE, clip_norm=0.1), "learned untied gpt", UNEVEN),
    "tensor 2, data 2, zero 2": row(
        tensor_plan(2, data=2, shard=TWO, microbatches=2, clip_norm=0.1, sequence=True), "gpt with unused", UNEVEN
    ),
    "tensor 2, data 2, zero 3": row(
        tensor_plan(2, data=2, shard=THREE, microbatches=2, reshard="microbatch"), "frozen gpt", SHORT, ADAMW
    ),
    "tensor 2, data 2, zero 3, recompute": row(
        recomputing("selective", tensor_plan(2, data=2, shard=THREE, sequence=True)), "grouped gpt", UNEVEN
    ),
    "tensor 2, pipeline 2": row(tensor_plan(2, pipeline=2, microbatches=3, clip_norm=0.1), "deep gpt", UNEVEN),
    "tensor 2, zero-bubble 2": row(
        tensor_plan(2, pipeline=2, schedule="zero-bubble", microbatches=3, sequence=True), "deep gpt", SHORT, ADAMW
    ),
    "tensor 2, interleaved 2, data 2, zero 3": row(
        tensor_plan(
            2, pipeline=2, schedule="interleaved", chunks=2, data=2, shard=THREE, microbatches=2, sequence=True
        ),
        "deep gpt",
        UNEVEN,
    ),
    "tensor 2, hybrid zero 2": row(
        tensor_plan(2, data=2, replicate=2, shard=TWO, clip_norm=0.1), "rotary tied gpt", UNEVEN
    ),
    "tensor outermost": row(
        outermost("tensor", tensor_plan(2, data=2, shard=TWO, sequence=True)), "rotary tied gpt", SHORT
    ),
    "sockets, tensor 2, data 2": row(tensor_plan(2, data=2, transport="c10d", sequence=True), "grouped gpt", SHORT),
    # sequence parallelism
    "ring 2": row(sequence_plan(ring=2, clip_norm=0.1), "rotary tied gpt", SHORT, ADAMW),
    "ring 2, contiguous, 3 microbatches": row(
        sequence_plan(ring=2, layout="contiguous", microbatches=3), "learned untied gpt", UNEVEN
    ),
    "ring 2, self-attention": row(sequence_plan(ring=2, variant="ring-self-attention"), "grouped gpt", SHORT),
    "ring 3, padded": row(sequence_plan(ring=3, microbatches=2), "frozen gpt", SHORT, ADAMW),
    "ring 4": row(sequence_plan(ring=4), "grouped gpt", SHORT),
    "ulysses 2": row(sequence_plan(ulysses=2, microbatches=2, clip_norm=0.1), "rotary tied gpt", UNEVEN),
    "ulysses 4, more ranks than key heads": row(sequence_plan(ulysses=4), "grouped gpt", SHORT, ADAMW),
    "ring 2, ulysses 2": row(sequence_plan(ring=2, ulysses=2, clip_norm=0.1), "grouped gpt", UNEVEN, ADAMW),
    "ring 2, ulysses 2, recompute": row(
        recomputing("selective", sequence_plan(ring=2, ulysses=2, microbatches=2)), "learned untied gpt", SHORT
    ),
    "ring 2, recompute": row(recomputing("full", sequence_plan(ring=2, microbatches=2)), "grouped gpt", UNEVEN),
    "ring 2, data 2": row(sequence_plan(ring=2, data=2, microbatches=2), "rotary tied gpt", UNEVEN, ADAMW),
    "ulysses 2, data 2, zero 1": row(
        sequence_plan(ulysses=2, data=2, shard=ONE, clip_norm=0.1), "learned untied gpt", SHORT, ADAMW
    ),
    "ring 2, zero 2": row(sequence_plan(ring=2, shard=TWO, microbatches=2), "frozen gpt", UNEVEN, ADAMW),
    "ring 2, data 2, zero 3": row(
        sequence_plan(ring=2, data=2, shard=THREE, microbatches=2, reshard="microbatch"), "grouped gpt", UNEVEN
    ),
    "ring 2, hybrid zero 2": row(sequence_plan(ring=2, replicate=2, shard=TWO), "rotary tied gpt", UNEVEN, ADAMW),
    "ring 2, tensor 2": row(sequence_plan(ring=2, tensor=2, clip_norm=0.1), "rotary tied gpt", SHORT, ADAMW),
    "ulysses 2, tensor 2, split tokens": row(
        sequence_plan(ulysses=2, tensor=2, split_tokens=True, microbatches=2), "grouped gpt", UNEVEN
    ),
    "ring 2, pipeline 2": row(
        sequence_plan(ring=2, pipeline=2, microbatches=3, clip_norm=0.1), "deep gpt", UNEVEN, ADAMW
    ),
    "ulysses 2, zero-bubble 2, recompute": row(
        recomputing("full", sequence_plan(ulysses=2, pipeline=2, schedule="zero-bubble", microbatches=3)),
        "deep gpt",
        SHORT,
    ),
    "ring 2, ulysses 2, data 2, zero 3": row(
        sequence_plan(ring=2, ulysses=2, data=2, shard=THREE), "grouped gpt", UNEVEN, ADAMW
    ),
    "ring 2, pipeline 2, tensor 2": row(
        sequence_plan(ring=2, pipeline=2, tensor=2, split_tokens=True, microbatches=2), "deep gpt", UNEVEN
    ),
    "ring outermost": row(
        outermost("ring", sequence_plan(ring=2, data=2, shard=TWO, clip_norm=0.1)), "rotary tied gpt", SHORT
    ),
    "ulysses outside ring": row(outermost("ulysses", sequence_plan(ring=2, ulysses=2)), "grouped gpt", SHORT),
    "ring 2, convnet": row(sequence_plan(ring=2, microbatches=2, clip_norm=0.1), "convnet", SHORT, ADAMW),
    "ring 3, convnet": row(sequence_plan(ring=3), "frozen convnet", SHORT),
    "ring 2, data 2, convnet": row(sequence_plan(ring=2, data=2, microbatches=2), "biased convnet", UNEVEN, ADAMW),
    "ring 2, zero 3, group norm": row(sequence_plan(ring=2, shard=THREE), "group-normed convnet", UNEVEN, ADAMW),
    "ring 2, convnet, recompute in part": row(recomputing("selective", sequence_plan(ring=2)), "convnet", SHORT),
    "ring 2, convnet, recompute": row(recomputing("full", sequence_plan(ring=2)), "convnet", SHORT),
    "sockets, ring 2, ulysses 2": row(sequence_plan(ring=2, ulysses=2, transport="c10d"), "grouped gpt", SHORT),
    # replicas that differ, against one process that plays them by the rule
    "local 3": row(local_plan(data=3, every=2), "gpt with unused", UNEVEN, ADAMW),
    "local 2, post-local": row(local_plan(data=2, every=2, switch_step=2), "learned untied gpt", SHORT, ADAMW),
    "local 2, convnet": row(local_plan(data=2, every=2, microbatches=2), "biased convnet", UNEVEN, ADAMW),
    "diloco 3": row(local_plan(data=3, every=2, **NESTEROV), "frozen gpt", UNEVEN, ADAMW),
    "diloco 2, zero 3 inside": row(
        local_plan(replicate=2, data=2, shard=THREE, every=2, **NESTEROV), "grouped gpt", UNEVEN, ADAMW
    ),
    "diloco 2, pipeline 2 inside": row(
        local_plan(data=2, pipeline=2, microbatches=2, clip_norm=0.1, every=2, **NESTEROV), "unet", UNEVEN, ADAMW
    ),
    "local 2, tensor 2 inside": row(local_plan(data=2, tensor=2, every=2), "grouped gpt", SHORT, ADAMW),
    "local 2, ring 2 inside": row(local_plan(data=2, ring=2, every=2), "rotary tied gpt", SHORT),
    "delayed 3": row(local_plan(data=3, **DELAYED), "gpt with unused", UNEVEN, ADAMW),
    "delayed 2, convnet": row(local_plan(data=2, **DELAYED), "biased convnet", UNEVEN, ADAMW),
    "delayed 2, zero 3 inside": row(
        local_plan(replicate=2, data=2, shard=THREE, **DELAYED), "grouped gpt", UNEVEN, ADAMW
    ),
    "delayed 2, pipeline 2 inside": row(
        local_plan(data=2, pipeline=2, microbatches=2, clip_norm=0.1, **DELAYED), "unet", UNEVEN, ADAMW
    ),
    "streaming 3": row(local_plan(data=3, **STREAMING, **NESTEROV), "gpt with unused", UNEVEN, ADAMW),
    "streaming 2, zero 3 inside": row(
        local_plan(replicate=2, data=2, shard=THREE, **STREAMING, **NESTEROV), "grouped gpt", UNEVEN, ADAMW
    ),
    "streaming 2, pipeline 2 inside": row(
        local_plan(data=2, pipeline=2, microbatches=2, clip_norm=0.1, **STREAMING), "unet", UNEVEN, ADAMW
    ),
    # the examples; those whose results differ from one process's have their own tests
    **{
        f"examples/{path.name}": row(acting_early(plan), example_model(path.stem, plan), UNEVEN)
        for path in EXAMPLES.glob("*.toml")
        if (plan := read_plan(path)).pipeline.schedule not in FLUSH_FREE
    },
}


def check(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    num_steps = len(case.sizes) if dtype == torch.float64 else NUM_STEPS_IN_SINGLE
    # Workers of servers are worlds of their own, and share no groups that could be kept.
    proved = verify_plan if is_served(case.plan) else verify
    with servers_in_threads():
        outcome = proved(
            MODELS[case.model][0](),
            case.plan,
            loss="cross-entropy",
            optimizer=case.optimizer,
            batches=case.batches(num_steps),
            dtype=dtype,
            device="cpu",
        ).require()
    assert outcome.num_steps == num_steps
    kinds = {difference.what for difference in outcome.differences}
    if dtype == torch.float32:
        assert kinds == {"loss"} and outcome.tolerance == 1e-5
        return
    assert outcome.tolerance == 1e-10
    model = MODELS[case.model][0]()
    more = {"average"} if case.plan.average.decay else set()
    more |= {"state"} if is_served(case.plan) and case.plan.server.updates_together else set()
    assert kinds == {"loss", "gradient", "weight"} | more | ({"buffer"} if list(model.buffers()) else set())
    weights = {difference.name for difference in outcome.differences if difference.what == "weight"}
    assert weights == {parameter_name for parameter_name, _ in model.named_parameters()}, "nothing was left out"


@ranks(2)
def on_2(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@ranks(3)
def on_3(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@ranks(4)
def on_4(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@ranks(8)
def on_8(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


ON_RANKS = {1: check, 2: on_2, 3: on_3, 4: on_4, 8: on_8}


LONG_ROWS = {
    "alone, convnet, 2 microbatches",
    "data 2",
    "data 2, 3 microbatches",
    "data 2, a bucket per parameter",
    "data 2, convnet",
    "data 2, convnet, 3 microbatches",
    "data 4",
    "data 4, unused",
    "data 4, convnet, 2 microbatches",
    "zero 1, data 3",
    "zero 1, data 2, convnet",
    "zero 2, data 2",
    "zero 2, data 3",
    "zero 3, data 2",
    "zero 3, data 3",
    "zero 3, data 2, convnet",
    "hybrid zero 1",
    "naive 2",
    "interleaved 2",
    "zero-bubble 4",
    "1f1b 4, skip connections",
    "tensor 3",
    "tensor 2, convnet",
    "tensor 2, data 2, zero 1",
    "tensor 2, pipeline 2",
    "tensor 2, interleaved 2, data 2, zero 3",
    "tensor 2, hybrid zero 2",
    "ring 4",
    "ring 3, convnet",
    "ring 2, recompute",
    "ring 2, zero 2",
    "ring 2, tensor 2",
    "ring 2, data 2",
    "ring 2, convnet, recompute",
    "ulysses 2",
    "ring 2, hybrid zero 2",
    "ring 2, ulysses 2, data 2, zero 3",
    "ring 2, pipeline 2, tensor 2",
    "examples/parameter-server-backups.toml",
    "examples/sign.toml",
}
"""Rows whose features other rows cover in other combinations."""


IN_SINGLE = {f"examples/{name}.toml" for name in ("data-parallel", "zero", "tensor-pipeline")}


def is_sampled(case: Case) -> bool:
    """True if the sample of `test_combinations.py` covers the features of a row in other combinations."""
    return max(case.plan.axes.sizes.values()) == 2 and case.model in SAMPLED_MODELS


SAMPLED_MODELS = {
    "rotary tied gpt",
    "learned untied gpt",
    "grouped gpt",
    "convnet",
    "deep gpt",
    "deep convnet",
    "wide gpt",
}


def runs() -> list[Any]:
    """Every row in float64, where errors show; rows that no other covers also through ten steps of float32."""
    assert LONG_ROWS <= CASES.keys()
    found = []
    for name, case in CASES.items():
        is_covered = name in LONG_ROWS or (is_sampled(case) and name not in IN_SINGLE)
        found.append(pytest.param(name, torch.float64, id=f"{name}-double", marks=[pytest.mark.long] * is_covered))
        if not is_covered:
            marks = [] if name in IN_SINGLE else [pytest.mark.long]
            found.append(pytest.param(name, torch.float32, id=f"{name}-single", marks=marks))
    return found


@pytest.mark.sampled(14, long=54)
@pytest.mark.parametrize(("name", "dtype"), runs())
def test_a_plan_gives_the_answer_of_one_process(name: str, dtype: torch.dtype) -> None:
    ON_RANKS[CASES[name].plan.axes.num_ranks](name=name, dtype=dtype)


def test_there_are_examples() -> None:
    assert "examples/data-parallel.toml" in CASES
