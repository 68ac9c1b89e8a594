"""Ring attention of ranks whose blocks travel as messages: number formats, large scores, and what is sent."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ranks import ranks
from split_attention import assert_same, axes_of, make_case, split

from weft.parallel.attention import ring_exchange
from weft.parallel.attention.attention_call import FORWARDS
from weft.plan.partition.sequence import LAYOUTS, make_places


@pytest.mark.sampled(3)
@ranks(4)
@pytest.mark.parametrize("variant", FORWARDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_other_dtypes_are_right_within_rounding(dtype: torch.dtype, tolerance: float, variant: str) -> None:
    for ring, ulysses in ((4, 1), (2, 2), (1, 4)):
        axes = axes_of(ring, ulysses, variant, "messages")
        places = make_places(64, ring=ring, ulysses=ulysses, layout="zigzag")
        case = make_case(places, (8, 4, 8, 8), is_causal=True, dtype=dtype)
        assert_same(split(case, axes), case, axes, tolerance)


@ranks(4)
@pytest.mark.parametrize("is_causal", [True, False])
def test_large_scores_do_not_overflow(is_causal: bool) -> None:
    """Blocks whose log-sum-exps are thousands apart, either way."""
    axes = axes_of(4, 1, "ring", "messages")
    case = make_case(make_places(24, ring=4, ulysses=1, layout="zigzag"), (2, 2, 8, 8), is_causal=is_causal)
    case.tensors[1][:, :, ::5] *= 1e4
    assert_same(split(case, axes), case, axes, 1e-9)


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_sends(layout: str) -> None:
    """Blocks ring - 1 times each way, their gradients as often and in 32 bits; also blocks that a rank may not see."""
    axes = axes_of(4, 1, "ring", "messages")
    places = make_places(16, ring=4, ulysses=1, layout=layout)
    case = make_case(places, (4, 2, 8, 6), is_causal=True, dtype=torch.bfloat16)
    with mock.patch.object(ring_exchange, "exchange", wraps=ring_exchange.exchange) as exchange:
        split(case, axes)
    sent = [(one.kwargs["tag"], one.args[0][0][0].numel(), one.args[0][0][0].dtype) for one in exchange.call_args_list]
    numel = 2 * 2 * 4 * (8 + 6)
    block, total = (0, numel, torch.bfloat16), (1, numel, torch.float32)
    assert sent[:3] == [block] * 3
    assert sorted(sent[3:], key=str) == [block] * 3 + [total] * 3
