"""Where tokens and heads are, as plain numbers: nothing is lost, work is equal, and padding is the least there is."""

from __future__ import annotations

import itertools

import pytest

from weft.errors import ModelError
from weft.plan.partition.sequence import LAYOUTS, Band, Places, allowed_pairs, make_places, rectangles, share_heads
from weft.plan.partition.window import window_rectangles

SIZES = [
    (num_tokens, ring, ulysses, layout, multiple)
    for num_tokens, ring, ulysses, layout, multiple in itertools.product(
        (1, 2, 7, 24, 33), (1, 2, 3, 4), (1, 2, 3), LAYOUTS, (1, 2, 5)
    )
]


def numbers_of(places: Places, ring: int, ulysses: int) -> list[int]:
    return [number for start, stop in places.ranges(ring, ulysses) for number in range(start, stop)]


def on_ring(places: Places, ring: int) -> list[int]:
    return [number for start, stop in places.ring_ranges(ring) for number in range(start, stop)]


def everyone(places: Places) -> list[tuple[int, int]]:
    return list(itertools.product(range(places.ring), range(places.ulysses)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_in_one_place_and_comes_back_to_it(layout: str) -> None:
    for num_tokens, ring, ulysses, _, multiple in SIZES:
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout=layout, multiple=multiple)
        held = [numbers_of(places, *one) for one in everyone(places)]
        assert {len(one) for one in held} == {places.tokens_per_rank}
        joined = [number for one in held for number in one]
        inverse = sorted(range(places.padded), key=joined.__getitem__)
        assert [joined[place] for place in inverse] == list(range(places.padded))
        assert all(one == sorted(one) for one in held)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ulysses_ranks_have_parts_of_what_their_ring_rank_has(layout: str) -> None:
    for num_tokens, ring, ulysses, _, multiple in SIZES:
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout=layout, multiple=multiple)
        for rank in range(ring):
            together = [number for part in range(ulysses) for number in numbers_of(places, rank, part)]
            assert together == on_ring(places, rank) and len(together) == places.tokens_per_ring


def test_padding_is_the_least_that_makes_ranks_equal() -> None:
    for num_tokens, ring, ulysses, layout, multiple in SIZES:
        places = make_places(num_tokens, ring=ring, ulysses=ulysses, layout=layout, multiple=multiple)
        chunks = 2 * ring if layout == "zigzag" and ring > 1 else ring

        def fits(length: int) -> bool:
            return length % chunks == 0 and length % (ring * ulysses * multiple) == 0  # noqa: B023

        assert places.padded == next(length for length in itertools.count(num_tokens) if fits(length))


def test_layouts_are_the_ones_drawn() -> None:
    zigzag = make_places(16, ring=4, ulysses=1, layout="zigzag")
    assert [zigzag.ring_ranges(rank) for rank in range(4)] == [
        ((0, 2), (14, 16)),
        ((2, 4), (12, 14)),
        ((4, 6), (10, 12)),
        ((6, 10),),
    ]
    both = make_places(16, ring=2, ulysses=2, layout="zigzag")
    assert [both.ranges(*one) for one in everyone(both)] == [((0, 4),), ((12, 16),), ((4, 8),), ((8, 12),)]
    contiguous = make_places(15, ring=4, ulysses=1, layout="contiguous")
    assert [contiguous.ring_ranges(rank) for rank in range(4)] == [((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),)]
    assert make_places(5, ring=1, ulysses=1, layout="zigzag").padded == 5, "one rank has one chunk"


def seen_pairs(places: Places, is_causal: bool) -> set[tuple[int, int]]:
    """(query, key) of all rectangles, in global numbers; none of them twice."""
    found: list[tuple[int, int]] = []
    for queries, keys in itertools.product(range(places.ring), repeat=2):
        q_numbers, k_numbers = on_ring(places, queries), on_ring(places, keys)
        for one in rectangles(places, queries, keys, is_causal=is_causal):
            assert one.k[0] == 0 and one.k[1] > 0 and one.q[1] > one.q[0]
            block = [
                (q_numbers[q], k_numbers[k])
                for q, k in itertools.product(range(*one.q), range(*one.k))
                if not one.is_causal or k <= q
            ]
            assert len(block) == one.num_pairs
            found += block
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rectangles_are_exactly_what_queries_may_see(layout: str) -> None:
    for num_tokens, ring in itertools.product((1, 5, 24, 29), (1, 2, 3, 4)):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        everything = list(itertools.product(range(places.padded), repeat=2))
        assert seen_pairs(places, True) == {(q, k) for q, k in everything if k <= q}
        assert seen_pairs(places, False) == {(q, k) for q, k in everything if k < num_tokens}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_block_that_is_seen_is_seen_by_every_query(layout: str) -> None:
    """The merge of blocks relies on it, and on there being one rectangle at most."""
    for num_tokens, ring, is_causal in itertools.product((1, 5, 24), (1, 2, 3, 4), (True, False)):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        for rank in range(ring):
            blocks = [rectangles(places, rank, (rank - step) % ring, is_causal=is_causal) for step in range(ring)]
            assert max(map(len, blocks)) == 1
            assert next(block[0].q for block in blocks if block) == (0, places.tokens_per_ring)


