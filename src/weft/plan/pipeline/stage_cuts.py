"""Cuts a model's blocks into stages so that the slowest stage is as fast as possible.

    block     0  1  2  3  4  5        cuts (2, 4): cut before blocks 2 and 4
    stage     0     1     2           layers before the blocks belong to stage 0, layers after them to stage 2

Three objectives in this order, each within 2 % of the best that the earlier ones allow, because measured times are
never quite equal: the least time of the slowest stage, the least memory of the largest stage, the evenest stages. Each
is a dynamic program over (stages so far, blocks so far), hence optimal and deterministic. Sums are integers: with
rounding, equal blocks would not make equal stages.

With several chunks per rank, single stages are balanced, not the sums of a rank's stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from weft.errors import PlanError

_TIE_PERCENT = 2

_Answer = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]
"""(time, number of blocks) of every stage, largest first; the block at which every stage stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The cost of one block on one device."""

    time_s: float = 0.0
    """Time of forward and backward of one microbatch."""
    state_bytes: int = 0
    """Memory that does not depend on the number of microbatches in flight."""
    activation_bytes: int = 0
    """Memory held from forward to backward, per microbatch in flight."""

    def __post_init__(self) -> None:
        costs = (self.time_s, self.state_bytes, self.activation_bytes)
        assert all(math.isfinite(cost) and cost >= 0 for cost in costs), f"a cost is finite and not negative: {self}"


FREE = BlockCost()


def balance(
    costs: Sequence[BlockCost],
    num_stages: int,
    *,
    first: BlockCost = FREE,
    last: BlockCost = FREE,
    in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The numbers of the blocks to cut before. Every stage gets at least one block.

    `first` and `last`: costs of the layers before the blocks (an embedding) and after them (norm, head and loss).
    `in_flight`: the most microbatches that each stage holds at a time; by default those of 1F1B, one on the last stage
    and one more on each stage before it.
    """
    assert num_stages <= len(costs), f"{num_stages} stages need {num_stages} blocks, the model has {len(costs)}"
    in_flight = range(num_stages, 0, -1) if in_flight is None else in_flight
    assert len(in_flight) == num_stages, f"{len(in_flight)} numbers of microbatches in flight for {num_stages} stages"
    stages = _Stages(costs, first, last, in_flight)

    longest = _with_tie(_lowest_peak(stages, stages.time, longest=None))
    largest = _with_tie(_lowest_peak(stages, stages.num_bytes, longest=longest))
    return _most_even(stages, longest=longest, largest=largest)


