"""A model whose computation is somebody else's: it sleeps, and its gradients are ready block by block.

What a worker exchanges, and with whom, is then real, while the computation occupies no core, as on an accelerator: 16
workers on two cores show where servers, sockets and cores become the bottleneck of 16 machines, as far as the cores
carry the exchange. It learns nothing: gradients are constants, written once by the CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FEATURES, CLASSES, SAMPLES = 8, 4, 4
FORWARD_SHARE = 1 / 3
"""Of a step; the backward pass has twice the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What a worker computes, and what it has to exchange for that."""

    gradient_mb: float
    step_s: float
    num_blocks: int = 8

    @property
    def block_numel(self) -> int:
        return int(self.gradient_mb * 1e6 / 4 / self.num_blocks)

    @property
    def title(self) -> str:
        return f"{self.gradient_mb:g} MB of gradients in {self.num_blocks} blocks, {1e3 * self.step_s:g} ms per step"


class _Sleep(torch.autograd.Function):
    """Sleeps; its weight's gradient is a constant."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.shape = weight.shape
        ctx.seconds = seconds * (1 - FORWARD_SHARE)
        time.sleep(seconds * FORWARD_SHARE)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.full(ctx.shape, 1e-3), None


class _Block(nn.Module):
    """A layer that sleeps."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(numel)), seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Sleep.apply(inputs, self.weight, self.seconds)
        return found


class EmulatedModel(nn.Module):
    """Blocks that sleep, and a small head that makes it a model with a loss."""

    def __init__(self, emulated: Emulated) -> None:
        super().__init__()
        block_s = emulated.step_s / emulated.num_blocks
        self.blocks = nn.ModuleList(_Block(emulated.block_numel, block_s) for _ in range(emulated.num_blocks))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        logits: torch.Tensor = self.head(inputs)
        return logits


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)
