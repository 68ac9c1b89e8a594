"""One call of attention over a sequence that several ranks hold: ulysses around a ring, or either alone.

    T tokens,           U·T tokens,                               T tokens,
    all heads ─ all-to-all ─> some heads ─ ring ─> their output ─ all-to-all ─> all heads

Kept for the backward pass: queries, keys and values as the ring uses them, its output, and one tensor more, the
log-sum-exp (ring) or the probabilities (ring self-attention). With ulysses the first three are one received message.

Dims: B samples, H query heads, G key heads, T tokens of this rank, S tokens of the whole padded sequence; D and E
entries of a key and a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.dtypes import accumulator_dtype
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.attention.kernels import Gradients
from weft.parallel.attention.masks import Pass
from weft.parallel.attention.ring import ring_backward, ring_forward
from weft.parallel.attention.ring_exchange import Ring
from weft.parallel.attention.ring_self_attention import self_attention_backward, self_attention_forward
from weft.parallel.attention.ring_shared_memory import SharedBlocks
from weft.parallel.attention.ulysses import heads_of, to_heads, to_tokens
from weft.plan.model_refusals import SOFT_CAPS_OF_WHOLE_ROWS
from weft.plan.partition.sequence import Band, HeadShares, share_heads

FORWARDS = {"ring": ring_forward, "ring-self-attention": self_attention_forward}
BACKWARDS = {"ring": ring_backward, "ring-self-attention": self_attention_backward}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAxes:
    """The ranks that hold a sequence together."""

    ring: Group
    ulysses: Group
    variant: str = "ring"
    """As in [sequence] variant."""
    blocks: SharedBlocks | None = None
    """Shared memory for blocks of keys and values; None: they travel."""


def make_axes(mesh: Mesh) -> SequenceAxes:
    """The axes of a mesh's plan."""
    ring, ulysses = mesh.group("ring", "neighbours"), mesh.group("ulysses", "heads")
    return SequenceAxes(ring=ring, ulysses=ulysses, variant=mesh.plan.sequence.variant, blocks=SharedBlocks(ring))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of attention without its tensors."""

    axes: SequenceAxes
    ring: Ring
    heads: HeadShares
    widths: tuple[int, int, int]
    """Entries per head of a query, a key and a value."""

    @property
    def has_ulysses(self) -> bool:
        return self.axes.ulysses.size > 1

    @property
    def num_heads(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values that this rank attends with."""
        rank = self.axes.ulysses.index
        (first, last), (start, stop) = self.heads.queries[rank], self.heads.keys[rank]
        return last - first, stop - start, stop - start

    @property
    def row(self) -> list[int]:
        """Entries per token that ulysses receives: of queries, keys and values."""
        return [number * width for number, width in zip(self.num_heads, self.widths, strict=True)]

    @property
    def repeats(self) -> list[int] | None:
        """How many query heads look at each key head; None: equally many, as kernels expect."""
        looked_at = self.heads.local_keys(self.axes.ulysses.index) if self.has_ulysses else None
        return None if looked_at is None else [looked_at.count(key) for key in range(self.num_heads[1])]


def _repeat(heads_BGTX: Tensor, repeats: list[int]) -> Tensor:
    """Each key head as often as query heads look at it. Without a tensor of indices, for which the host would wait."""
    heads = zip(heads_BGTX.split(1, 1), repeats, strict=True)
    return torch.cat([head.expand(-1, each, -1, -1) for head, each in heads], 1)


