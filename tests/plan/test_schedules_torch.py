"""The order of our schedules is that of torch's own: what its GPipe and 1F1B do, and the tables of the other two.

GPipe and 1F1B are run with a stage that only notes what is asked of it: torch's drawn table of 1F1B (2.13) begins the
last rank with microbatch 1, but what it runs begins with 0. Torch has no ZB-H1 by name; its interleaved zero-bubble
schedule with one chunk is that, where its rounds allow the number of microbatches.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from weft.plan.pipeline import schedules
from weft.plan.pipeline.actions import Action

STAGES = range(1, 9)
MICROBATCHES = range(1, 13)
LETTERS = {"forward": "F", "backward": "B", "input-grad": "I", "weight-grad": "W"}


def brief(actions: tuple[Action, ...]) -> list[tuple[int, str, int]]:
    return [(action.stage, LETTERS[action.kind], action.microbatch) for action in actions]


class NotingStage:
    """Stands in for torch's pipeline stage: computes nothing, sends nothing, and notes in which order it is asked."""

    has_backward = is_first = is_last = True

    def __init__(self, stage: int) -> None:
        self.stage_index = stage
        self.noted: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.noted.append((self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.noted.append((self.stage_index, "B", microbatch))

    def no_operations(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations

    def perform_reduce_grad(self, _: int) -> None:
        pass


def run_by_torch(kind: type[Any], stage: int, p: int, m: int) -> list[tuple[int, str, int]]:
    schedule = kind.__new__(kind)
    schedule._stage = noting = NotingStage(stage)
    schedule._num_stages, schedule._n_microbatches, schedule.scale_grads = p, m, False
    nothing = [()] * m
    schedule._check_inputs = lambda *_: (nothing, nothing)
    schedule._initialize_stage = schedule._maybe_compute_loss = lambda *_: None
    schedule._maybe_get_loss = schedule._update_losses = lambda *_: None
    schedule._step_microbatches()
    return noting.noted


def table_of_torch(kind: type[Any], rank: int, p: int, m: int, chunks: int) -> list[tuple[int, str, int]]:
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, chunks, m
    schedule.microbatches_per_round = m // max(1, m // p)
    actions = schedule._calculate_single_rank_operations(rank)
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a is not None]


@pytest.mark.parametrize("p", STAGES)
def test_gpipe_and_1f1b_run_in_torchs_order(p: int) -> None:
    for m in MICROBATCHES:
        for stage in range(p):
            assert brief(schedules.gpipe(p, m)[stage]) == run_by_torch(ScheduleGPipe, stage, p, m)
            assert brief(schedules.one_f_one_b(p, m)[stage]) == run_by_torch(Schedule1F1B, stage, p, m)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_is_torchs_table(p: int, chunks: int) -> None:
    for m in range(p, 13, p):
        order = schedules.interleaved(p, m, chunks)
        for rank in range(p):
            assert brief(order[rank]) == table_of_torch(ScheduleInterleaved1F1B, rank, p, m, chunks)


@pytest.mark.parametrize("p", STAGES)
def test_zero_bubble_is_torchs_table_with_one_chunk(p: int) -> None:
    for m in MICROBATCHES:
        order = schedules.zero_bubble(p, m)
        for rank in range(p):
            assert brief(order[rank]) == table_of_torch(ScheduleInterleavedZeroBubble, rank, p, m, 1)


@pytest.mark.parametrize("p", STAGES)
def test_zero_bubble_is_1f1b_but_for_the_weight_grads(p: int) -> None:
    for m in MICROBATCHES:
        for split, whole in zip(schedules.zero_bubble(p, m), schedules.one_f_one_b(p, m), strict=True):
            without_weights = [(stage, letter, k) for stage, letter, k in brief(split) if letter != "W"]
            assert without_weights == [(stage, letter.replace("B", "I"), k) for stage, letter, k in brief(whole)]
