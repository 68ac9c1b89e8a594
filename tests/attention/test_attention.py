"""Attention over a split sequence against dense attention in one process: outputs and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import ranks
from split_attention import SCALE, Case, assert_same, axes_of, make_case, split
from torch import Tensor

from weft.errors import ModelError
from weft.parallel.attention.attention import UnderWay, attend, attend_traced
from weft.plan.partition.sequence import make_places

HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 7, 5), (15, 3, 4, 4)]
"""H, G, D, E; the last do not divide by 4, nor do the groups of query heads."""


def all_cases(ring: int, ulysses: int) -> Iterator[Case]:
    layouts = ("zigzag", "contiguous") if ring > 1 else ("zigzag",)
    for layout, is_causal, num_tokens in itertools.product(layouts, (True, False), (24, 17, 5)):
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout=layout)
        for heads in HEADS:
            yield make_case(places, heads, is_causal=is_causal)
        for mask in ("keys", "documents", "both"):
            yield make_case(places, (6, 2, 8, 8), is_causal=is_causal, mask=mask)


def check_equal(ring: int, ulysses: int, variant: str, transport: str) -> None:
    axes = axes_of(ring, ulysses, variant, transport)
    for case in itertools.islice(all_cases(ring, ulysses), 0, None, 3 if transport == "c10d" else 1):
        assert_same(split(case, axes), case, axes)


@ranks(2)
def on_2(check: str, **settings: Any) -> None:
    globals()[check](**settings)


@ranks(3)
def on_3(check: str, **settings: Any) -> None:
    globals()[check](**settings)


@ranks(4)
def on_4(check: str, **settings: Any) -> None:
    globals()[check](**settings)


SHAPES = [(on_2, 2, 1), (on_2, 1, 2), (on_3, 3, 1), (on_3, 1, 3), (on_4, 4, 1), (on_4, 2, 2), (on_4, 1, 4)]
SELDOM = [(on_3, 1, 3), (on_4, 4, 1), (on_4, 1, 4)]
shapes = pytest.mark.parametrize(
    ("on", "ring", "ulysses"),
    [pytest.param(*shape, marks=[pytest.mark.long] * (shape in SELDOM)) for shape in SHAPES],
    ids=lambda one: one if type(one) is int else "",
)


@pytest.mark.sampled(2, long=3)
@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@shapes
def test_split_attention_is_dense_attention(on: Callable[..., None], ring: int, ulysses: int, variant: str) -> None:
    for transport in ("shared", "messages") if ring > 1 else ("shared",):
        on(check="check_equal", ring=ring, ulysses=ulysses, variant=variant, transport=transport)


def test_one_rank_has_it_all() -> None:
    check_equal(ring=1, ulysses=1, variant="ring", transport="shared")
    check_equal(ring=1, ulysses=1, variant="ring-self-attention", transport="shared")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1)])
def test_over_sockets_too(ring: int, ulysses: int) -> None:
    on_4(check="check_equal", ring=ring, ulysses=ulysses, variant="ring", transport="c10d")


def check_operator(ring: int, ulysses: int, variant: str, compiled: bool) -> None:
    """Eager and compiled; the pass is over when gradients are asked for, and another may be under way."""
    under_way = UnderWay(axes_of(ring, ulysses, variant))

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return attend_traced(q * 1.0, k, v, under_way, is_causal=is_causal, scale=SCALE)

    torch.compiler.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    for num_tokens, is_causal, mask in itertools.product((24, 17), (True, False), ("none", "both")):
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout="zigzag")
        case = make_case(places, (6, 2, 8, 8), is_causal=is_causal, mask=mask)

        def forward(q: Tensor, k: Tensor, v: Tensor, case: Case = case) -> Tensor:
            under_way.now = case.now()
            out: Tensor = run(q, k, v, case.is_causal)
            under_way.now = None
            return out

        assert_same(split(case, under_way.axes, forward), case, under_way.axes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_the_operator_is_the_same(ring: int, ulysses: int, variant: str) -> None:
    on_4(check="check_operator", ring=ring, ulysses=ulysses, variant=variant, compiled=False)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_the_operator_compiles(ring: int, ulysses: int, variant: str) -> None:
    on_4(check="check_operator", ring=ring, ulysses=ulysses, variant=variant, compiled=True)


def check_bytes() -> None:
    """Bytes per axis and direction sent: blocks ring - 1 times, heads once there and back."""
    for ring, ulysses in ((4, 1), (2, 2), (1, 4)):
        axes = axes_of(ring, ulysses)
        case = make_case(make_places(32, ring=ring, ulysses=ulysses, layout="zigzag"), (8, 4, 8, 8), is_causal=True)
        leaves = [case.own(one, axes).requires_grad_() for one in case.tensors[:3]]
        sent = [(axes.ring.traffic.sent_bytes, axes.ulysses.traffic.sent_bytes)]
        out = attend(*leaves, axes=axes, now=case.now(), is_causal=True)
        sent.append((axes.ring.traffic.sent_bytes, axes.ulysses.traffic.sent_bytes))
        out.sum().backward()
        sent.append((axes.ring.traffic.sent_bytes, axes.ulysses.traffic.sent_bytes))
        block_bytes = leaves[1].nbytes + leaves[2].nbytes  # ulysses has as many times more tokens as fewer heads
        all_bytes = leaves[0].nbytes * 2 + block_bytes
        hops, others = (ring - 1) * block_bytes, (ulysses - 1) * all_bytes // ulysses
        assert [(after[0] - before[0]) for before, after in itertools.pairwise(sent)] == [hops, 2 * hops]
        assert [(after[1] - before[1]) for before, after in itertools.pairwise(sent)] == [others, others]


def check_no_samples() -> None:
    """An empty batch needs no exchange, and has a gradient."""
    for (ring, ulysses), traced in itertools.product(((4, 1), (2, 2), (1, 4)), (False, True)):
        axes = axes_of(ring, ulysses)
        places = make_places(16, ring=ring, ulysses=ulysses, layout="zigzag")
        case = make_case(places, (4, 2, 8, 6), is_causal=True)
        leaves = [case.own(one, axes)[:0].requires_grad_() for one in case.tensors[:3]]
        calls = axes.ring.traffic.num_calls, axes.ulysses.traffic.num_calls
        if traced:
            under_way = UnderWay(axes, case.now())
            out = attend_traced(*leaves, under_way, is_causal=True)
        else:
            out = attend(*leaves, axes=axes, now=case.now(), is_causal=True)
        assert out.shape == (0, 4, 4, 6)
        out.sum().backward()
        assert [one.grad.shape for one in leaves if one.grad is not None] == [one.shape for one in leaves]
        assert (axes.ring.traffic.num_calls, axes.ulysses.traffic.num_calls) == calls


def check_dtypes() -> None:
    """Casts under autocast as torch's own attention does; refuses mixed dtypes otherwise."""
    axes = axes_of(2, 2)
    case = make_case(make_places(16, ring=2, ulysses=2, layout="zigzag"), (4, 4, 8, 8), is_causal=True)
    q, k, v = (case.own(one, axes).float() for one in case.tensors[:3])
    settings: dict[str, Any] = {"axes": axes, "now": case.now(), "is_causal": True}
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v.bfloat16(), **settings)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **settings))
    with pytest.raises(ModelError, match="queries in float32, keys in float32 and values in bfloat16"):
        attend(q, k, v.bfloat16(), **settings)


def check_too_few_heads() -> None:
    axes = axes_of(1, 4)
    case = make_case(make_places(16, ring=1, ulysses=4, layout="zigzag"), (3, 3, 8, 8), is_causal=True)
    with pytest.raises(ModelError, match="3 heads on this rank, too few for .axes. ulysses = 4.*ulysses = 2, ring = 2"):
        split(case, axes)


@pytest.mark.parametrize("check", ["check_bytes", "check_no_samples", "check_dtypes", "check_too_few_heads"])
def test_split_attention(check: str) -> None:
    on_4(check=check)
