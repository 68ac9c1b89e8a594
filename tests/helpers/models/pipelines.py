"""Short constructors of plans with a pipeline, and models that are hard to cut, for tests of pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.plan.plan import Axes, Comm, Compile, Data, Pipeline, Plan, Precision, Recompute, Step

FLUSHING = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
HIDDEN = 12


def pipeline_plan(
    pipeline: int,
    *,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    data: int = 1,
    chunks: int | None = None,
    cuts: tuple[int, ...] = (),
    clip_norm: float = 0.0,
    shard: str = "nothing",
    reshard: str = "step",
    buffers: str = "synchronise",
    check_every: int = 100,
    recompute: str = "none",
    compute: str = "model",
    compiled: bool = False,
    transport: str | None = None,
) -> Plan:
    """A plan with as many microbatches as stages by default."""
    wire = {} if transport is None else {"transport": transport}
    return Plan(
        axes=Axes(data=data, pipeline=pipeline),
        step=Step(microbatches=microbatches or pipeline, clip_norm=clip_norm),
        pipeline=Pipeline(schedule=schedule, chunks=chunks or (2 if schedule == "interleaved" else 1), cuts=cuts),
        data=Data(shard=shard, reshard=reshard, buffers=buffers, check_every=check_every),
        precision=Precision(compute=compute),
        recompute=Recompute(policy=recompute),
        compile=Compile(blocks=compiled),
        comm=Comm(**wire),
    )


def vector_batch(num_samples: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors for the models below, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, HIDDEN, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (num_samples,), generator=generator)


class Block(nn.Module):
    """Two layers and a norm with a residual connection."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 16), nn.Linear(16, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Stem, blocks, head; subclasses connect them."""

    def __init__(self, num_blocks: int = 4, **extra: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, 5)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
