"""Layouts against numpy: the regions of all ranks are exactly the array, cut as numpy cuts it."""

from __future__ import annotations

import itertools
import math
import random

import numpy
import pytest

from weft.layout import Layout, Runs, Split, part_of


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 2, 6, 7, 20])
def test_parts_are_those_of_numpy(total: int, parts: int) -> None:
    spans = [part_of(total, index, parts) for index in range(parts)]
    expected = numpy.array_split(numpy.arange(total), parts)
    assert [list(range(*span)) for span in spans] == [list(part) for part in expected]
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_the_parts_in_the_docstring() -> None:
    assert part_of(10, 0, 4) == (0, 3)
    assert part_of(10, 3, 4) == (8, 10)
    assert part_of(1, 3, 4) == (1, 1)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_part_that_is_not_there(index: int) -> None:
    with pytest.raises(AssertionError, match=f"part {index} of 4"):
        part_of(10, index, 4)


def test_a_layout_without_splits_is_whole() -> None:
    layout = Layout(global_shape=(3, 4))
    assert layout.is_whole
    assert list(layout.windows({}, {})) == [((slice(0, 3), slice(0, 4)),) * 2]
    assert layout.local_shape({}, {}) == (3, 4)


def test_a_scalar_is_one_element() -> None:
    layout = Layout(global_shape=())
    assert list(layout.windows({}, {})) == [((), ())]
    assert layout.local_shape({}, {}) == ()


@pytest.mark.parametrize(
    "splits",
    [
        (Split(dim=0, axis="tensor"),),
        (Split(dim=1, axis="data"),),
        (Split(dim=0, axis="tensor"), Split(dim=1, axis="data")),
        (Split(dim=0, axis="tensor"), Split(dim=0, axis="data")),
        (Split(dim=0, axis="data"), Split(dim=0, axis="tensor")),
    ],
)
@pytest.mark.parametrize("shape", [(6, 4), (7, 5), (1, 3), (2, 0)])
def test_regions_of_all_ranks_are_the_whole(shape: tuple[int, int], splits: tuple[Split, ...]) -> None:
    sizes = {"tensor": 2, "data": 3}
    layout = Layout(global_shape=shape, splits=splits)
    assert not layout.is_whole
    seen = numpy.zeros(shape, dtype=int)
    used = {split.axis for split in splits}
    for tensor, data in itertools.product(range(2), range(3)):
        place = {"tensor": tensor, "data": data}
        if any(place[axis] for axis in sizes if axis not in used):
            continue  # a replica of the rank at 0
        local = numpy.zeros(layout.local_shape(sizes, place), dtype=int)
        for there, here in layout.windows(sizes, place):
            seen[there] += 1
            local[here] += 1
        assert (local == 1).all()
    assert (seen == 1).all()


def test_splits_of_one_dim_nest_in_their_order() -> None:
    """7 rows: data takes 3 + 2 + 2, then tensor halves each of these."""
    layout = Layout(global_shape=(7,), splits=(Split(dim=0, axis="data"), Split(dim=0, axis="tensor")))
    sizes = {"data": 3, "tensor": 2}
    found = [layout.ranges(sizes, {"data": data, "tensor": tensor})[0] for data in range(3) for tensor in range(2)]
    assert found == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),), ((5, 6),), ((6, 7),)]


def test_listed_parts_come_one_after_another_and_may_overlap() -> None:
    """Three sections of a fused projection: 4 query heads of 2 rows halved, a key and a value head on both ranks."""
    parts = (((0, 4), (8, 10), (10, 12)), ((4, 8), (8, 10), (10, 12)))
    layout = Layout(global_shape=(12, 3), splits=(Split(dim=0, axis="tensor", parts=parts),))
    whole = numpy.arange(36).reshape(12, 3)
    for place, rows in enumerate(([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 8, 9, 10, 11])):
        local = numpy.zeros(layout.local_shape({"tensor": 2}, {"tensor": place}), dtype=int)
        for there, here in layout.windows({"tensor": 2}, {"tensor": place}):
            local[here] = whole[there]
        assert (local == whole[rows]).all()


def test_a_flat_range_is_what_a_rank_keeps() -> None:
    layout = Layout(global_shape=(4, 4), splits=(Split(dim=0, axis="tensor"),), flat_range=(3, 8))
    assert not layout.is_whole and not Layout(global_shape=(4,), flat_range=(0, 4)).is_whole
    assert sum(one.numel * one.count for one in layout.runs({"tensor": 2}, {"tensor": 1})) == 5
    assert [there for there, _ in layout.windows({"tensor": 2}, {"tensor": 1})] == [(slice(2, 4), slice(0, 4))]


def test_rows_of_split_columns_are_equal_runs() -> None:
    """Of 4 x 6: the last three columns are 4 runs of 3; of rows 2 and 3 they are one run."""
    columns = Layout(global_shape=(2, 2, 6), splits=(Split(dim=2, axis="tensor"),))
    assert list(columns.runs({"tensor": 2}, {"tensor": 1})) == [
        Runs(there=3, here=0, numel=3, count=4, there_step=6, here_step=3)
    ]
    rows = Layout(global_shape=(4, 6), splits=(Split(dim=0, axis="tensor"),))
    assert list(rows.runs({"tensor": 2}, {"tensor": 1})) == [Runs(there=12, here=0, numel=12)]
    assert list(rows.runs({"tensor": 2}, {"tensor": 1}, (5, 9))) == [Runs(there=17, here=0, numel=4)]


def random_layout() -> Layout:
    shape = tuple(random.choice([0, 1, 2, 3, 5, 6]) for _ in range(random.randint(0, 4)))
    splits = []
    for axis, parts in (("tensor", 2), ("data", 3)):
        if shape and random.random() < 0.6:
            dim = random.randrange(len(shape))
            ends = [sorted(random.sample(range(shape[dim] + 1), 2)) if shape[dim] else [0, 0] for _ in range(parts)]
            listed = tuple(((0, end[0]), (end[0], end[1])) for end in ends)
            splits.append(Split(dim=dim, axis=axis, parts=listed if not splits and random.random() < 0.4 else ()))
    return Layout(global_shape=shape, splits=tuple(splits))


def test_runs_are_what_windows_are() -> None:
    """Any nesting of splits, any flat range, and any range of that."""
    for _ in range(1000):
        layout = random_layout()
        sizes, place = {"tensor": 2, "data": 3}, {"tensor": random.randrange(2), "data": random.randrange(3)}
        whole = numpy.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
        local = numpy.zeros(layout.local_shape(sizes, place), dtype=int)
        for there, here in layout.windows(sizes, place):
            local[here] = whole[there]
        low, high = sorted(random.choices(range(local.size + 1), k=2))
        kept = Layout(global_shape=layout.global_shape, splits=layout.splits, flat_range=(low, high))
        first, last = sorted(random.choices(range(high - low + 1), k=2))
        expected = local.reshape(-1)[low:high][first:last]
        found = numpy.full_like(expected, -1)
        for runs in kept.runs(sizes, place, (first, last)):
            for there, here in runs.places():
                assert (found[here : here + runs.numel] == -1).all() and runs.numel > 0
                found[here : here + runs.numel] = whole.reshape(-1)[there : there + runs.numel]
        assert (found == expected).all(), (kept, place, first, last)