def _sum_repeated(heads_BHTX: Tensor, repeats: list[int]) -> Tensor:
    """The gradients of key heads from those of their repetitions."""
    return torch.cat([of_one.sum(1, keepdim=True) for of_one in heads_BHTX.split(repeats, 1)], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How queries and keys become weights."""

    is_causal: bool
    scale: float | None = None
    """None: one over the square root of a head's entries."""
    band: Band | None = None
    """A window; it says what is causal, too."""
    softcap: float | None = None
    """Scores s are softcap · tanh(s / softcap)."""


def make_call(tensors: Gradients, num_heads: tuple[int, int], axes: SequenceAxes, now: Pass, scoring: Scoring) -> Call:
    """`num_heads`: heads of queries and of keys, before ulysses splits them."""
    q, k, v = tensors
    widths = (q.shape[3], k.shape[3], v.shape[3])
    scale = 1.0 / math.sqrt(widths[0]) if scoring.scale is None else scoring.scale
    if scoring.softcap is not None and axes.variant != "ring":
        raise ModelError(SOFT_CAPS_OF_WHOLE_ROWS.message(softcap=scoring.softcap, variant=axes.variant))
    ring = Ring(
        group=axes.ring,
        shared=axes.blocks,
        now=now,
        is_causal=scoring.is_causal,
        scale=scale,
        band=scoring.band,
        softcap=scoring.softcap,
    )
    heads = share_heads(*num_heads, ulysses=axes.ulysses.size, ring=axes.ring.size)
    return Call(axes=axes, ring=ring, heads=heads, widths=widths)


Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""(output of this rank's tokens, log-sum-exp or probabilities, message received by ulysses, output of its heads).

The last two are empty without ulysses, where they would equal the inputs and the output.
"""


def forward(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, call: Call) -> Results:
    if not len(q_BHTD):
        return empty_results(q_BHTD, call)
    group, heads = call.axes.ulysses, call.heads
    q, k, v, received = q_BHTD, k_BGTD, v_BGTE, q_BHTD.new_empty(0)
    if call.has_ulysses:
        received, (q, k, v) = to_heads([(q, heads.queries), (k, heads.keys), (v, heads.keys)], group)
    repeats = call.repeats
    if repeats is not None:
        k, v = _repeat(k, repeats), _repeat(v, repeats)
    out, rest = FORWARDS[call.axes.variant](q, k, v, call.ring)
    if not call.has_ulysses:
        return out, rest, received, q.new_empty(0)
    (of_tokens,) = to_tokens([(out, heads.queries)], group)
    return of_tokens, rest, received, out


def empty_results(q_BHTD: Tensor, call: Call) -> Results:
    """Uninitialised results of the right shapes, for an empty batch or for a compiler."""
    batch, num_queries, tokens, _ = q_BHTD.shape
    own, all_tokens, width = call.num_heads[0], tokens * call.axes.ulysses.size, call.widths[2]
    if call.axes.variant == "ring":
        rest = q_BHTD.new_empty((batch, own, all_tokens), dtype=accumulator_dtype(q_BHTD.dtype))
    else:
        rest = q_BHTD.new_empty((batch, own, all_tokens, all_tokens * call.axes.ring.size))
    out = q_BHTD.new_empty((batch, num_queries, tokens, width))
    if not call.has_ulysses:
        return out, rest, q_BHTD.new_empty(0), q_BHTD.new_empty(0)
    received = q_BHTD.new_empty((all_tokens, batch, sum(call.row)))
    return out, rest, received, q_BHTD.new_empty((batch, own, all_tokens, width))


def kept_tensors(inputs: Gradients, results: Results, call: Call) -> list[Tensor]:
    """The tensors that `backward` takes after the gradient."""
    out, rest, received, of_heads = results
    if not call.has_ulysses:
        return [*inputs, out, rest]
    return [*heads_of(received, call.row, call.widths), of_heads, rest]


def backward(grad_BHTE: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, call: Call) -> Gradients:
    """(dq, dk, dv) of this rank's tokens."""
    group, heads = call.axes.ulysses, call.heads
    if not len(grad_BHTE):
        return empty_gradients(grad_BHTE, call)
    grad = grad_BHTE
    if call.has_ulysses:
        _, (grad,) = to_heads([(grad_BHTE, heads.queries)], group)
    repeats = call.repeats
    if repeats is not None:
        k, v = _repeat(k, repeats), _repeat(v, repeats)
    dq, dk, dv = BACKWARDS[call.axes.variant](grad, q, k, v, out, rest, call.ring)
    if repeats is not None:
        dk, dv = _sum_repeated(dk, repeats), _sum_repeated(dv, repeats)
    if not call.has_ulysses:
        return dq, dk, dv
    dq, dk, dv = to_tokens([(dq, heads.queries), (dk, heads.keys), (dv, heads.keys)], group)
    return dq, dk, dv


def empty_gradients(grad_BHTE: Tensor, call: Call) -> Gradients:
    batch, tokens = grad_BHTE.shape[0], grad_BHTE.shape[2]
    num_queries, num_keys = call.heads.queries[-1][1], call.heads.keys[-1][1]
    dq, dk, dv = (
        grad_BHTE.new_empty((batch, number, tokens, width))
        for number, width in zip((num_queries, num_keys, num_keys), call.widths, strict=True)
    )
    return dq, dk, dv