def test_zigzag_work_is_equal_on_every_rank_at_every_step() -> None:
    for ring in (2, 3, 4, 8):
        places = make_places(64 * ring, ring=ring, ulysses=1, layout="zigzag")
        counts = [allowed_pairs(places, rank) for rank in range(ring)]
        assert len(set(counts)) == 1
        assert len(set(counts[0][1:])) == 1, "and after the first step at every step"
        assert sum(map(sum, counts)) == 64 * ring * (64 * ring + 1) // 2


def test_contiguous_work_is_not() -> None:
    places = make_places(256, ring=4, ulysses=1, layout="contiguous")
    counts = [sum(allowed_pairs(places, rank)) for rank in range(4)]
    mean = sum(counts) / 4
    assert mean / max(counts) == pytest.approx(4 / 7, rel=0.01), "P / (2P - 1)"
    assert sum(allowed_pairs(places, 1, is_causal=False)) == 64 * 256


def test_heads_are_shared_out_whole() -> None:
    for num_keys, repeats, ulysses in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 4)):
        num_queries = num_keys * repeats
        if num_queries < ulysses:
            continue
        found = share_heads(num_queries, num_keys, ulysses=ulysses)
        assert [head for share in found.queries for head in range(*share)] == list(range(num_queries))
        sizes = [stop - start for start, stop in (found.keys if num_keys >= ulysses else found.queries)]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
        for rank, (queries, keys) in enumerate(zip(found.queries, found.keys, strict=True)):
            assert {head // repeats for head in range(*queries)} == set(range(*keys)), "those they look at, no others"
            looked_at = found.local_keys(rank)
            if looked_at is None:
                each = (queries[1] - queries[0]) // (keys[1] - keys[0])
                looked_at = [place // each for place in range(queries[1] - queries[0])]
            assert [keys[0] + place for place in looked_at] == [head // repeats for head in range(*queries)]


def test_irregular_groups_of_heads_are_known() -> None:
    assert share_heads(6, 2, ulysses=4).local_keys(1) is None
    found = share_heads(15, 3, ulysses=4)  # 5 query heads a key head, shared out 4, 4, 4, 3
    assert [found.local_keys(rank) for rank in range(4)] == [None, [0, 1, 1, 1], None, None]


def test_too_few_heads_are_refused_with_what_is_possible() -> None:
    with pytest.raises(ModelError, match="6 heads on this rank, too few for .* ulysses = 8.* ulysses = 4, ring = 4"):
        share_heads(6, 2, ulysses=8, ring=2)
    with pytest.raises(ModelError, match="3 heads on this rank, too few for .* ulysses = 4.* ulysses = 2, ring = 2"):
        share_heads(3, 3, ulysses=4)
    with pytest.raises(ModelError, match="6 query heads and 4 key heads"):
        share_heads(6, 4, ulysses=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("longest", [1, 3, 512])
def test_blocks_of_a_window_are_what_queries_may_see(layout: str, longest: int) -> None:
    bands = [Band(before=before, after=after) for before, after in ((0, 0), (2, 0), (50, 0), (1, 1), (4, 2))]
    for num_tokens, ring, band in itertools.product((1, 5, 24, 29), (1, 2, 3, 4), bands):
        places = make_places(num_tokens, ring=ring, ulysses=1, layout=layout)
        found: list[tuple[int, int]] = []
        for queries, keys in itertools.product(range(ring), repeat=2):
            q_numbers, k_numbers = on_ring(places, queries), on_ring(places, keys)
            for one in window_rectangles(places, queries, keys, band, longest=longest):
                block = [
                    (q_numbers[q], k_numbers[k])
                    for q, k in itertools.product(range(*one.q), range(*one.k))
                    if one.band is None or -band.after <= one.distance + q - one.q[0] - (k - one.k[0]) <= band.before
                ]
                assert one.q[1] - one.q[0] <= longest and not one.is_causal
                assert len(block) == one.num_pairs
                assert {q for q, _ in block} == {q_numbers[q] for q in range(*one.q)}, "every query sees something"
                assert {k for _, k in block} == {k_numbers[k] for k in range(*one.k)}, "every key is seen"
                found += block
        assert len(found) == len(set(found))
        real = num_tokens if band.after else places.padded
        everything = itertools.product(range(places.padded), range(real))
        assert set(found) == {(q, k) for q, k in everything if -band.after <= q - k <= band.before}


def test_the_work_of_a_window_grows_with_the_length_not_with_its_square() -> None:
    band, counts = Band(before=63, after=0), []
    for num_tokens in (4096, 8192):
        places = make_places(num_tokens, ring=2, ulysses=1, layout="zigzag")
        blocks = [one for keys in range(2) for one in window_rectangles(places, 0, keys, band, longest=128)]
        counts.append(sum((one.q[1] - one.q[0]) * (one.k[1] - one.k[0]) for one in blocks))
    assert counts[1] < 2.05 * counts[0]
