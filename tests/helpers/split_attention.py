"""Attention over a split sequence and by its definition: the same tensors on every rank, outputs and all gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from meshes import mesh_with
from torch import Tensor

from weft.mesh import Mesh
from weft.parallel.attention.attention import Pass, SequenceAxes, attend
from weft.parallel.attention.attention_call import make_axes
from weft.plan.partition.sequence import Band, Places
from weft.plan.plan import Axes, Comm, Plan

SCALE = 0.3


@functools.cache
def mesh_of(ring: int, ulysses: int, transport: str) -> Mesh:
    plan = Plan(axes=Axes(ring=ring, ulysses=ulysses), comm=Comm(transport=transport))
    return mesh_with(plan, ("ring", "neighbours"), ("ulysses", "heads"))


def axes_of(ring: int, ulysses: int, variant: str = "ring", transport: str = "shared") -> SequenceAxes:
    """`transport`: as in [comm], or "messages": blocks travel through shared memory, and are not read in place."""
    axes = make_axes(mesh_of(ring, ulysses, "shared" if transport == "messages" else transport))
    return replace(axes, variant=variant, blocks=None if transport == "messages" else axes.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sequence, known whole to every rank."""

    tensors: list[Tensor]
    """q, k, v and the gradient of the output."""
    places: Places
    is_causal: bool
    key_mask: Tensor | None = None
    documents: Tensor | None = None
    band: Band | None = None
    softcap: float | None = None

    def now(self) -> Pass:
        return Pass(places=self.places, key_mask_BS=self.key_mask, documents_BS=self.documents)

    def own(self, whole: Tensor, axes: SequenceAxes) -> Tensor:
        ranges = self.places.ranges(axes.ring.index, axes.ulysses.index)
        return torch.cat([whole[:, :, start:stop] for start, stop in ranges], 2)

    def is_real(self, axes: SequenceAxes) -> Tensor:
        numbers = torch.arange(self.places.padded).view(1, 1, -1)
        return self.own(numbers, axes).view(-1) < self.places.num_tokens

    def true(self) -> list[Tensor]:
        """out, dq, dk, dv by definition, in float64; rows that see nothing are 0."""
        *inputs, grad = (one.double() for one in self.tensors)
        q, k, v = leaves = [one.detach().clone().requires_grad_() for one in inputs]
        length, repeats = self.places.padded, q.shape[1] // k.shape[1]
        allowed = torch.ones(len(grad), 1, length, length, dtype=torch.bool)
        allowed = allowed.tril() if self.is_causal else allowed & (torch.arange(length) < self.places.num_tokens)
        if self.key_mask is not None:
            allowed = allowed & self.key_mask[:, None, None, :]
        if self.documents is not None:
            allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        if self.band is not None:
            behind = torch.arange(length)[:, None] - torch.arange(length)
            allowed = allowed & (behind <= self.band.before) & (behind >= -self.band.after)
        scores = q @ k.repeat_interleave(repeats, 1).mT * SCALE
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        scores = scores.masked_fill(~allowed, -1e300)
        out = (scores.softmax(-1) * allowed.any(-1, keepdim=True)) @ v.repeat_interleave(repeats, 1)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def make_case(
    places: Places,
    heads: tuple[int, int, int, int],
    *,
    is_causal: bool,
    mask: str = "none",
    dtype: torch.dtype = torch.float64,
    band: Band | None = None,
    softcap: float | None = None,
) -> Case:
    """Two samples, the same on every rank. `heads`: H, G, D, E; `mask`: none | keys | documents | both.

    Some keys are seen by no query, and under "both" all keys of a sample are masked.
    """
    generator = torch.Generator().manual_seed(0)
    (num_queries, num_keys, width, value_width), length = heads, places.padded
    sizes = [(num_queries, width), (num_keys, width), (num_keys, value_width), (num_queries, value_width)]
    tensors = [
        torch.randn(2, number, length, entries, generator=generator, dtype=torch.float64).to(dtype)
        for number, entries in sizes
    ]
    tensors[3][:, :, places.num_tokens :] = 0  # padding has no loss
    key_mask = torch.rand(2, length, generator=generator) > 0.4
    key_mask[0, : None if mask == "both" else 3] = False
    documents = torch.randint(3, (2, length), generator=generator).sort(1).values
    return Case(
        tensors=tensors,
        places=places,
        is_causal=is_causal,
        key_mask=key_mask if mask in ("keys", "both") else None,
        documents=documents if mask in ("documents", "both") else None,
        band=band,
        softcap=softcap,
    )


def split(case: Case, axes: SequenceAxes, function: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """out, dq, dk, dv of this rank's tokens."""
    leaves = [case.own(one, axes).requires_grad_() for one in case.tensors[:3]]
    if function is None:
        scoring: Any = {"is_causal": case.is_causal, "scale": SCALE, "band": case.band, "softcap": case.softcap}
        out = attend(*leaves, axes=axes, now=case.now(), **scoring)
    else:
        out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, case.own(case.tensors[3], axes))]


def assert_same(found: list[Tensor], case: Case, axes: SequenceAxes, tolerance: float = 1e-12) -> None:
    real = case.is_real(axes)
    for one, whole in zip(found, case.true(), strict=True):
        expected = case.own(whole, axes)[:, :, real]
        assert one.dtype == case.tensors[0].dtype and one.shape[2] == len(real)
        off = (one[:, :, real] - expected).abs().max().item() if expected.numel() else 0.0
        assert off <= tolerance * max(whole.abs().max().item(), 1.0)
