"""The sides of the tensor-parallel benchmark: one ordinary Llama under weft and under DTensor's plans.

Both have the same weights, batch and fused AdamW, torch's fastest here. torch gets the plans its own documentation
recommends, with the input of a group of column layers prepared once for all of them: 78 ms per step of the small model
on 2 ranks, where layers that each prepare their own took 92. `check` compares a side's losses with one process's.
`tensor_by_hand.py` has one more side.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import weft
from weft.plan.plan import Axes, Comm, Compile, Plan
from weft.plan.plan import Tensor as TensorSection

Batch = tuple[Tensor, Tensor]

LEARNING_RATE = 3e-4
CHECKED_STEPS = 4
TOLERANCE = 1e-4
"""Relative tolerance of a loss, over the checked steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, its batch, and the number of steps per turn."""

    vocab_size: int
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    num_samples: int
    num_tokens: int
    """Tokens per sample."""
    steps: int
    goal: float
    """Target speed relative to torch, eager."""


SIZES = {
    "small": Size(
        vocab_size=256,
        hidden=64,
        num_layers=4,
        heads=4,
        kv_heads=4,
        mlp_hidden=192,
        num_samples=2,
        num_tokens=32,
        steps=4,
        goal=3.0,
    ),
    "middle": Size(
        vocab_size=2048,
        hidden=512,
        num_layers=4,
        heads=8,
        kv_heads=4,
        mlp_hidden=1408,
        num_samples=1,
        num_tokens=128,
        steps=1,
        goal=1.2,
    ),
}


class Attention(nn.Module):
    """Attention with rotary positions and grouped key and value heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.hidden // size.heads
        kv_hidden = size.kv_heads * self.head_dim
        self.q = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k = nn.Linear(size.hidden, kv_hidden, bias=False)
        self.v = nn.Linear(size.hidden, kv_hidden, bias=False)
        self.o = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (self.q(x), self.k(x), self.v(x)))
        q, k, v = (each.transpose(1, 2) for each in (rotate(q, rotary), rotate(k, rotary), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.unsqueeze(2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.hidden, size.mlp_hidden, bias=False)
        self.up = nn.Linear(size.hidden, size.mlp_hidden, bias=False)
        self.down = nn.Linear(size.mlp_hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size.hidden), Attention(size)
        self.mlp_norm, self.mlp = nn.RMSNorm(size.hidden), MLP(size)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Maps tokens to logits of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        half = size.hidden // size.heads // 2
        angles = torch.outer(torch.arange(size.num_tokens), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.embedding = nn.Embedding(size.vocab_size, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, rotary = self.embedding(tokens), self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


def make_model(size: Size) -> Llama:
    torch.manual_seed(0)
    return Llama(size)


def make_batch(size: Size) -> Batch:
    shape = (size.num_samples, size.num_tokens + 1)
    text = torch.randint(size.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation of training, on this rank."""

    step: Callable[[Tensor, Tensor], float]
    """Forward, loss, backward and update; returns the loss."""
    optimizer: torch.optim.Optimizer


def weft_side(size: Size, *, compiled: bool, transport: str = "auto", sequence: bool = False) -> Side:
    plan = Plan(
        axes=Axes(tensor=dist.get_world_size()),
        tensor=TensorSection(sequence=sequence),
        compile=Compile(blocks=compiled),
        comm=Comm(transport=transport),
    )
    example = make_batch(size)[0]
    model = make_model(size)
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=adamw, example=example, device="cpu")
    return Side(step=lambda *batch: float(trainer.step(*batch)), optimizer=trainer.optimizer)


def torch_side(size: Size, *, compiled: bool, sequence: bool = False, split_loss: bool = True) -> Side:
    """DTensor's plan. `sequence`: norms on a part of the tokens; `split_loss`: logits are never gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(size)
    between = Shard(1) if sequence else Replicate()
    head = ColwiseParallel(
        input_layouts=between,
        output_layouts=Shard(-1) if split_loss else Replicate(),
        use_local_output=not split_loss,
    )
    ends = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between), "head": head}
    inside: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None)),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
    }
    inside |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    inside |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    inside |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.o", "mlp.down")}
    if sequence:
        ends["norm"] = SequenceParallel()
        inside |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
        if compiled:
            block.compile()
    if compiled:
        # torch 2.13 loses the gradient of a collective that is still pending where a compiled block begins.
        model.embedding.register_forward_hook(lambda *given: given[-1].clone())
    # A fused update takes DTensors or plain tensors, never both at once.
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizer = adamw([{"params": group} for group in (split, whole) if group])
    cross_entropy = torch.compile(F.cross_entropy) if compiled and not split_loss else F.cross_entropy

    def step(tokens: Tensor, targets: Tensor) -> float:
        with loss_parallel() if split_loss else contextlib.nullcontext():
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Side(step=step, optimizer=optimizer)


def check(name: str, side: Side, size: Size) -> None:
    """Check a side's first losses against one process's. AdamW hides gradients off by a common factor; tests do not."""
    batch, alone = make_batch(size), make_model(size)
    optimizer = adamw(alone.parameters())
    for number in range(CHECKED_STEPS):
        loss = F.cross_entropy(alone(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        got, wanted = side.step(*batch), loss.item()
        if not math.isclose(got, wanted, rel_tol=TOLERANCE):
            raise RuntimeError(
                f"{name} has the loss {got} in step {number}, one process {wanted}; it does not compute the same"
            )
