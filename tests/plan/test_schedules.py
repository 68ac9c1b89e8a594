"""Schedules are seen: each drawn table is data here, and is what the simulator makes of the function that shows it.

Then the laws of every schedule over many sizes, and what a rank has to keep.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from weft.plan.pipeline import schedules
from weft.plan.pipeline.actions import Schedule
from weft.plan.pipeline.communication import with_exchanges
from weft.plan.pipeline.schedules import live_activations
from weft.planning.simulate import Durations, simulate

TABLES: list[tuple[Callable[..., Schedule], dict[str, Any], str]] = [
    (
        schedules.naive,
        {"num_stages": 3, "num_microbatches": 2},
        """
        stage 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2 | .  .  F0 B0 .  .  .  .  F1 B1 .  .
        """,
    ),
    (
        schedules.gpipe,
        {"num_stages": 3, "num_microbatches": 4},
        """
        stage 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
        """,
    ),
    (
        schedules.one_f_one_b,
        {"num_stages": 3, "num_microbatches": 5},
        """
        stage 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
        """,
    ),
    (
        schedules.interleaved,
        {"num_ranks": 2, "num_microbatches": 4, "num_chunks": 2},
        """
        rank 0 | F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        rank 1 | .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
        """,
    ),
    (
        schedules.zero_bubble,
        {"num_stages": 3, "num_microbatches": 5},
        """
        stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        schedules.pipedream,
        {"num_stages": 3, "num_microbatches": 5},
        """
        stage 0 | F0/0 F1/0 F2/0 .    .    B0/0 F3/1 B1/0 F4/2 B2/0 .    B3/1 .    B4/2
        stage 1 | .    F0/0 F1/0 .    B0/0 F2/1 B1/0 F3/2 B2/1 F4/3 B3/2 .    B4/3 .
        stage 2 | .    .    F0/0 B0/0 F1/1 B1/1 F2/2 B2/2 F3/3 B3/3 F4/4 B4/4 .    .
        """,
    ),
    (
        schedules.two_bw,
        {"num_stages": 2, "num_microbatches": 2, "num_batches": 3},
        """
        stage 0 | F0/0 F1/0 .    B0/0 F2/0 B1/0 F3/0 B2/0 F4/1 B3/0 F5/1 B4/1 .    B5/1
        stage 1 | .    F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 F3/0 B3/0 F4/1 B4/1 F5/1 B5/1 .
        """,
    ),
    (
        schedules.forward_only,
        {"num_ranks": 2, "num_microbatches": 3, "num_chunks": 2},
        """
        rank 0 | F0 F1 f0 f1 F2 .  f2 .
        rank 1 | .  F0 F1 f0 f1 F2 .  f2
        """,
    ),
]

STAGES = range(1, 9)
MICROBATCHES = range(1, 13)
LETTERS = {"forward": "F", "backward": "B", "input-grad": "I", "weight-grad": "W"}
ONE_SECOND_EACH = Durations(forward_s=1, backward_s=1, input_grad_s=1, weight_grad_s=1)


def drawn(order: Schedule) -> list[list[str]]:
    """The cells of each rank's row, one per second."""
    timeline = simulate(with_exchanges(order), ONE_SECOND_EACH)
    shows_versions = any(action.kind == "update" for actions in order for action in actions)
    rows = [["."] * int(timeline.makespan_s) for _ in order]
    for span in timeline.spans:
        action = span.action
        if action.kind in LETTERS:
            letter = LETTERS[action.kind] if action.stage < len(order) else LETTERS[action.kind].lower()
            version = f"/{action.version}" if shows_versions else ""
            rows[span.rank][int(span.start_s)] = f"{letter}{action.microbatch}{version}"
    return rows


@pytest.mark.parametrize(("function", "sizes", "table"), TABLES, ids=[table[0].__name__ for table in TABLES])
def test_the_drawn_table(function: Callable[..., Schedule], sizes: dict[str, Any], table: str) -> None:
    lines = inspect.cleandoc(table).splitlines()
    assert drawn(function(**sizes)) == [line.split("|")[1].split() for line in lines]
    assert [line for line in (inspect.getdoc(function) or "").splitlines() if " | " in line] == lines


def orders(p: int, m: int) -> list[Schedule]:
    """Every training schedule that these sizes allow."""
    made = [
        schedules.naive(p, m),
        schedules.gpipe(p, m),
        schedules.one_f_one_b(p, m),
        schedules.zero_bubble(p, m),
        schedules.pipedream(p, m),
        schedules.pipedream(p, m, first=7, start=7, vertical_sync=True),
    ]
    made += [schedules.interleaved(p, m, chunks) for chunks in (1, 2, 3)]
    if m >= p:
        made += [schedules.two_bw(p, m, num_batches=3), schedules.two_bw(p, m, first=m, start=m)]
    return made


@pytest.mark.parametrize("p", STAGES)
def test_every_microbatch_goes_once_through_every_stage(p: int) -> None:
    for m in MICROBATCHES:
        for order in orders(p, m):
            fed = sorted({action.microbatch for action in order[0] if action.kind == "forward"})
            assert len(fed) % m == 0 and fed == list(range(fed[0], fed[0] + len(fed)))
            for rank, actions in enumerate(order):
                stages = sorted({action.stage for action in actions})
                assert {stage % p for stage in stages} == {rank}
                passes = [action for action in actions if action.kind != "update"]
                places = {(a.kind, a.stage, a.microbatch): place for place, a in enumerate(passes)}
                assert len(places) == len(passes)
                ways = [("forward", "backward"), ("forward", "input-grad", "weight-grad")]
                way = ways["weight-grad" in {action.kind for action in passes}]
                assert set(places) == set(product(way, stages, fed))
                for stage, k in product(stages, fed):
                    taken = [places[kind, stage, k] for kind in way]
                    assert taken == sorted(taken)


