"""Balanced stages: drawn examples, and every answer held against all others that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from weft.errors import PlanError
from weft.plan.pipeline.stage_cuts import FREE, BlockCost, balance, check_cuts, stage_problem

TIE = Fraction(102, 100)


def blocks(*times: float) -> list[BlockCost]:
    return [BlockCost(time_s=time) for time in times]


@pytest.mark.parametrize(
    ("times", "num_stages", "cuts"),
    [
        ((1, 1, 1, 1), 1, ()),
        ((1, 1, 1, 1), 2, (2,)),
        ((1, 1, 1, 1), 4, (1, 2, 3)),
        ((4, 1, 1, 1, 1), 2, (1,)),
        ((1, 1, 1, 1, 4), 2, (4,)),
        ((1, 2, 3, 4, 5, 6), 3, (3, 5)),  # 6, 9, 6; two more blocks in front would make 10
        ((9, 1, 1, 1, 1), 3, (1, 3)),  # nothing shortens the 9; the rest is even all the same
        ((0.1,) * 10, 5, (2, 4, 6, 8)),  # ten times 0.1 is not 1.0 in binary
        ((0, 0, 0, 0, 0, 0), 3, (2, 4)),  # nothing known: as many blocks each
    ],
)
def test_stages_written_out(times: Sequence[float], num_stages: int, cuts: tuple[int, ...]) -> None:
    assert balance(blocks(*times), num_stages) == cuts


def test_what_is_around_the_blocks_counts_to_the_ends() -> None:
    even = blocks(1, 1, 1, 1, 1, 1)
    assert balance(even, 3, last=BlockCost(time_s=2)) == (2, 5)  # 2, 3, 1 + 2
    assert balance(even, 3, first=BlockCost(time_s=2)) == (1, 3)  # 2 + 1, 2, 3
    assert balance(even, 3, first=BlockCost(time_s=1.5), last=BlockCost(time_s=1.5)) == (1, 4)  # 2.5, 3, 3.5


def test_memory_decides_between_equal_times() -> None:
    # three blocks on two stages: either way the longest takes 2, and the first stage has two microbatches in flight
    cost = BlockCost(time_s=1, activation_bytes=10)
    assert balance([cost] * 3, 2) == (1,)
    assert balance([cost] * 3, 2, in_flight=(1, 2)) == (2,)
    # the first block's weights outweigh that
    assert balance([BlockCost(time_s=1, state_bytes=100), cost, cost], 2) == (1,)
    assert balance([cost, cost, BlockCost(time_s=1, state_bytes=100)], 2) == (2,)


def test_times_within_two_per_cent_are_equal() -> None:
    # The middle block is quick and large. With the first it makes 1.01 or 1.03, with the last 1.02 or 1.06.
    for middle_s, cuts in ((0.01, (1,)), (0.03, (2,))):
        first, last = BlockCost(time_s=1.0, state_bytes=100), BlockCost(time_s=1.0 + middle_s)
        assert balance([first, BlockCost(time_s=middle_s, state_bytes=50), last], 2) == cuts


def all_cuts(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(1, num_blocks), num_stages - 1)


def balance_by_trying(
    costs: Sequence[BlockCost], num_stages: int, first: BlockCost, last: BlockCost, in_flight: Sequence[int]
) -> tuple[int, ...]:
    """The same three wishes, put to every answer there is."""

    def stages(cuts: tuple[int, ...]) -> list[list[BlockCost]]:
        ends = (0, *cuts, len(costs))
        made = [list(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
        made[0].insert(0, first)
        made[-1].append(last)
        return made

    def times(cuts: tuple[int, ...]) -> list[Fraction]:
        return [sum((Fraction(cost.time_s) for cost in stage), Fraction()) for stage in stages(cuts)]

    def memory(cuts: tuple[int, ...]) -> int:
        return max(
            sum(cost.state_bytes + cost.activation_bytes * flying for cost in stage)
            for stage, flying in zip(stages(cuts), in_flight, strict=True)
        )

    def unevenness(cuts: tuple[int, ...]) -> object:
        counts = [stop - start for start, stop in itertools.pairwise((0, *cuts, len(costs)))]
        return sorted(zip(times(cuts), counts, strict=True), reverse=True), cuts

    left = list(all_cuts(len(costs), num_stages))
    quickest = min(max(times(cuts)) for cuts in left)
    left = [cuts for cuts in left if max(times(cuts)) <= quickest * TIE]
    smallest = min(memory(cuts) for cuts in left)
    return min((cuts for cuts in left if memory(cuts) <= smallest * TIE), key=unevenness)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_better(seed: int) -> None:
    rng = random.Random(seed)

    def some_cost() -> BlockCost:
        time_s = rng.choice([0.0, 1.0, 1.0, 1.01, rng.random()])
        return BlockCost(time_s=time_s, state_bytes=rng.choice([0, 1000, 1010]), activation_bytes=rng.randrange(0, 500))

    for num_blocks in range(1, 10):
        for num_stages in range(1, min(num_blocks, 4) + 1):
            for first, last in ((FREE, FREE), (some_cost(), some_cost())):
                costs = [some_cost() for _ in range(num_blocks)]
                given = tuple(rng.randrange(1, 6) for _ in range(num_stages))
                for in_flight in (None, given):
                    flying = in_flight or range(num_stages, 0, -1)
                    expected = balance_by_trying(costs, num_stages, first, last, flying)
                    found = balance(costs, num_stages, first=first, last=last, in_flight=in_flight)
                    assert found == expected


@pytest.mark.parametrize(
    ("num_blocks", "pipeline", "chunks", "advice"),
    [
        (6, 4, 2, 'chunks = 1 with [pipeline] schedule = "1f1b", or pipeline = 3'),
        (9, 4, 3, "chunks = 2, or pipeline = 3"),
        (3, 4, 1, "pipeline = 3"),
        (3, 4, 2, 'pipeline = 3 and chunks = 1 with [pipeline] schedule = "1f1b"'),
        (2, 2, 2, 'chunks = 1 with [pipeline] schedule = "1f1b"'),
        (1, 4, 1, "pipeline = 1"),
        (1, 2, 2, "pipeline = 1"),
    ],
)
def test_the_nearest_stages_that_work(num_blocks: int, pipeline: int, chunks: int, advice: str) -> None:
    problem = stage_problem(num_blocks, pipeline=pipeline, chunks=chunks)
    assert problem is not None and problem.endswith(f"; use {advice}")
    assert f"{pipeline * chunks} blocks, the model has {num_blocks}; " in problem


def test_enough_blocks_are_no_problem() -> None:
    assert stage_problem(8, pipeline=4, chunks=2) is None


def test_cuts_that_fit_pass() -> None:
    check_cuts((), 1)
    check_cuts((1, 2, 3), 4)


def test_cuts_beyond_the_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cuts before 4, 9, the blocks are 0 to 3; use numbers from 1 to 3"):
        check_cuts((2, 4, 9), 4)
    with pytest.raises(PlanError, match=r"cuts before 1, the blocks are 0 to 0; one block cannot be cut"):
        check_cuts((1,), 1)
