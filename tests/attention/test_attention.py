"""Attention of ranks that share a sequence out, against dense attention in one process: outputs and all gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_with
from ranks import ranks
from torch import Tensor

from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.attention.attention import Pass, SequenceAxes, attend, attend_traced, register
from weft.parallel.attention.attention_call import make_axes
from weft.plan.partition.sequence import Places, make_places
from weft.plan.plan import Axes, Comm, Plan

SCALE = 0.3
HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 7, 5), (15, 3, 4, 4)]
"""H, G, D, E; the last are not shared out evenly over 4, nor is what looks at which key head."""


@functools.cache
def mesh_of(ring: int, ulysses: int, transport: str) -> Mesh:
    plan = Plan(axes=Axes(ring=ring, ulysses=ulysses), comm=Comm(transport=transport))
    return mesh_with(plan, ("ring", "neighbours"), ("ulysses", "heads"))


def axes_of(ring: int, ulysses: int, variant: str = "ring", transport: str = "shared") -> SequenceAxes:
    return replace(make_axes(mesh_of(ring, ulysses, transport)), variant=variant)


@dataclass()
class Source:
    """What an operator is told of by a number."""

    axes: SequenceAxes
    now: Pass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sequence, known whole to every rank."""

    tensors: list[Tensor]
    """q, k, v and the gradient of the output."""
    places: Places
    is_causal: bool
    key_mask: Tensor | None = None
    documents: Tensor | None = None

    def now(self) -> Pass:
        return Pass(places=self.places, key_mask_BS=self.key_mask, documents_BS=self.documents)

    def own(self, whole: Tensor, axes: SequenceAxes) -> Tensor:
        ranges = self.places.ranges(axes.ring.index, axes.ulysses.index)
        return torch.cat([whole[:, :, start:stop] for start, stop in ranges], 2)

    def is_real(self, axes: SequenceAxes) -> Tensor:
        numbers = torch.arange(self.places.padded).view(1, 1, -1)
        return self.own(numbers, axes).view(-1) < self.places.num_tokens

    def true(self) -> list[Tensor]:
        """out, dq, dk, dv by torch's own attention; rows that see nothing are 0."""
        *inputs, grad = self.tensors
        leaves = [one.detach().clone().requires_grad_() for one in inputs]
        length = self.places.padded
        allowed = torch.ones(len(grad), 1, length, length, dtype=torch.bool)
        allowed = allowed.tril() if self.is_causal else allowed & (torch.arange(length) < self.places.num_tokens)
        if self.key_mask is not None:
            allowed = allowed & self.key_mask[:, None, None, :]
        if self.documents is not None:
            allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        sees = allowed.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(*leaves, attn_mask=allowed | ~sees, scale=SCALE, enable_gqa=True) * sees
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def make_case(
    places: Places, heads: tuple[int, int, int, int], *, is_causal: bool, mask: str = "none", samples: int = 2
) -> Case:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    (num_queries, num_keys, width, value_width), length = heads, places.padded
    sizes = [(num_queries, width), (num_keys, width), (num_keys, value_width), (num_queries, value_width)]
    tensors = [
        torch.randn(samples, number, length, entries, generator=generator, dtype=torch.float64)
        for number, entries in sizes
    ]
    tensors[3][:, :, places.num_tokens :] = 0
    key_mask = torch.rand(samples, length, generator=generator) > 0.4
    key_mask[0, :3] = False
    documents = torch.randint(3, (samples, length), generator=generator).sort(1).values
    return Case(
        tensors=tensors,
        places=places,
        is_causal=is_causal,
        key_mask=key_mask if mask in ("keys", "both") else None,
        documents=documents if mask in ("documents", "both") else None,
    )


def split(case: Case, axes: SequenceAxes, function: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """out, dq, dk, dv of this rank's tokens."""
    leaves = [case.own(one, axes).requires_grad_() for one in case.tensors[:3]]
    if function is None:
        out = attend(*leaves, axes=axes, now=case.now(), is_causal=case.is_causal, scale=SCALE)
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


def all_cases(ring: int, ulysses: int) -> Iterator[Case]:
    layouts = ("zigzag", "contiguous") if ring > 1 else ("zigzag",)
    for layout, is_causal, num_tokens in itertools.product(layouts, (True, False), (24, 17)):
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout=layout)
        for heads in HEADS:
            yield make_case(places, heads, is_causal=is_causal)
        for mask in ("keys", "documents", "both"):
            yield make_case(places, (6, 2, 8, 8), is_causal=is_causal, mask=mask)


