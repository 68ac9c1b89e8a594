"""Replicas that differ under NCCL's rules: a pipeline in each of two, and buckets of weights between equal stages after
every update, two under way at a time (`sync/local.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from nccl_rules import Call, Exchange, Pass, Wait, play
from test_nccl_rules import FLUSHED, Case

NUM_REPLICAS, NUM_BUCKETS = 2, 3


def exchange_of_weights(stage: int, num_ranks: int, update: int) -> Iterator[Call]:
    """The calls of one rank for the exchange after an update."""
    ranks = tuple(stage + replica * num_ranks for replica in range(NUM_REPLICAS))
    names = [(update, bucket) for bucket in range(NUM_BUCKETS)]
    calls = [Exchange(group=("weights", stage), side="collective", name=name, ranks=ranks) for name in names]
    waits = [Wait(group=("weights", stage), side="collective", name=name) for name in names]
    yield from (calls[0], calls[1], waits[0], calls[2], waits[1], waits[2])


def programs_of_replicas(case: Case) -> list[list[Call]]:
    """Every rank's calls, replica by replica."""
    programs: list[list[Call]] = []
    for replica in range(NUM_REPLICAS):
        for stage, inside in enumerate(case.programs()):
            calls: list[Call] = []
            for call in inside:
                calls.append(in_replica(call, replica, case.num_ranks))
                if isinstance(call, Pass) and isinstance(call.name, tuple) and call.name[0] == "update":
                    calls += exchange_of_weights(stage, case.num_ranks, call.name[1])
            programs.append(calls)
    return programs


def in_replica(call: Call, replica: int, num_ranks: int) -> Call:
    if isinstance(call, Exchange):
        ranks = tuple(rank + replica * num_ranks for rank in call.ranks)
        return replace(call, group=(call.group, replica), ranks=ranks)
    return replace(call, group=(call.group, replica)) if isinstance(call, Wait) else call


@pytest.mark.parametrize("schedule", FLUSHED)
def test_replicas_of_pipelines_run_under_nccls_rules(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    for num_ranks, is_tied in ((2, False), (3, True)):
        case = Case(schedule=schedule, num_ranks=num_ranks, microbatches=4, chunks=chunks, is_tied=is_tied)
        programs = programs_of_replicas(case)
        assert sum(isinstance(call, Exchange) and call.group[0] == "weights" for call in programs[0]) == 3 * NUM_BUCKETS  # type: ignore[index]
        assert play(programs) is None, case
        assert play(programs, host_waits_for="stream") is None, case


def test_a_replica_that_leaves_an_exchange_out_is_found() -> None:
    case = Case(schedule="1f1b", num_ranks=2, microbatches=2)
    programs = programs_of_replicas(case)
    programs[3] = [call for call in programs[3] if isinstance(call, Pass) or call.group != ("weights", 1)]  # type: ignore[union-attr]
    assert play(programs) is not None
