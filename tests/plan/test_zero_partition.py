"""Flat buffers and their parts: laws of the index arithmetic, over many random buffers and the awkward ones."""

from __future__ import annotations

import random

import pytest

from weft.plan.partition.zero import ALIGNED_NUMEL, Flat

AWKWARD = [
    Flat(numels=(), num_parts=3),
    Flat(numels=(0,), num_parts=2),
    Flat(numels=(1,), num_parts=1),
    Flat(numels=(1,), num_parts=64),  # more parts than elements
    Flat(numels=(1, 1, 1), num_parts=2),
    Flat(numels=(1000, 1, 1, 1), num_parts=7),
    Flat(numels=(16, 32, 48), num_parts=2),  # aligned, but 6 × 16 does not divide by 2 × 16 into whole members
    Flat(numels=(5, 0, 17), num_parts=4),
]


def random_flats() -> list[Flat]:
    rng = random.Random(0)
    made = []
    for _ in range(200):
        numels = tuple(rng.choice([1, 2, 15, 16, 17, rng.randrange(1, 500)]) for _ in range(rng.randrange(1, 12)))
        made.append(Flat(numels=numels, num_parts=rng.randrange(1, 9)))
    return made


FLATS = [*AWKWARD, *random_flats()]


def test_a_buffer_written_out() -> None:
    # members of 20 and 3 take 32 and 16 places, which three parts of 16 share
    flat = Flat(numels=(20, 3), num_parts=3)
    assert (flat.offsets, flat.numel, flat.part_numel) == ((0, 32), 48, 16)
    assert [flat.part(number) for number in range(3)] == [(0, 16), (16, 32), (32, 48)]
    assert [flat.kept(0, number) for number in range(3)] == [(0, 16), (16, 20), (20, 20)]
    assert [flat.kept(1, number) for number in range(3)] == [(0, 0), (0, 0), (0, 3)]


def test_members_follow_each_other_on_aligned_places() -> None:
    for flat in FLATS:
        ends = [offset + numel for offset, numel in zip(flat.offsets, flat.numels, strict=True)]
        assert all(offset % ALIGNED_NUMEL == 0 for offset in flat.offsets), flat
        assert all(end <= offset < end + ALIGNED_NUMEL for end, offset in zip(ends, flat.offsets[1:], strict=False))
        assert all(end <= flat.numel for end in ends), flat


def test_parts_are_equal_and_aligned_and_tile_the_buffer() -> None:
    for flat in FLATS:
        parts = [flat.part(number) for number in range(flat.num_parts)]
        assert [stop - start for start, stop in parts] == [flat.part_numel] * flat.num_parts
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][:-1], flat
        assert parts[-1][1] == flat.numel
        assert flat.part_numel % ALIGNED_NUMEL == 0


def test_every_element_of_every_member_is_kept_once() -> None:
    for flat in FLATS:
        for member, numel in enumerate(flat.numels):
            kept = [flat.kept(member, number) for number in range(flat.num_parts)]
            assert [element for first, stop in kept for element in range(first, stop)] == list(range(numel)), flat


def test_what_a_part_keeps_of_a_member_lies_in_the_part() -> None:
    for flat in FLATS:
        for number in range(flat.num_parts):
            start, stop = flat.part(number)
            for member, offset in enumerate(flat.offsets):
                first, last = flat.kept(member, number)
                assert first <= last
                assert first == last or start <= offset + first < offset + last <= stop, flat


def test_padding_is_bounded() -> None:
    for flat in FLATS:
        slack = (len(flat.numels) + flat.num_parts) * ALIGNED_NUMEL
        assert sum(flat.numels) <= flat.numel < sum(flat.numels) + slack


def test_one_part_is_the_whole_buffer() -> None:
    flat = Flat(numels=(7, 100), num_parts=1)
    assert flat.part(0) == (0, flat.numel) and flat.part_numel == flat.numel == 16 + 112
    assert [flat.kept(member, 0) for member in range(2)] == [(0, 7), (0, 100)]


def test_a_member_smaller_than_the_number_of_parts_is_kept_by_one() -> None:
    flat = Flat(numels=(3,), num_parts=8)
    assert (flat.numel, flat.part_numel) == (8 * ALIGNED_NUMEL, ALIGNED_NUMEL)
    assert [stop - first for first, stop in (flat.kept(0, number) for number in range(8))] == [3, *[0] * 7]


def test_an_empty_buffer_has_empty_parts() -> None:
    flat = Flat(numels=(), num_parts=3)
    assert (flat.offsets, flat.numel, flat.part(2)) == ((), 0, (0, 0))


def test_a_part_that_is_not_there() -> None:
    flat = Flat(numels=(5,), num_parts=2)
    for number in (-1, 2):
        with pytest.raises(AssertionError, match=f"part {number} of 2"):
            flat.part(number)
