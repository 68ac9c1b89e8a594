"""The rules of codecs as `verify` computes them, against numbers worked out by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from weft.plan.plan import CODECS, Codec
from weft.verification.compression.random_words import random_key, random_words
from weft.verification.compression.rules import RULES, Dgc, Feedback, Part, Rule, make_rule


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rule(name: str, *, replicas: int = 1, columns: int = 1, momentum: float = 0.0, **settings: object) -> Rule:
    nesterov = bool(settings.pop("nesterov", False))
    part = Part(name="weight", num_columns=columns, momentum=momentum, is_nesterov=nesterov)
    return make_rule(Codec(name=name, **settings), part, replicas)  # type: ignore[arg-type]


near = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def kept_of(one: Rule, replica: int = 0) -> Tensor:
    assert isinstance(one, Feedback | Dgc) and one.kept
    return one.kept[replica]


def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    one = rule("topk", density=0.5, replicas=2)
    near(one.exchange(0, [vector(1, -3, 3, 0), vector(0, 0, 5, 4)]), vector(0, -3, 8, 4))
    near(kept_of(one, 0), vector(1, 0, 0, 0))
    # 1 + 1, 1, 1, 2: the two largest; the second replica has ties, of which the first two go.
    near(one.exchange(1, [vector(1, 1, 1, 2), vector(1, 1, 1, 1)]), vector(3, 1, 0, 2))
    near(kept_of(one, 0), vector(0, 1, 1, 0))
    near(kept_of(one, 1), vector(0, 0, 1, 1))


def test_memory_is_a_share_of_what_was_kept() -> None:
    one = rule("topk", density=0.5, memory=0.5)
    one.exchange(0, [vector(4, 2)])
    near(one.exchange(1, [vector(0.5, 0)]), vector(0, 1))
    near(kept_of(one), vector(0.5, 0))


def test_the_share_that_is_sent_falls_in_the_warm_up() -> None:
    """To 1 of 64 in two stages of a quarter each."""
    one = rule("topk", density=1 / 64, warmup_steps=2, memory=0.0)
    ones = torch.ones(64, dtype=torch.float64)
    assert [int(one.exchange(step, [ones]).sum()) for step in range(4)] == [16, 4, 1, 1]


def in_few_bits(bits: int, *values: float) -> tuple[Tensor, Tensor]:
    """What one of two replicas sends of these values, the largest of a tensor that is zero elsewhere, and keeps."""
    one, rest = rule("topk", density=len(values) / 4096, bits=bits, replicas=2), torch.zeros(4096 - len(values))
    nothing = torch.zeros(4096, dtype=torch.float64)
    sent = one.exchange(0, [nothing, torch.cat([vector(*values), rest.double()])])
    near(sent[len(values) :], nothing[len(values) :])
    return sent[: len(values)], kept_of(one, 1)[: len(values)]


def test_values_of_8_bits_are_multiples_of_a_127th_of_the_largest() -> None:
    sent, kept = in_few_bits(8, 127, -3.5, 2.5)
    near(sent, vector(127, -4, 2))
    near(kept, vector(0, 0.5, 0.5))


def test_values_of_2_bits_are_one_of_two_means() -> None:
    near(in_few_bits(2, 1, -3, 8)[0], vector(2, -2, 8))
    near(in_few_bits(2, -2, 2)[0], vector(-2, 2))
    near(in_few_bits(2, 1, 0, -3)[0], vector(1, 0, -3))


def test_entries_that_would_be_more_bytes_than_a_sum_are_sent_as_they_are() -> None:
    values = torch.arange(1, 65, dtype=torch.float64)
    near(rule("topk", density=1.0, bits=8, replicas=8).exchange(0, [values] * 8), 8 * values)


def test_dgc_corrects_momentum_and_masks_it() -> None:
    one = rule("dgc", density=0.5, momentum=0.5)
    assert isinstance(one, Dgc)
    near(one.exchange(0, [vector(1, 4)]), vector(0, 4))  # u = 1, 4; v = 1, 4
    near(one.momenta[0], vector(1, 0))
    near(one.exchange(1, [vector(1, 1)]), vector(2.5, 0))  # u = 1.5, 1; v = 2.5, 1
    near(one.momenta[0], vector(0, 1))
    near(kept_of(one), vector(0, 1))
    whole = rule("dgc", density=0.5, momentum=0.5, masking=False)
    whole.exchange(0, [vector(1, 4)])
    near(whole.exchange(1, [vector(1, 1)]), vector(0, 3))  # u = 1.5, 3; v = 2.5, 3


def test_dgc_with_everything_sent_and_no_masking_is_momentum() -> None:
    for nesterov in (False, True):
        one = rule("dgc", density=1.0, momentum=0.9, masking=False, nesterov=nesterov)
        weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
        moved = torch.zeros(3, dtype=torch.float64)
        for step in range(4):
            weight.grad = vector(1, -2, step)
            optimizer.step()
            moved -= one.exchange(step, [vector(1, -2, step)])
            near(moved, weight.detach())


def test_dgc_takes_its_threshold_from_a_sample() -> None:
    """8192 elements, of which every second is looked at, from a start that the name, step and replica give."""
    values = torch.ones(8192, dtype=torch.float64)
    start = random_key("weight", 0, 0) % 2
    values[start::2] = 0.5  # all that is sampled is below all others
    values[start] = 9.0
    one = rule("dgc", density=0.001)  # k = 8: the 5th largest of the sample is 0.5, and all reach it
    sent = one.exchange(0, [values])
    assert sent.count_nonzero() == 8 and sent[start] == 9.0
    assert sent[1 - start :: 2][:7].tolist() == [1.0] * 7
    rare = torch.zeros(8192, dtype=torch.float64)
    rare[start : start + 12 : 2] = vector(9, 8, 7, 6, 5, 4)
    assert rule("dgc", density=0.001).exchange(0, [rare]).sum() == 9 + 8 + 7 + 6 + 5, "fewer than k reach it"


def test_onebit_sends_two_means_per_column() -> None:
    one = rule("onebit", columns=2)
    near(one.exchange(0, [vector(1, -1, 3, -5, -2, 0, 7)]), vector(2, -3, 2, -3, -2, 0, 7))
    near(kept_of(one), vector(-1, 2, 1, -2, 0, 0, 0))


def test_sign_is_a_vote_and_ties_are_positive() -> None:
    given = [vector(1, -1, -1, 0), vector(1, -2, 1, -1)]
    near(rule("sign", replicas=2).exchange(0, given), vector(1, -1, 1, 1))
    near(rule("sign", replicas=3).exchange(0, [*given, vector(-5, 5, -5, -5)]), vector(1, -1, -1, -1))


def test_unbiased_codecs_send_one_of_two_neighbours() -> None:
    values = torch.linspace(-3, 3, 700, dtype=torch.float64)
    chance = torch.from_numpy((random_words("weight", 4, 1, 700) // 256).astype("float64")) / 2**24
    assert 0 <= chance.min() and chance.max() < 1 and abs(chance.mean() - 0.5) < 0.05
    nothing = torch.zeros_like(values)
    ternary = rule("terngrad", replicas=2).exchange(4, [nothing, values])
    near(ternary, torch.where(chance < values.abs() / 3, 3 * values.sign(), 0.0))
    quantised = rule("qsgd", levels=16, replicas=2).exchange(4, [nothing, values])
    for one, r, x in zip(quantised.split(512), chance.split(512), values.split(512), strict=True):
        exact = 7 * x.abs() / x.norm()
        is_up = r >= 1 - exact.frac()
        near(one, x.sign() * (exact.floor() + is_up) * x.norm() / 7)


def test_powersgd_is_one_worker_fed_the_sum_and_starts_where_it_ended() -> None:
    torch.manual_seed(0)
    codec = {"columns": 5, "rank": 2}
    several, alone = rule("powersgd", replicas=3, **codec), rule("powersgd", **codec)  # type: ignore[arg-type]
    fixed = [torch.randn(31, dtype=torch.float64) for _ in range(3)]
    for step in range(12):
        total = several.exchange(step, fixed)
        near(total, alone.exchange(step, [sum(fixed)]))  # type: ignore[list-item]
        near(sum(kept_of(several, replica) for replica in range(3)), kept_of(alone))
        near(total[30:], sum(fixed)[30:])  # type: ignore[index]
    low = rule("powersgd", memory=0.0, **codec)  # type: ignore[arg-type]
    matrix = torch.randn(6, 5, dtype=torch.float64)
    for step in range(200):
        found = low.exchange(step, [matrix.flatten()])
    left, sizes, right = torch.linalg.svd(matrix)
    near(found.view(6, 5), left[:, :2] * sizes[:2] @ right[:2], rtol=1e-6, atol=1e-6)
    full = rule("powersgd", columns=5, rank=9)
    near(full.exchange(0, [fixed[0]]), fixed[0])


@pytest.mark.parametrize("name", ["topk", "dgc", "onebit", "powersgd"])
def test_what_is_given_is_sent_or_kept(name: str) -> None:
    torch.manual_seed(0)
    one = rule(name, replicas=2, columns=7, density=0.1, rank=1)
    given, sent = (torch.zeros(50, dtype=torch.float64) for _ in range(2))
    for step in range(5):
        values = [torch.randn(50, dtype=torch.float64) for _ in range(2)]
        given += sum(values)
        sent += one.exchange(step, values)
    near(sent + kept_of(one, 0) + kept_of(one, 1), given)


def test_every_codec_but_the_16_bit_one_has_a_rule() -> None:
    assert RULES.keys() == set(CODECS) - {"half"}
    for name in RULES.keys() - {"topk", "dgc"}:
        one = rule(name, replicas=2, warmup_steps=1)
        near(one.exchange(0, [vector(1, 2), vector(-3, 5)]), vector(-2, 7))
