"""A small GPT in nanoGPT's style, trained on the text of this file: one process, or any number of ranks under any plan.

    python examples/newcomer_gpt.py
    torchrun --nproc-per-node 2 examples/newcomer_gpt.py
    torchrun --nproc-per-node 2 examples/newcomer_gpt.py examples/plans/zero.toml

Model, data, schedule and weight decay are those of the script for one device. What weft asks for: `parallelize` instead
of an optimizer, a dataset with a length instead of random draws on each rank, and `trainer.step` for the loop's body.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.plan.plan import Axes, Plan

CONTEXT, LAYERS, HEADS, WIDTH = 32, 2, 4, 32
BATCH, LEARNING_RATE, WARMUP = 8, 3e-3, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSE: Tensor) -> Tensor:
        batch, length, width = x_BSE.shape
        q, k, v = self.c_attn(x_BSE).split(width, dim=2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attn(self.ln_1(x_BSE))
        return x_BSE + self.mlp(self.ln_2(x_BSE))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSE = self.transformer["wte"](tokens_BS) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x_BSE = block(x_BSE)
        return self.lm_head(self.transformer["ln_f"](x_BSE))


class Characters(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the targets are the next characters."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        self.tokens = torch.tensor([self.letters.index(letter) for letter in text])

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def learning_rate(step: int, steps: int) -> float:
    """Factor of the learning rate: warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))


def main(plan: Plan | str | Path | None = None, *, steps: int = 50) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(1337)
    data = Characters(Path(__file__).read_text())
    with weft.parallelize(
        GPT(len(data.letters)),
        plan or Plan(axes=Axes(data="all")),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, betas=(0.9, 0.95)),
        schedule=functools.partial(learning_rate, steps=steps),
        groups=lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0},  # matrices, not biases and norms
        global_batch=BATCH,
        example=data[0][0][None],  # inputs of one sample, by which pipelines and split layers are cut
    ) as trainer:
        losses: list[float] = []
        for inputs, targets in weft.batches(data, trainer, global_batch=BATCH, shuffle_seed=0, epochs=None):
            losses.append(trainer.step(inputs, targets).item())
            if trainer.mesh.world.rank == 0 and trainer.steps_done % 10 == 0:
                print(f"step {trainer.steps_done}: loss {losses[-1]:.4f}")
            if trainer.steps_done == steps:
                break
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