def check_equal(ring: int, ulysses: int, variant: str, transport: str) -> None:
    axes = axes_of(ring, ulysses, variant, transport)
    for case in itertools.islice(all_cases(ring, ulysses), 0, None, 1 if transport == "shared" else 3):
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
shapes = pytest.mark.parametrize(("on", "ring", "ulysses"), SHAPES, ids=lambda one: one if type(one) is int else "")


@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@shapes
def test_split_attention_is_dense_attention(on: Callable[..., None], ring: int, ulysses: int, variant: str) -> None:
    on(check="check_equal", ring=ring, ulysses=ulysses, variant=variant, transport="shared")


def test_one_rank_has_it_all() -> None:
    check_equal(ring=1, ulysses=1, variant="ring", transport="shared")
    check_equal(ring=1, ulysses=1, variant="ring-self-attention", transport="shared")


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1)])
def test_over_sockets_too(ring: int, ulysses: int) -> None:
    on_4(check="check_equal", ring=ring, ulysses=ulysses, variant="ring", transport="c10d")


def check_operator(ring: int, ulysses: int, variant: str, compiled: bool) -> None:
    """Eager and compiled; the pass is over when gradients are asked for, and another may be under way."""
    source = Source(axes=axes_of(ring, ulysses, variant))
    number = register(source, source)

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return attend_traced(q * 1.0, k, v, number, is_causal, SCALE)

    torch.compiler.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    for num_tokens, is_causal, mask in itertools.product((24, 17), (True, False), ("none", "both")):
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout="zigzag")
        case = make_case(places, (6, 2, 8, 8), is_causal=is_causal, mask=mask)

        def forward(q: Tensor, k: Tensor, v: Tensor, case: Case = case) -> Tensor:
            source.now = case.now()
            out: Tensor = run(q, k, v, case.is_causal)
            source.now = None
            return out

        assert_same(split(case, source.axes, forward), case, source.axes)


@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_the_operator_is_the_same(ring: int, ulysses: int, variant: str) -> None:
    on_4(check="check_operator", ring=ring, ulysses=ulysses, variant=variant, compiled=False)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["ring", "ring-self-attention"])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_the_operator_compiles(ring: int, ulysses: int, variant: str) -> None:
    on_4(check="check_operator", ring=ring, ulysses=ulysses, variant=variant, compiled=True)


def check_bf16() -> None:
    for ring, ulysses in ((4, 1), (2, 2), (1, 4)):
        axes = axes_of(ring, ulysses)
        exact = make_case(make_places(64, ring=ring, ulysses=ulysses, layout="zigzag"), (4, 4, 8, 8), is_causal=True)
        tensors = [one.bfloat16() for one in exact.tensors]
        found = split(Case(tensors=tensors, places=exact.places, is_causal=True), axes)
        rounded = Case(tensors=[one.double() for one in tensors], places=exact.places, is_causal=True)
        assert all(one.dtype == torch.bfloat16 for one in found)
        assert_same([one.double() for one in found], rounded, axes, tolerance=2e-2)


def check_bytes() -> None:
    """Of each axis, in each direction, what `algorithms.md` says: blocks ring - 1 times, heads once there and back."""
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
    """No samples are attended to without any exchange, and have a gradient."""
    for (ring, ulysses), traced in itertools.product(((4, 1), (2, 2), (1, 4)), (False, True)):
        axes = axes_of(ring, ulysses)
        places = make_places(16, ring=ring, ulysses=ulysses, layout="zigzag")
        case = make_case(places, (4, 2, 8, 6), is_causal=True)
        source = Source(axes, case.now())
        number = register(source, source)
        leaves = [case.own(one, axes)[:0].requires_grad_() for one in case.tensors[:3]]
        calls = axes.ring.traffic.num_calls, axes.ulysses.traffic.num_calls
        if traced:
            out = attend_traced(*leaves, number, True, None)
        else:
            out = attend(*leaves, axes=axes, now=case.now(), is_causal=True)
        assert out.shape == (0, 4, 4, 6)
        out.sum().backward()
        assert [one.grad.shape for one in leaves if one.grad is not None] == [one.shape for one in leaves]
        assert (axes.ring.traffic.num_calls, axes.ulysses.traffic.num_calls) == calls


def check_dtypes() -> None:
    """Under autocast as torch's own attention does; else one dtype or none."""
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


@pytest.mark.parametrize(
    "check", ["check_bf16", "check_bytes", "check_no_samples", "check_dtypes", "check_too_few_heads"]
)
def test_split_attention(check: str) -> None:
    on_4(check=check)
