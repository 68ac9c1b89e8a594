"""Attention over a sequence of which every rank holds a part, for autograd, and for compilers.

`attend` is for eager mode. `attend_traced` is the same as an operator that a compiler, or a policy of recomputation,
can see and keep whole. It takes tensors and plain numbers only, so it knows the axes by a number from `register`.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import ModelError
from weft.parallel.attention.attention_call import (
    FORWARDS,
    Call,
    Pass,
    Results,
    SequenceAxes,
    backward,
    empty_gradients,
    empty_results,
    forward,
    kept_tensors,
    make_call,
)
from weft.parallel.attention.kernels import Gradients
from weft.plan.partition.sequence import Places

__all__ = ["Pass", "SequenceAxes", "Source", "attend", "attend_traced", "register"]


def attend(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *,
    axes: SequenceAxes,
    now: Pass,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """[B, H, T, E]: what this rank's queries see in the whole sequence. All ranks of both axes call it together."""
    q_BHTD, k_BGTD, v_BGTE = _cast(q_BHTD, k_BGTD, v_BGTE)
    call = make_call(
        num_heads=(q_BHTD.shape[1], k_BGTD.shape[1]),
        widths=(q_BHTD.shape[3], k_BGTD.shape[3], v_BGTE.shape[3]),
        axes=axes,
        now=now,
        is_causal=is_causal,
        scale=scale,
    )
    made: Tensor = _Attend.apply(q_BHTD, k_BGTD, v_BGTE, call)  # type: ignore[no-untyped-call]
    return made


def _cast(*tensors: Tensor) -> list[Tensor]:
    """In one dtype, which is under autocast the one that torch's own attention would compute in."""
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


class Source(Protocol):
    """Where an operator finds what it cannot be given."""

    @property
    def axes(self) -> SequenceAxes: ...

    @property
    def now(self) -> Pass | None: ...


# Operators are given no objects, so this is known to the process.
_sources: dict[int, Source] = {}
_numbers = itertools.count()


def register(source: Source, owner: object) -> int:
    """A number by which `attend_traced` knows a model's axes and the pass under way, as long as the owner lives."""
    number = next(_numbers)
    _sources[number] = source
    weakref.finalize(owner, _sources.pop, number, None)
    return number


def attend_traced(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, number: int, is_causal: bool, scale: float | None = None
) -> Tensor:
    """`attend` as an operator; the pass is the one under way when this is called."""
    now = _sources[number].now
    assert now is not None, "attention outside of a pass"
    places = now.places
    q_BHTD, k_BGTD, v_BGTE = _cast(q_BHTD, k_BGTD, v_BGTE)
    made: Tensor = attention(
        q_BHTD,
        k_BGTD,
        v_BGTE,
        now.key_mask_BS,
        now.documents_BS,
        [places.num_tokens, places.padded, q_BHTD.shape[1], k_BGTD.shape[1], *_shaped_by(_sources[number].axes)],
        places.layout,
        number,
        is_causal,
        scale,
    )[0]
    return made


def _shaped_by(axes: SequenceAxes) -> list[int]:
    """What decides the sizes of results besides the tensors. It must stand in the graph: compilers keep code on disk by
    the graph, and would take that of another plan for this one's."""
    return [axes.ring.size, axes.ulysses.size, axes.ulysses.index, list(FORWARDS).index(axes.variant)]


@torch.library.custom_op("weft::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    number: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward`. `counts`: real tokens, padded tokens, query heads, key heads, and `_shaped_by`."""
    call = _call((q, k, v), key_mask, documents, counts, layout, number, is_causal, scale)
    out, rest, received, of_heads = forward(q, k, v, call)
    return out.contiguous(), rest.contiguous(), received, of_heads.contiguous()


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    number: int,
    is_causal: bool,
    scale: float | None,
) -> Results:
    return empty_results(q, _call((q, k, v), key_mask, documents, counts, layout, number, is_causal, scale))


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rest: Tensor,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    number: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward`."""
    call = _call((q, k, v), key_mask, documents, counts, layout, number, is_causal, scale)
    dq, dk, dv = backward(grad, q, k, v, out, rest, call)
    # Gradients that travelled are views of one message, and results of an operator may not share memory.
    return dq.contiguous(), dk.contiguous(), dv.clone(memory_format=torch.contiguous_format)


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rest: Tensor,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    number: int,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    call = _call((q, k, v), key_mask, documents, counts, layout, number, is_causal, scale)
    return empty_gradients(grad, call)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, key_mask, documents, *ctx.rest = inputs
    kept = kept_tensors((q, k, v), output, _call((q, k, v), key_mask, documents, *ctx.rest))
    ctx.save_for_backward(*kept, key_mask, documents)


def _go_back(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 7


attention.register_autograd(_go_back, setup_context=_keep)


def _call(
    tensors: Gradients,
    key_mask: Tensor | None,
    documents: Tensor | None,
    counts: list[int],
    layout: str,
    number: int,
    is_causal: bool,
    scale: float | None,
) -> Call:
    axes, (num_tokens, padded, num_queries, num_keys, *_) = _sources[number].axes, counts
    places = Places(num_tokens=num_tokens, padded=padded, ring=axes.ring.size, ulysses=axes.ulysses.size, layout=layout)
    q, k, v = tensors
    return make_call(
        num_heads=(num_queries, num_keys),
        widths=(q.shape[3], k.shape[3], v.shape[3]),
        axes=axes,
        now=Pass(places=places, key_mask_BS=key_mask, documents_BS=documents),
        is_causal=is_causal,
        scale=scale,
    )