def stage_problem(num_blocks: int, *, pipeline: int, chunks: int = 1) -> str | None:
    """The reason why so many blocks are too few for so many stages, with numbers that work; None if they suffice."""
    num_stages = pipeline * chunks
    if num_stages <= num_blocks:
        return None
    one_chunk = 'chunks = 1 with [pipeline] schedule = "1f1b"'  # interleaved has at least two
    advice = []
    if (fewer_chunks := num_blocks // pipeline) >= 1:
        advice.append(one_chunk if fewer_chunks == 1 else f"chunks = {fewer_chunks}")
    if (fewer_ranks := num_blocks // chunks) >= 2:
        advice.append(f"pipeline = {fewer_ranks}")
    if not advice:
        advice.append(f"pipeline = {num_blocks} and {one_chunk}" if num_blocks > 1 else "pipeline = 1")
    needs = (
        f"pipeline {pipeline} × chunks {chunks} = {num_stages} stages need"
        if chunks > 1
        else f"pipeline {pipeline} needs"
    )
    return f"{needs} {num_stages} blocks, the model has {num_blocks}; use {', or '.join(advice)}"


def check_cuts(cuts: Sequence[int], num_blocks: int) -> None:
    """Refuse cuts beyond the blocks; a plan's own check covers their number and order."""
    if outside := [cut for cut in cuts if not 1 <= cut < num_blocks]:
        allowed = f"use numbers from 1 to {num_blocks - 1}" if num_blocks > 1 else "one block cannot be cut"
        raise PlanError(
            f"[pipeline] cuts = {list(cuts)} cuts before {', '.join(map(str, outside))}, the blocks are 0 to "
            f"{num_blocks - 1}; {allowed}"
        )


class _Stages:
    """Time and memory of every possible stage: stage number `stage`, blocks `start` to `stop - 1`."""

    def __init__(self, costs: Sequence[BlockCost], first: BlockCost, last: BlockCost, in_flight: Sequence[int]) -> None:
        self.num_blocks, self.num_stages, self._in_flight = len(costs), len(in_flight), in_flight
        costs = (first, *costs, last)
        times = [Fraction(cost.time_s) for cost in costs]
        scale = math.lcm(*(time.denominator for time in times))  # a power of two: exact
        self._times = _running_sums([int(time * scale) for time in times])
        self._states = _running_sums([cost.state_bytes for cost in costs])
        self._activations = _running_sums([cost.activation_bytes for cost in costs])

    def time(self, stage: int, start: int, stop: int) -> int:
        """Time in units that divide a second."""
        return self._times[stop] - self._times[start]

    def num_bytes(self, stage: int, start: int, stop: int) -> int:
        activations = self._activations[stop] - self._activations[start]
        return self._states[stop] - self._states[start] + activations * self._in_flight[stage]

    def stops(self, stage: int) -> range:
        """The ends of a stage that leave every other stage at least one block."""
        end = self.num_blocks - self.num_stages + stage + 1
        return range(end if stage == self.num_stages - 1 else stage + 1, end + 1)


def _running_sums(costs: list[int]) -> list[int]:
    """The cost of the first n blocks, for each n; the layers around the blocks count to the first and last block."""
    first, *blocks, last = costs
    blocks[0] += first
    blocks[-1] += last
    return list(itertools.accumulate(blocks, initial=0))


def _lowest_peak(stages: _Stages, cost: Callable[[int, int, int], int], *, longest: int | None) -> int:
    """The lowest possible maximum cost of a stage, if no stage may take longer than `longest`."""
    ends: dict[int, int] = {0: 0}
    for stage in range(stages.num_stages):
        reached: dict[int, int] = {}
        for stop in stages.stops(stage):
            best: int | None = None
            for start in range(stop - 1, -1, -1):
                own = cost(stage, start, stop)
                # With an earlier start the stage only grows.
                if (longest is not None and stages.time(stage, start, stop) > longest) or (
                    best is not None and own >= best
                ):
                    break
                if start in ends:
                    peak = max(ends[start], own)
                    best = peak if best is None else min(best, peak)
            if best is not None:
                reached[stop] = best
        ends = reached
    return ends[stages.num_blocks]


def _most_even(stages: _Stages, *, longest: int, largest: int) -> tuple[int, ...]:
    """Cuts within both limits whose slowest stage is fastest, then the second slowest, and so on.

    Stages of equal time compare by their blocks; among equal answers the earliest cuts win. Adding the same stage to
    two answers keeps their order, so dynamic programming is exact.
    """
    ends: dict[int, _Answer] = {0: ((), ())}
    for stage in range(stages.num_stages):
        reached: dict[int, _Answer] = {}
        for stop in stages.stops(stage):
            for start in range(stop - 1, -1, -1):
                time = stages.time(stage, start, stop)
                if time > longest or stages.num_bytes(stage, start, stop) > largest:
                    break
                if start in ends:
                    sizes, cuts = ends[start]
                    made = tuple(sorted((*sizes, (time, stop - start)), reverse=True)), (*cuts, stop)
                    reached[stop] = min(reached.get(stop, made), made)
        ends = reached
    _, cuts = ends[stages.num_blocks]
    return cuts[:-1]


def _with_tie(best: int) -> int:
    """The largest value that counts as equal to the best."""
    return best * (100 + _TIE_PERCENT) // 100