def live_versions(schedule: Schedule) -> tuple[int, ...]:
    """The most weight versions that each rank must hold at once.

    A version exists from the update that makes it, or from the beginning of the list, until it is not the newest and no
    later action of the list uses it.
    """
    most = []
    for actions in schedule:
        last_use = {action.version: place for place, action in enumerate(actions) if action.kind != "update"}
        made = [action.version for action in actions if action.kind == "update"]
        newest = made[0] - 1 if made else max(last_use, default=0)
        held = {newest} | {version for version in last_use if version <= newest}
        peak = len(held)
        for place, action in enumerate(actions):
            if action.kind == "update":
                newest = action.version
                held.add(newest)
            held = {version for version in held if version == newest or last_use.get(version, -1) > place}
            peak = max(peak, len(held))
        most.append(peak)
    return tuple(most)


@pytest.mark.parametrize("p", STAGES)
def test_what_a_rank_keeps(p: int) -> None:
    for m in MICROBATCHES:
        stages = range(p)
        capped = tuple(min(p - i, m) for i in stages)
        assert live_activations(schedules.naive(p, m)) == (1,) * p
        assert live_activations(schedules.gpipe(p, m)) == (m,) * p
        assert live_activations(schedules.one_f_one_b(p, m)) == capped
        assert live_activations(schedules.pipedream(p, m)) == capped
        assert max(live_activations(schedules.zero_bubble(p, m))) == max(capped)
        assert live_versions(schedules.gpipe(p, m)) == (1,) * p

        long = 2 * p + m  # long enough for a steady state
        assert live_versions(schedules.pipedream(p, long)) == tuple(p - i for i in stages)
        assert max(live_versions(schedules.pipedream(p, 2 * long, vertical_sync=True))) == p
        if m >= p:
            batches = schedules.two_bw(p, m, num_batches=4)
            assert live_versions(batches) == (2,) * p
            assert live_activations(batches) == tuple(p - i for i in stages)
        longest = math.ceil(m / max(1, m // p))  # of the rounds: p where m is a multiple of p, else up to 2p - 1
        most = tuple(min(longest + 2 * (p - 1 - i) + 1, 2 * m) for i in stages)  # in halves of a rank's layers
        assert live_activations(schedules.interleaved(p, m, 2)) == most


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_interleaved_never_stops_for_any_number_of_microbatches(p: int) -> None:
    for m, chunks in product(range(1, 3 * p + 2), (2, 3)):
        timeline = simulate(with_exchanges(schedules.interleaved(p, m, chunks)), ONE_SECOND_EACH, transfer_s=5)
        assert sum(span.action.is_compute for span in timeline.spans) == 2 * p * chunks * m


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_versions_are_there_when_they_are_used(p: int, vertical_sync: bool) -> None:
    for order in (
        schedules.pipedream(p, 20, vertical_sync=vertical_sync),
        schedules.pipedream(p, 20, first=5, start=5, vertical_sync=vertical_sync),
        schedules.two_bw(p, 5, num_batches=4),
    ):
        for actions in order:
            newest = next(action.version for action in actions if action.kind == "update") - 1
            used_forward: dict[int, int] = {}
            for action in actions:
                if action.kind == "update":
                    assert action.version == newest + 1
                    newest = action.version
                elif action.kind == "forward":
                    assert action.version <= newest
                    used_forward[action.microbatch] = action.version
                else:
                    assert action.version == used_forward[action.microbatch]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_calls_of_a_stream_put_together_are_one_call(p: int, vertical_sync: bool) -> None:
    def pipedream(n: int, first: int, drain: bool) -> Schedule:
        return schedules.pipedream(p, n, first=first, start=3, drain=drain, vertical_sync=vertical_sync)

    def two_bw(num_batches: int, first: int, drain: bool) -> Schedule:
        return schedules.two_bw(p, 4, num_batches=num_batches, first=first, start=8, drain=drain)

    def together(*parts: Schedule) -> Schedule:
        return tuple(tuple(action for part in parts for action in part[rank]) for rank in range(p))

    assert together(pipedream(1, 3, False), pipedream(2, 4, False), pipedream(6, 6, True)) == pipedream(9, 3, True)
    assert together(pipedream(5, 3, False), pipedream(0, 8, True)) == pipedream(5, 3, True)
    assert together(two_bw(1, 8, False), two_bw(2, 12, True)) == two_bw(3, 8, True)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_begins_afresh_after_a_drain(vertical_sync: bool) -> None:
    later = tuple(
        tuple(replace(action, microbatch=action.microbatch + 5, version=action.version + 5) for action in actions)
        for actions in schedules.pipedream(3, 8, vertical_sync=vertical_sync)
    )
    assert schedules.pipedream(3, 8, first=5, start=5, vertical_sync=vertical_sync) == later


def test_two_bw_does_not_notice_a_drain() -> None:
    def versions(*parts: Schedule) -> dict[tuple[int, int], int]:
        actions = [action for part in parts for rank in part for action in rank]
        return {(a.stage, a.microbatch): a.version for a in actions if a.kind == "forward"}

    drained = [schedules.two_bw(3, 4, first=first, start=first) for first in (0, 4, 8)]
    assert versions(*drained) == versions(schedules.two_bw(3, 4, num_batches=3))
