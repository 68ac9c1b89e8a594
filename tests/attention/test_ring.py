"""Ring attention on ranks whose blocks travel as messages, against attention by its definition; and what they send."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import Mesh  # meshes of one shape share their groups
from ranks import ranks
from torch import Tensor

from weft.mesh import join_world
from weft.parallel.attention import ring_exchange
from weft.parallel.attention.attention_call import BACKWARDS, FORWARDS
from weft.parallel.attention.masks import Pass
from weft.parallel.attention.ring_exchange import Rotation
from weft.plan.partition.grid import Grid
from weft.plan.partition.sequence import LAYOUTS, Places, make_places
from weft.plan.plan import Axes, Plan

SCALE = 0.3
HEADS = [(3, 3, 8, 8), (4, 2, 8, 8), (4, 1, 7, 5)]
"""H, G, D, E."""


@functools.cache
def rotation_of(ring: int) -> Rotation:
    plan = Plan(axes=Axes(ring=ring))
    return Rotation(Mesh(plan=plan, world=join_world("cpu"), grid=Grid(plan.axes)).group("ring", "keys"))


def own_tokens(whole: Tensor, places: Places) -> Tensor:
    ranges = places.ring_ranges(rotation_of(places.ring).index)
    return torch.cat([whole[:, :, start:stop] for start, stop in ranges], 2)


def run_ring(tensors: list[Tensor], now: Pass, *, is_causal: bool, variant: str) -> list[Tensor]:
    """out, dq, dk, dv of this rank's tokens, from q, k, v and the output's gradient, which all ranks have whole."""
    settings = {"rotation": rotation_of(now.places.ring), "now": now, "is_causal": is_causal, "scale": SCALE}
    *inputs, grad = (own_tokens(one, now.places) for one in tensors)
    made = FORWARDS[variant](*inputs, **settings)
    return [made[0], *BACKWARDS[variant](grad, *inputs, *made, **settings)]


def by_definition(tensors: list[Tensor], allowed: Tensor) -> list[Tensor]:
    *inputs, grad = (one.double() for one in tensors)
    q, k, v = leaves = [one.clone().requires_grad_() for one in inputs]
    repeats = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(repeats, 1).mT * SCALE).masked_fill(~allowed, -1e300)
    out = (scores.softmax(-1) * allowed.any(-1, keepdim=True)) @ v.repeat_interleave(repeats, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def make_tensors(heads: tuple[int, int, int, int], places: Places, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same on every rank, which are seeded alike."""
    num_queries, num_keys, width, value_width = heads
    sizes = [(num_queries, width), (num_keys, width), (num_keys, value_width), (num_queries, value_width)]
    tensors = [torch.randn(2, number, places.padded, entries).to(dtype) for number, entries in sizes]
    tensors[3][:, :, places.num_tokens :] = 0  # padding has no loss
    return tensors


