"""Windows and soft caps of attention over a split sequence, against dense attention: outputs and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from ranks import ranks
from split_attention import SCALE, Case, assert_same, axes_of, make_case, split
from torch import Tensor

from weft.errors import ModelError
from weft.parallel.attention import ring, ring_exchange
from weft.parallel.attention.attention import UnderWay, attend_traced
from weft.parallel.attention.attention_call import FORWARDS
from weft.plan.partition.sequence import Band, make_places
from weft.plan.partition.window import window_rectangles

BANDS = [Band(before=0, after=0), Band(before=2, after=0), Band(before=9, after=0), Band(before=2, after=2)]


def all_cases(ring_size: int, ulysses: int) -> Iterator[Case]:
    layouts = ("zigzag", "contiguous") if ring_size > 1 else ("zigzag",)
    for layout, num_tokens, band in itertools.product(layouts, (24, 5), BANDS):
        places = make_places(num_tokens, ring=ring_size, ulysses=ulysses, layout=layout)
        for mask in ("none", "both"):
            yield make_case(places, (6, 2, 8, 8), is_causal=band.after == 0, mask=mask, band=band)
    places = make_places(17, ring=ring_size, ulysses=ulysses, layout="zigzag")
    for band, mask in itertools.product((None, BANDS[1]), ("none", "both")):
        yield make_case(places, (6, 2, 8, 7), is_causal=True, mask=mask, band=band, softcap=1.5)


def check_equal(ring_size: int, ulysses: int, variant: str, longest_strip: int, every: int = 1) -> None:
    axes = axes_of(ring_size, ulysses, variant)
    with mock.patch.object(ring_exchange, "window_rectangles", partial(window_rectangles, longest=longest_strip)):
        for case in itertools.islice(all_cases(ring_size, ulysses), 0, None, every):
            if case.softcap is None or variant == "ring":
                assert_same(split(case, axes), case, axes)


@pytest.mark.parametrize("variant", FORWARDS)
@pytest.mark.parametrize("longest_strip", [3, 512])
def test_one_rank(variant: str, longest_strip: int) -> None:
    check_equal(1, 1, variant, longest_strip)


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize(
    ("ring_size", "ulysses", "variant"), [(2, 1, "ring"), (1, 2, "ring"), (2, 1, "ring-self-attention")]
)
def test_two_ranks(ring_size: int, ulysses: int, variant: str) -> None:
    check_equal(ring_size, ulysses, variant, longest_strip=3)


@ranks(4)
@pytest.mark.parametrize(("ring_size", "ulysses"), [(4, 1), (2, 2)])
def test_four_ranks(ring_size: int, ulysses: int) -> None:
    check_equal(ring_size, ulysses, "ring", longest_strip=512, every=3)


def check_operator(compiled: bool) -> None:
    under_way = UnderWay(axes_of(2, 1))

    def function(q: Tensor, k: Tensor, v: Tensor, band: Band | None, softcap: float | None) -> Tensor:
        return attend_traced(q * 1.0, k, v, under_way, is_causal=True, scale=SCALE, band=band, softcap=softcap)

    torch.compiler.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    places = make_places(17, ring=2, ulysses=1, layout="zigzag")
    for band, softcap in itertools.product((None, BANDS[1], BANDS[2]), (None, 1.5)):
        case = make_case(places, (6, 2, 8, 8), is_causal=True, mask="both", band=band, softcap=softcap)

        def forward(*tensors: Tensor, case: Case = case) -> Tensor:
            under_way.now = case.now()
            out: Tensor = run(*tensors, case.band, case.softcap)
            under_way.now = None
            return out

        assert_same(split(case, under_way.axes, forward), case, under_way.axes)


@ranks(2)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_operator_is_the_same(compiled: bool) -> None:
    check_operator(compiled)


@ranks(4)
@pytest.mark.parametrize(("layout", "num_blocks"), [("contiguous", (1, 2, 2, 2)), ("zigzag", (2, 3, 3, 2))])
def test_blocks_outside_of_the_window_are_left_out(layout: str, num_blocks: tuple[int, ...]) -> None:
    """Of 4 blocks, a rank computes with its own and with those just before its chunks, in both passes."""
    axes = axes_of(4, 1)
    places = make_places(32, ring=4, ulysses=1, layout=layout)
    band = Band(before=2, after=0)
    case = make_case(places, (4, 2, 8, 8), is_causal=True, band=band)
    with (
        mock.patch.object(ring, "attend_block", wraps=ring.attend_block) as forward,
        mock.patch.object(ring, "attend_block_backward", wraps=ring.attend_block_backward) as backward,
    ):
        split(case, axes)
    work = [window_rectangles(places, axes.ring.index, owner, band) for owner in range(4)]
    assert sum(len(of_owner) > 0 for of_owner in work) == num_blocks[axes.ring.index]
    assert forward.call_count == backward.call_count == sum(map(len, work))
    for call in forward.call_args_list:
        q, k, _ = call.args
        assert k.shape[2] <= q.shape[2] + band.before, "no key that no query sees"


def test_soft_caps_need_scores() -> None:
    case = make_case(make_places(8, ring=1, ulysses=1, layout="zigzag"), (2, 2, 8, 8), is_causal=True, softcap=5.0)
    with pytest.raises(ModelError, match="attention caps its scores at 5, and .sequence. variant"):
        split(case, axes_of(1, 1, "ring-self-attention"))
