"""Attention over a sequence that several ranks hold, for autograd and for compilers.

`attend` is for eager mode. `attend_traced` does the same as an operator, which a compiler or a policy of recomputation
treats as a unit. Operators take tensors and plain values only, so they know the axes by a handle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import ModelError
from weft.parallel.attention.attention_call import (
    FORWARDS,
    Call,
    Results,
    Scoring,
    SequenceAxes,
    backward,
    empty_gradients,
    empty_results,
    forward,
    kept_tensors,
    make_call,
)
from weft.parallel.attention.kernels import Gradients
from weft.parallel.attention.masks import Pass
from weft.parallel.tracing.handles import handle_of, object_of
from weft.plan.partition.sequence import Band, Places

__all__ = ["Pass", "SequenceAxes", "UnderWay", "attend", "attend_traced"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class UnderWay:
    """The sequence axes of a model and the pass that is under way."""

    axes: SequenceAxes
    now: Pass | None = None
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = handle_of(self)


def attend(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *,
    axes: SequenceAxes,
    now: Pass,
    is_causal: bool,
    scale: float | None = None,
    band: Band | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[B, H, T, E]: attention of this rank's queries to the whole sequence. Collective over both axes."""
    q, k, v = _cast(q_BHTD, k_BGTD, v_BGTE)
    scoring = Scoring(is_causal=is_causal, scale=scale, band=band, softcap=softcap)
    call = make_call((q, k, v), (q.shape[1], k.shape[1]), axes, now, scoring)
    made: Tensor = _Attend.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return made


def _cast(*tensors: Tensor) -> list[Tensor]:
    """The inputs in one dtype: under autocast the one in which torch's own attention would compute."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(one if one.dtype == torch.float64 else one.to(dtype) for one in tensors)
    dtypes = [one.dtype for one in tensors]
    if len(set(dtypes)) > 1:
        q, k, v = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"attention is given queries in {q}, keys in {k} and values in {v}; cast them to one dtype")
    return list(tensors)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        results = forward(q, k, v, call)
        ctx.call = call
        ctx.save_for_backward(*kept_tensors((q, k, v), results, call))
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, rest = ctx.saved_tensors
        return *backward(grad, q, k, v, out, rest, ctx.call), None


def attend_traced(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    under_way: UnderWay,
    *,
    is_causal: bool,
    scale: float | None = None,
    band: Band | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attend` as an operator; the pass is the one under way when this is called."""
    now, axes = under_way.now, under_way.axes
    assert now is not None, "attention outside of a pass"
    q, k, v = _cast(q_BHTD, k_BGTD, v_BGTE)
    counts = [now.places.num_tokens, now.places.padded, q.shape[1], k.shape[1]]
    # These decide the shapes of results and must be in the graph: compilers cache code on disk by the graph, and would
    # use that of another plan for this one.
    counts += [axes.ring.size, axes.ulysses.size, axes.ulysses.index, list(FORWARDS).index(axes.variant)]
    window = [] if band is None else [band.before, band.after]
    of_pass = (now.key_mask_BS, now.documents_BS, counts, now.places.layout, under_way.handle)
    made: Tensor = attention(q, k, v, *of_pass, is_causal, scale, window, softcap)[0]
    return made


_SETTINGS = (
    "Tensor? key_mask, Tensor? documents, SymInt[] counts, str layout, SymInt under_way, bool is_causal, "
    "float? scale, SymInt[] window, float? softcap"
)
"""`counts`: real tokens, padded tokens, query heads, key heads, and what else decides the shapes of results."""


@torch.library.custom_op(
    "weft::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Results:
    out, rest, received, of_heads = forward(q, k, v, _call((q, k, v), *settings))
    return out.contiguous(), rest.contiguous(), received, of_heads.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Results:
    return empty_results(q, _call((q, k, v), *settings))


@torch.library.custom_op(
    "weft::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rest, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, *settings: Any
) -> Gradients:
    dq, dk, dv = backward(grad, q, k, v, out, rest, _call((q, k, v), *settings))
    # Gradients that travelled are views of one message, and results of an operator may not share memory.
    return dq.contiguous(), dk.contiguous(), dv.clone(memory_format=torch.contiguous_format)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, *settings: Any) -> Gradients:
    return empty_gradients(grad, _call((q, k, v), *settings))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, key_mask, documents, *ctx.rest = inputs
    kept = kept_tensors((q, k, v), output, _call((q, k, v), key_mask, documents, *ctx.rest))
    ctx.save_for_backward(*kept, key_mask, documents)


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 9


attention.register_autograd(_backward, setup_context=_setup_context)


def _call(
    tensors: Gradients,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    under_way: int,
    is_causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
) -> Call:
    axes: SequenceAxes = object_of(under_way).axes
    num_tokens, padded, num_queries, num_keys, *_ = counts
    places = Places(num_tokens=num_tokens, padded=padded, ring=axes.ring.size, ulysses=axes.ulysses.size, layout=layout)
    now = Pass(places=places, key_mask_BS=key_mask, documents_BS=documents)
    band = Band(before=window[0], after=window[1]) if window else None
    scoring = Scoring(is_causal=is_causal, scale=scale, band=band, softcap=softcap)
    return make_call(tensors, (num_queries, num_keys), axes, now, scoring)
