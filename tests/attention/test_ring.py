"""Rings that are all in one process, place after place, against attention by its definition; and what they send."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from weft.parallel.attention.masks import Masks, make_masks
from weft.parallel.attention.ring import backward_steps, forward_steps
from weft.parallel.attention.ring_exchange import Arrival, LocalRotation, finish, local_rotations
from weft.parallel.attention.ring_self_attention import self_attention_backward_steps, self_attention_forward_steps
from weft.plan.partition.sequence import LAYOUTS, Places, make_places

VARIANTS = {
    "ring": (forward_steps, backward_steps),
    "ring-self-attention": (self_attention_forward_steps, self_attention_backward_steps),
}
SCALE = 0.3
HEADS = [(3, 3, 8, 8), (4, 2, 8, 8), (4, 1, 7, 5)]
"""H, G, D, E."""


def cut(whole: Tensor, places: Places, rank: int) -> Tensor:
    return torch.cat([whole[:, :, start:stop] for start, stop in places.ring_ranges(rank)], 2)


def join(parts: list[Tensor], places: Places) -> Tensor:
    whole = parts[0].new_empty(*parts[0].shape[:2], places.padded, parts[0].shape[3])
    for rank, part in enumerate(parts):
        ranges = places.ring_ranges(rank)
        for (start, stop), piece in zip(ranges, part.split([stop - start for start, stop in ranges], 2), strict=True):
            whole[:, :, start:stop] = piece
    return whole


def run_ring(
    tensors: list[Tensor], places: Places, *, is_causal: bool, masks: Masks | None = None, variant: str = "ring"
) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence, from q, k, v and the output's gradient."""
    forward, backward = VARIANTS[variant]
    settings = {"places": places, "is_causal": is_causal, "scale": SCALE, "masks": masks}
    *inputs, grads = [[cut(one, places, rank) for rank in range(places.ring)] for one in tensors]
    own = list(zip(*inputs, strict=True))
    rotations = local_rotations(places.ring)
    made = finish(*(forward(*own[one.index], rotation=one, **settings) for one in rotations))
    steps = (
        backward(grads[one.index], *own[one.index], *made[one.index], rotation=one, **settings) for one in rotations
    )
    gradients = finish(*steps)
    results = [(out, *some) for (out, _), some in zip(made, gradients, strict=True)]
    return [join(list(parts), places) for parts in zip(*results, strict=True)]


def by_definition(tensors: list[Tensor], allowed: Tensor) -> list[Tensor]:
    *inputs, grad = (one.double() for one in tensors)
    q, k, v = leaves = [one.clone().requires_grad_() for one in inputs]
    repeats = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(repeats, 1).mT * SCALE).masked_fill(~allowed, -1e300)
    out = (scores.softmax(-1) * allowed.any(-1, keepdim=True)) @ v.repeat_interleave(repeats, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def make_tensors(heads: tuple[int, int, int, int], places: Places, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    num_queries, num_keys, width, value_width = heads
    sizes = [(num_queries, width), (num_keys, width), (num_keys, value_width), (num_queries, value_width)]
    tensors = [torch.randn(2, number, places.padded, entries).to(dtype) for number, entries in sizes]
    tensors[3][:, :, places.num_tokens :] = 0  # nobody asks what padding sees
    return tensors


def compare(
    tensors: list[Tensor], places: Places, *, is_causal: bool, masks: Masks | None, variant: str, tolerance: float
) -> None:
    allowed = torch.ones(2, 1, places.padded, places.padded, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    else:
        allowed[..., places.num_tokens :] = False
    if masks is not None and masks.key_mask_BS is not None:
        allowed = allowed & masks.key_mask_BS[:, None, None, :]
    if masks is not None and masks.documents_BS is not None:
        allowed = allowed & (masks.documents_BS[:, None, :, None] == masks.documents_BS[:, None, None, :])
    found = run_ring(tensors, places, is_causal=is_causal, masks=masks, variant=variant)
    for one, true in zip(found, by_definition(tensors, allowed), strict=True):
        one, true = one[:, :, : places.num_tokens], true[:, :, : places.num_tokens]
        assert (one - true).abs().max().item() <= tolerance * max(true.abs().max().item(), 1.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_a_ring_is_attention_by_its_definition(ring: int, layout: str, variant: str) -> None:
    for heads, num_tokens, is_causal in itertools.product(HEADS, (24, 17, 5), (True, False)):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        tensors = make_tensors(heads, places)
        compare(tensors, places, is_causal=is_causal, masks=None, variant=variant, tolerance=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_masks_are_kept(ring: int, layout: str, variant: str) -> None:
    """Among them keys that nobody sees, a sample of which all are masked, and several documents in one sequence."""
    for num_tokens, is_causal, with_keys, with_documents in itertools.product((24, 17), *[(True, False)] * 3):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        keys = torch.rand(2, places.padded) > 0.4
        keys[0] = False
        keys[1, 0] = False
        documents = torch.randint(3, (2, places.padded)).sort(1).values
        masks = make_masks(places, keys if with_keys else None, documents if with_documents else None)
        tensors = make_tensors((4, 2, 8, 8), places)
        compare(tensors, places, is_causal=is_causal, masks=masks, variant=variant, tolerance=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_other_dtypes_are_right_within_rounding(dtype: torch.dtype, tolerance: float, variant: str) -> None:
    places = make_places(64, ring=4, ulysses=1, layout="zigzag")
    tensors = make_tensors((4, 2, 8, 8), places, dtype)
    found = run_ring(tensors, places, is_causal=True, variant=variant)
    assert all(one.dtype == dtype for one in found)
    compare(tensors, places, is_causal=True, masks=None, variant=variant, tolerance=tolerance)


def test_large_scores_do_not_overflow() -> None:
    """Blocks whose log-sum-exps are thousands apart, either way."""
    places = make_places(24, ring=4, ulysses=1, layout="zigzag")
    tensors = make_tensors((2, 2, 8, 8), places)
    tensors[1][:, :, ::5] *= 1e4
    for is_causal in (True, False):
        compare(tensors, places, is_causal=is_causal, masks=None, variant="ring", tolerance=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(LocalRotation):
    """A place that notes what it passes on: (tag, number of entries, dtype)."""

    passed: list[tuple[int, int, torch.dtype]] = field(default_factory=list)

    def pass_on(self, outgoing: Tensor, spare: Tensor, tag: int) -> Arrival:
        self.passed.append((tag, outgoing.numel(), outgoing.dtype))
        return LocalRotation.pass_on(self, outgoing, spare, tag)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_goes_round(layout: str) -> None:
    """Blocks ring - 1 times each way, their gradients as often and in 32 bits; also blocks that a rank may not see."""
    places = make_places(16, ring=4, ulysses=1, layout=layout)
    q, k, v, grad = (one[:, :, :4] for one in make_tensors((4, 2, 8, 6), places, torch.bfloat16))
    places_of = [Counted(index=one.index, ways=one.ways) for one in local_rotations(4)]
    settings = {"places": places, "is_causal": True, "scale": SCALE}
    made = finish(*(forward_steps(q, k, v, rotation=one, **settings) for one in places_of))
    block = (0, k.numel() + v.numel(), torch.bfloat16)
    assert all(one.passed == [block] * 3 for one in places_of)
    for one in places_of:
        one.passed.clear()
    finish(*(backward_steps(grad, q, k, v, *made[one.index], rotation=one, **settings) for one in places_of))
    for one in places_of:
        assert sorted(one.passed, key=str) == sorted([block] * 3 + [(1, block[1], torch.float32)] * 3, key=str)
