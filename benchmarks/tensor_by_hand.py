"""The model of the tensor-parallel benchmark split by hand, with autograd functions over `dist.all_reduce`.

It is the minimum for one model, without any check, and shows what a thin layer can cost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_sides import Side, Size, adamw, make_model
from torch import Tensor, nn


class Enter(torch.autograd.Function):
    """Identity forward, all-reduce of gradients backward: the input of column layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """All-reduce forward, identity backward: the output of row layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SplitCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose vocabulary is sharded over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        largest = logits.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(1)
        place, rows = targets - first, torch.arange(len(targets))
        is_mine = (place >= 0) & (place < logits.shape[1])
        place = place.clamp(0, logits.shape[1] - 1)
        target = shifted[rows, place] * is_mine
        sums = torch.stack((target, shifted.exp_().sum(1)))
        dist.all_reduce(sums)
        shifted /= sums[1].unsqueeze(1)
        shifted[rows, place] -= is_mine.to(shifted.dtype)
        ctx.save_for_backward(shifted)
        return (sums[1].log() - sums[0]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * (gradient / len(difference)), None, None


def hand_side(size: Size) -> Side:
    """The model split by hand, eager only."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = make_model(size)

    def keep(layer: nn.Linear | nn.Embedding, dim: int) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().chunk(num_ranks, dim)[rank].clone())

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return Enter.apply(inputs[0]), *inputs[1:]

    def leave(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return Leave.apply(output)

    for block in model.blocks:
        for column in (block.attention.q, block.attention.k, block.attention.v, block.mlp.gate, block.mlp.up):
            keep(column, 0)
        for row in (block.attention.o, block.mlp.down):
            keep(row, 1)
            row.register_forward_hook(leave)
        for part in (block.attention, block.mlp):
            part.register_forward_pre_hook(enter)
    keep(model.head, 0)
    model.head.register_forward_pre_hook(enter)
    keep(model.embedding, 0)
    num_rows = size.vocab_size // num_ranks
    first = rank * num_rows

    def look_up(tokens: Tensor) -> Tensor:
        place = tokens - first
        is_mine = (place >= 0) & (place < num_rows)
        return Leave.apply(F.embedding(place * is_mine, model.embedding.weight) * is_mine.unsqueeze(-1))

    model.embedding.forward = look_up
    optimizer = adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = SplitCrossEntropy.apply(model(tokens).flatten(0, 1), targets.flatten(), first)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Side(step=step, optimizer=optimizer)
