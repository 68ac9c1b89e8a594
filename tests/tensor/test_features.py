"""Digits: the effect of views, slices and unification on the features of a dim."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from weft.parallel.tensor.discovery.features import (
    Digit,
    Dim,
    block,
    cut,
    digits,
    fresh,
    is_whole,
    join,
    leaves,
    length,
    reshape,
    split_outer,
    unify,
    whole,
)


def sizes(dim: Dim) -> list[int]:
    return [digit.size for digit in digits(dim)]


def free(dim: Dim) -> list[int]:
    """Sizes of the digits that can be split."""
    return [leaf.size for leaf in leaves(dim) if leaf.reason is None]


def test_a_view_makes_digits_and_another_puts_them_back() -> None:
    features = fresh(768)
    made = reshape((whole(6, "tokens"), features), (2, 3, 12, 64))
    assert [sizes(dim) for dim in made] == [[2], [3], [12], [64]]
    assert sizes(features) == [12, 64]
    (back,) = reshape(made[2:], (768,))
    assert digits(back) == digits(features)
    assert [sizes(dim) for dim in reshape((features,), (4, 3, 64))] == [[4], [3], [64]]
    assert sizes(features) == [4, 3, 64]


def test_a_view_that_straddles_units_blocks_what_it_mixes() -> None:
    features = fresh(12)
    reshape((features,), (4, 3))
    outer, inner = reshape((features,), (6, 2))
    assert sizes(outer)[0] == 2 or is_whole(outer)
    assert free(features) in ([], [4], [2])
    prime = fresh(7)
    made = reshape((whole(2, "samples"), prime), (7, 2))
    assert is_whole(prime) and all(is_whole(dim) for dim in made)


def test_a_split_makes_parts_and_parts_have_their_own_digits() -> None:
    features = fresh(20)
    heads, width = reshape((features,), (5, 4))
    q, k, v = cut(heads, (3, 4))
    assert [length(part) for part in (q, k, v)] == [3, 1, 1]
    assert free(q) == [3] and k == v == ()
    assert free(features) == [3, 4]
    block(width, "it is added up")
    assert free(features) == [3]


def test_a_view_of_parts_takes_the_inside_of_all_of_them() -> None:
    features = fresh(24)
    q, rest = cut(features, (16,))
    (heads, width) = reshape((features,), (6, 4))
    assert [sizes(part) for part in (q, rest)] == [[4, 4], [2, 4]]
    assert digits(q)[1] is digits(rest)[1] is digits(width)[0]
    assert digits(heads)[0].parts == (digits(q)[0], digits(rest)[0])


def test_what_meets_is_the_same_and_blocked_where_one_is() -> None:
    queries, keys = fresh(48), fresh(16)
    reshape((queries,), (12, 4))
    reshape((keys,), (4, 4))
    again = fresh(3)
    unify(digits(queries)[:1], (*digits(keys)[:1], *again))
    assert sizes(queries) == [4, 3, 4]
    assert digits(queries)[0] is digits(keys)[0]
    block(again, "why not")
    assert [digit.reason for digit in digits(queries)] == [None, "why not", None]
    unify(keys, whole(16, "it is whole"))
    assert free(queries) == [4] and digits(queries)[2].reason is None


def test_parts_meet_parts_that_are_cut_elsewhere() -> None:
    a, b = fresh(12), fresh(12)
    cut(a, (4,))
    cut(b, (6,))
    unify(a, b)
    assert [leaf.size for leaf in leaves(a)] == [4, 2, 6]
    assert list(leaves(a)) == list(leaves(b))


def test_parts_meet_factors() -> None:
    a, b = fresh(12), fresh(12)
    cut(a, (6,))
    reshape((b,), (4, 3))
    unify(a, b)
    assert sizes(b) == [4, 3]
    assert digits(a)[1] is digits(b)[1]
    assert [leaf.size for leaf in leaves(b)] == [2, 2, 3]


def test_orders_that_do_not_agree_block_each_other() -> None:
    a, b = fresh(15), fresh(15)
    reshape((a,), (3, 5))
    reshape((b,), (5, 3))
    unify(a, b)
    assert is_whole(a) and is_whole(b)


def test_what_was_put_together_comes_apart_again() -> None:
    one, two = fresh(4), fresh(6)
    joined = join((one, two))
    assert length(joined) == 10
    assert cut(joined, (4,)) == [one, two]
    assert is_whole(join((whole(3, "a"), whole(4, "b"))))
    inner = fresh(5)
    (outer, last) = reshape((join(((*one, *inner), (*two, *inner))),), (10, 5))
    assert digits(last) == digits(inner) and [leaf.size for leaf in leaves(outer)] == [4, 6]


def test_a_cut_inside_a_unit_blocks_it() -> None:
    features = fresh(12)
    reshape((features,), (3, 4))
    assert all(is_whole(piece) for piece in cut(features, (6,)))
    assert is_whole(features)


def test_splitting_takes_whole_digits_or_parts_of_them() -> None:
    dim = (Digit(6), Digit(5))
    halves = split_outer(dim, 3)
    assert halves is not None and [sizes(half) for half in halves] == [[3], [2, 5]]
    assert split_outer(dim, 7) is None
    assert split_outer((), 2) is None


def decode(dim: Dim, place: int) -> dict[Digit, int]:
    """The value of each digit at a position along a dim."""
    found: dict[Digit, int] = {}
    for digit in reversed(digits(dim)):
        place, value = divmod(place, digit.size)
        if digit.parts:
            for part in digit.parts:
                if value < part.size:
                    found |= decode((part,), value)
                    break
                value -= part.size
        else:
            found[digit] = value
    return found


@pytest.mark.parametrize("seed", range(20))
def test_digits_say_where_entries_really_are(seed: int) -> None:
    """Against torch: an entry that holds its original position has the digits of its new position."""
    draw = random.Random(seed)
    features = fresh(48)
    entries, layout = torch.arange(48), (features,)
    for _ in range(8):
        kind = draw.choice(("view", "permute", "cut", "join"))
        if kind == "view":
            count = entries.numel()
            first = draw.choice([size for size in range(1, count + 1) if count % size == 0])
            second = draw.choice([size for size in range(1, count // first + 1) if count // first % size == 0])
            shape = (first, second, count // first // second)
            entries, layout = entries.reshape(shape), reshape(layout, shape)
        elif kind == "permute":
            order = draw.sample(range(entries.dim()), entries.dim())
            entries, layout = entries.permute(order), tuple(layout[dim] for dim in order)
        else:
            dim = draw.randrange(entries.dim())
            bound = draw.randrange(entries.shape[dim] + 1)
            if not 0 < bound < entries.shape[dim]:
                continue
            parts = entries.split((bound, entries.shape[dim] - bound), dim)
            pieces = cut(layout[dim], (bound,))
            chosen = draw.randrange(2)
            if kind == "join":
                entries = torch.cat((parts[chosen], parts[1 - chosen]), dim)
                pieces[chosen] = join((pieces[chosen], pieces[1 - chosen]))
            else:
                entries = parts[chosen]
            layout = (*layout[:dim], pieces[chosen], *layout[dim + 1 :])
    for index in itertools.product(*map(range, entries.shape)):
        known = decode(features, int(entries[index]))
        for dim, place in zip(layout, index, strict=True):
            for digit, value in decode(dim, place).items():
                assert digit.reason is not None or known[digit] == value
