"""Rank arithmetic against numpy's reshape, up to 512 ranks and in every order of the axes."""

import itertools
import random

import numpy as np
import pytest

from weft.plan.partition.grid import Grid
from weft.plan.plan import AXES, Axes

SIXTY_FOUR = dict(data=4, replicate=2, pipeline=2, tensor=2, ulysses=1, ring=2)
SHAPES = [
    {},
    dict(data=2),
    dict(data=3, tensor=2),
    dict(data=2, pipeline=3, ring=5),
    SIXTY_FOUR,
    dict(data=4, replicate=2, pipeline=4, tensor=4, ulysses=2, ring=2),
]


def numbered(axes):
    """The oracle: rank numbers in an array with one dim per axis, outermost first."""
    return np.arange(axes.num_ranks).reshape([getattr(axes, axis) for axis in axes.order])


def oracle_groups(axes, names):
    """Each group is a row once the dims of `names` are moved to the end; rows and their entries come sorted."""
    ranks = numbered(axes)
    dims = sorted(axes.order.index(name) for name in names)
    rows = np.moveaxis(ranks, dims, range(ranks.ndim - len(dims), ranks.ndim))
    return tuple(map(tuple, rows.reshape(-1, np.prod([ranks.shape[dim] for dim in dims], dtype=int)).tolist()))


def grids():
    rng = random.Random(0)
    for shape in SHAPES:
        for order in (AXES, AXES[::-1], tuple(rng.sample(AXES, len(AXES)))):
            yield Axes(**shape, order=order)


@pytest.mark.parametrize("axes", list(grids()), ids=lambda axes: f"{axes.num_ranks}-{axes.order[0]}-{axes.order[-1]}")
def test_grid_agrees_with_numpy(axes):
    grid, ranks = Grid(axes), numbered(axes)
    assert grid.num_ranks == ranks.size
    for place, rank in np.ndenumerate(ranks):
        coordinates = dict(zip(axes.order, place, strict=True))
        assert grid.coordinates(int(rank)) == coordinates
        assert list(grid.coordinates(int(rank))) == list(axes.order)
    for axis in AXES:
        assert grid.groups(axis) == grid.groups((axis,)) == oracle_groups(axes, (axis,))
    for count in (2, 3, 6):
        for names in itertools.combinations(AXES, count):
            assert grid.groups(names) == oracle_groups(axes, names)


@pytest.mark.parametrize("names", ["tensor", "pipeline", ("replicate", "data"), AXES])
def test_ranks_along_is_the_group_that_holds_the_rank(names):
    grid = Grid(Axes(data=4, replicate=2, pipeline=4, tensor=4, ulysses=2, ring=2))
    assert grid.num_ranks == 512
    for group in grid.groups(names):
        for rank in group:
            assert grid.ranks_along(names, rank) == group


def test_ranks_along_differ_only_along_the_axis():
    grid = Grid(Axes(**SIXTY_FOUR))
    for rank in range(grid.num_ranks):
        for place, other in enumerate(grid.ranks_along("data", rank)):
            assert grid.coordinates(other) == {**grid.coordinates(rank), "data": place}


def test_groups_partition_the_ranks():
    grid = Grid(Axes(data=4, replicate=2, pipeline=4, tensor=4, ulysses=2, ring=2))
    for names in ("data", ("replicate", "data"), ("tensor", "pipeline")):
        groups = grid.groups(names)
        assert sorted(itertools.chain(*groups)) == list(range(512))
        assert all(list(group) == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)


def test_the_drawn_table():
    grid = Grid(Axes(pipeline=2, data=3))
    assert grid.groups("data") == ((0, 1, 2), (3, 4, 5))
    assert grid.groups("pipeline") == ((0, 3), (1, 4), (2, 5))
    assert grid.groups("tensor") == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert grid.groups(("data", "pipeline")) == ((0, 1, 2, 3, 4, 5),)
    assert grid.strides["pipeline"] == 3 and grid.strides["data"] == 1


def test_joint_axes_come_in_rank_order_however_they_are_named():
    grid = Grid(Axes(replicate=2, data=2, tensor=2))
    assert grid.groups(("replicate", "data")) == grid.groups(("data", "replicate")) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_places_outside_the_grid_are_refused():
    grid = Grid(Axes(data=2))
    with pytest.raises(ValueError, match="rank 2 is outside 0 to 1"):
        grid.coordinates(2)
    with pytest.raises(ValueError, match="rank -1 is outside 0 to 1"):
        grid.ranks_along("data", -1)
    for refuse in (lambda: grid.groups("date"), lambda: grid.ranks_along("date", 0)):
        with pytest.raises(ValueError, match='"date" is not an axis; did you mean "data"'):
            refuse()