def compare(tensors: list[Tensor], now: Pass, *, is_causal: bool, variant: str, tolerance: float) -> None:
    places = now.places
    allowed = torch.ones(2, 1, places.padded, places.padded, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    else:
        allowed[..., places.num_tokens :] = False
    if now.key_mask_BS is not None:
        allowed = allowed & now.key_mask_BS[:, None, None, :]
    if now.documents_BS is not None:
        allowed = allowed & (now.documents_BS[:, None, :, None] == now.documents_BS[:, None, None, :])
    is_real = own_tokens(torch.arange(places.padded).view(1, 1, -1), places).view(-1) < places.num_tokens
    found = run_ring(tensors, now, is_causal=is_causal, variant=variant)
    for one, whole in zip(found, by_definition(tensors, allowed), strict=True):
        assert one.dtype == tensors[0].dtype
        off = (one - own_tokens(whole, places))[:, :, is_real].abs()
        assert not off.numel() or off.max().item() <= tolerance * max(whole.abs().max().item(), 1.0)


def check_definition(ring: int, layout: str, variant: str) -> None:
    for heads, num_tokens, is_causal in itertools.product(HEADS, (24, 17, 5), (True, False)):
        now = Pass(places=make_places(num_tokens, ring=ring, ulysses=1, layout=layout))
        compare(make_tensors(heads, now.places), now, is_causal=is_causal, variant=variant, tolerance=1e-12)


def check_masks(ring: int, layout: str, variant: str) -> None:
    """Among them keys that no query sees, a sample of which all are masked, and several documents in one sequence."""
    for num_tokens, is_causal, with_keys, with_documents in itertools.product((24, 17), *[(True, False)] * 3):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        keys = torch.rand(2, places.padded) > 0.4
        keys[0] = False
        keys[1, 0] = False
        documents = torch.randint(3, (2, places.padded)).sort(1).values
        masks = {"key_mask_BS": keys if with_keys else None, "documents_BS": documents if with_documents else None}
        tensors = make_tensors((4, 2, 8, 8), places)
        compare(tensors, Pass(places=places, **masks), is_causal=is_causal, variant=variant, tolerance=1e-12)


@ranks(2)
def on_2(check: str, **settings: Any) -> None:
    globals()[check](**settings)


@ranks(3)
def on_3(check: str, **settings: Any) -> None:
    globals()[check](**settings)


@ranks(4)
def on_4(check: str, **settings: Any) -> None:
    globals()[check](**settings)


def on_1(check: str, **settings: Any) -> None:
    globals()[check](**settings)


ON: dict[int, Callable[..., None]] = {1: on_1, 2: on_2, 3: on_3, 4: on_4}


@pytest.mark.parametrize("variant", FORWARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_a_ring_is_attention_by_its_definition(ring: int, layout: str, variant: str) -> None:
    ON[ring](check="check_definition", ring=ring, layout=layout, variant=variant)


@pytest.mark.parametrize("variant", FORWARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_masks_are_kept(ring: int, layout: str, variant: str) -> None:
    ON[ring](check="check_masks", ring=ring, layout=layout, variant=variant)


@ranks(4)
@pytest.mark.parametrize("variant", FORWARDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_other_dtypes_are_right_within_rounding(dtype: torch.dtype, tolerance: float, variant: str) -> None:
    now = Pass(places=make_places(64, ring=4, ulysses=1, layout="zigzag"))
    tensors = make_tensors((4, 2, 8, 8), now.places, dtype)
    compare(tensors, now, is_causal=True, variant=variant, tolerance=tolerance)


@ranks(4)
def test_large_scores_do_not_overflow() -> None:
    """Blocks whose log-sum-exps are thousands apart, either way."""
    now = Pass(places=make_places(24, ring=4, ulysses=1, layout="zigzag"))
    tensors = make_tensors((2, 2, 8, 8), now.places)
    tensors[1][:, :, ::5] *= 1e4
    for is_causal in (True, False):
        compare(tensors, now, is_causal=is_causal, variant="ring", tolerance=1e-9)


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_sends(layout: str) -> None:
    """Blocks ring - 1 times each way, their gradients as often and in 32 bits; also blocks that a rank may not see."""
    now = Pass(places=make_places(16, ring=4, ulysses=1, layout=layout))
    q, k, v, grad = (one[:, :, :4] for one in make_tensors((4, 2, 8, 6), now.places, torch.bfloat16))
    settings = {"rotation": rotation_of(4), "now": now, "is_causal": True, "scale": SCALE}
    with mock.patch.object(ring_exchange, "exchange", wraps=ring_exchange.exchange) as exchange:
        made = FORWARDS["ring"](q, k, v, **settings)
        num_forward = exchange.call_count
        BACKWARDS["ring"](grad, q, k, v, *made, **settings)
    sent = [(one.kwargs["tag"], one.args[0].numel(), one.args[0].dtype) for one in exchange.call_args_list]
    block = (0, k.numel() + v.numel(), torch.bfloat16)
    assert sent[:num_forward] == [block] * 3
    assert sorted(sent[num_forward:], key=str) == sorted([block] * 3 + [(1, block[1], torch.float32)] * 3, key=str)
