"""The sides of the benchmark of sequence parallelism: one attention, and a GPT's step, under weft, torch and one rank.

Every side of attention gets the same queries, keys, values and gradient, from which each rank takes its own tokens;
`check_attention` compares all results with one process's. torch has no public ring attention for CPUs, but
the template beneath its context parallelism is independent of the kernel: here it gets the CPU's flash kernel, the same
that weft calls, and keeps its own zigzag balance. Both of its ways to send keys around are sides.

Dims: B samples, H heads, S tokens of the whole sequence, T of this rank, D entries of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as template

import weft
from weft.mesh import make_mesh
from weft.models.gpt import GPT, GPTConfig
from weft.parallel.attention.attention import Pass, attend
from weft.parallel.attention.attention_call import make_axes
from weft.plan.partition.sequence import make_places
from weft.plan.plan import Axes, Comm, Plan
from weft.plan.plan import Sequence as SequenceSection
from weft.world import World

aten = torch.ops.aten
HEADS, HEAD_DIM = 8, 64
TOLERANCE = 2e-4
"""Tolerance relative to the largest entry, in float32."""
LEARNING_RATE = 3e-4
CHECKED_STEPS = 3
GPT_SIZES = GPTConfig(vocab_size=256, num_layers=4, hidden=512, heads=8)

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""(out, dq, dk, dv)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation of attention, on this rank."""

    tokens_T: Tensor
    """Indices of this rank's tokens in the sequence."""
    run: Callable[..., Results]
    """Forward and backward, given q, k, v and the gradient of this rank's tokens."""


def sequence_plan(
    *, ring: int = 1, ulysses: int = 1, layout: str = "zigzag", variant: str = "ring", transport: str = "auto"
) -> Plan:
    return Plan(
        axes=Axes(ring=ring, ulysses=ulysses),
        sequence=SequenceSection(layout=layout, variant=variant),
        comm=Comm(transport=transport),
    )


def weft_side(plan: Plan, world: World, num_tokens: int) -> Side:
    mesh = make_mesh(plan, world)
    axes = make_axes(mesh)
    places = make_places(num_tokens, ring=axes.ring.size, ulysses=axes.ulysses.size, layout=plan.sequence.layout)
    ranges = places.ranges(axes.ring.index, axes.ulysses.index)

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Results:
        return _with_gradients(
            functools.partial(attend, axes=axes, now=Pass(places=places), is_causal=True), (q, k, v), grad
        )

    return Side(tokens_T=torch.cat([torch.arange(*one) for one in ranges]), run=run)


def torch_side(method: str, num_tokens: int) -> Side:
    """torch's template; `method`: all-gather or all-to-all."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(num_tokens).chunk(2 * num_ranks)
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Results:
        template.set_rotate_method(method.replace("-", ""))
        group = dist.group.WORLD
        out, lse, *_ = template._templated_ring_attention(group, 2, forward_op, q, k, v, is_causal=True, dropout_p=0.0)
        dq, dk, dv, *_ = template._templated_ring_attention_backward(
            group, 2, backward_op, grad, "grad_out", q, k, v, out, lse, True, dropout_p=0.0
        )
        return out, dq, dk, dv

    return Side(tokens_T=torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]]), run=run)


def alone_side(num_tokens: int) -> Side:
    """The first rank has the whole sequence, and the others wait."""
    has_all = dist.get_rank() == 0

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Results:
        if not has_all:
            return grad, q, k, v
        return _with_gradients(functools.partial(F.scaled_dot_product_attention, is_causal=True), (q, k, v), grad)

    return Side(tokens_T=torch.arange(num_tokens if has_all else 0), run=run)


def _with_gradients(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Results:
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = attention(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    return out.detach(), dq, dk, dv


def make_tensors(num_tokens: int) -> list[Tensor]:
    """q, k, v and a gradient, [B, H, S, D]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, num_tokens, HEAD_DIM, generator=generator) for _ in range(4)]


def make_sides(num_tokens: int, world: World) -> dict[str, Side]:
    num_ranks = world.size
    plans = {
        "ring": sequence_plan(ring=num_ranks),
        "ring, contiguous": sequence_plan(ring=num_ranks, layout="contiguous"),
        "ring, sockets": sequence_plan(ring=num_ranks, transport="c10d"),
        "ulysses": sequence_plan(ulysses=num_ranks),
        "ring self-attention": sequence_plan(ring=num_ranks, variant="ring-self-attention"),
    }
    if num_ranks >= 4:
        plans["ulysses 2 x ring"] = sequence_plan(ulysses=2, ring=num_ranks // 2)
    sides = {name: weft_side(plan, world, num_tokens) for name, plan in plans.items()}
    torch_sides = {f"torch, {method}": torch_side(method, num_tokens) for method in ("all-gather", "all-to-all")}
    return {"one rank": alone_side(num_tokens), **sides, **torch_sides}


def check_attention(sides: dict[str, Side], num_tokens: int) -> None:
    """Check every side's results for its tokens against one process's."""
    tensors = make_tensors(num_tokens)
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    wanted = _with_gradients(attention, tuple(tensors[:3]), tensors[3])
    for name, side in sides.items():
        got = side.run(*(one[:, :, side.tokens_T] for one in tensors))
        for what, mine, whole in zip(("output", "dq", "dk", "dv"), got, wanted, strict=True):
            own = whole[:, :, side.tokens_T]
            error = float((mine - own).abs().max() / whole.abs().max()) if own.numel() else 0.0
            if not error < TOLERANCE:
                raise RuntimeError(
                    f"{name} has the {what} wrong by {error:.1e} of its largest entry, more than {TOLERANCE:.0e}; it "
                    "does not compute the same"
                )


Step = Callable[[Tensor, Tensor], float]
"""Forward, loss, backward and update; returns the loss."""


def make_batch(config: GPTConfig, num_samples: int = 1) -> tuple[Tensor, Tensor]:
    shape = (num_samples, config.context + 1)
    text = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def make_model(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def make_trainer(config: GPTConfig, plan: Plan) -> weft.Trainer:
    example = make_batch(config)[0]
    return weft.parallelize(
        make_model(config), plan, loss="cross-entropy", optimizer=adamw, example=example, device="cpu"
    )


def weft_step(config: GPTConfig, plan: Plan) -> Step:
    trainer = make_trainer(config, plan)
    return lambda *batch: float(trainer.step(*batch))


def alone_step(config: GPTConfig) -> Step:
    """The first rank trains by itself, and the others wait."""
    model = make_model(config)
    optimizer = adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> float:
        if dist.get_rank():
            return math.nan
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def check_losses(steps: dict[str, Step], batch: tuple[Tensor, Tensor], *, rel_tol: float = 1e-4) -> None:
    """Check that losses of all sides agree with the first one's, which need not be on every rank."""
    losses = {name: [step(*batch) for _ in range(CHECKED_STEPS)] for name, step in steps.items()}
    if dist.get_rank():
        return
    first, *others = losses
    for name in others:
        if not all(math.isclose(*pair, rel_tol=rel_tol) for pair in zip(losses[name], losses[first], strict=True)):
            raise RuntimeError(f"{name} has the losses {losses[name]}, {first} {losses[first]}; they differ")
