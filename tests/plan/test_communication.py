"""Where exchanges stand among the compute actions, and that both ends of every link agree on the order."""

from __future__ import annotations

import pytest

from weft.plan.pipeline.actions import EVERY, Action, Schedule
from weft.plan.pipeline.communication import FLUSH_FREE, evaluation_of, schedule_of
from weft.plan.plan import Axes, Data, Pipeline, Plan, Step
from weft.planning.simulate import Durations, simulate

LETTERS = {"forward": "F", "backward": "B", "input-grad": "I", "weight-grad": "W", "update": "U"}
ZERO_3 = Data(shard="parameters")
COMBINATIONS = [
    *((name, Data()) for name in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", *FLUSH_FREE)),
    *((name, ZERO_3) for name in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")),
    ("interleaved", Data(shard="parameters", reshard="microbatch")),
]


def plan_of(schedule: str, p: int, m: int, *, data: int = 1, zero: Data | None = None) -> Plan:
    return Plan(
        axes=Axes(pipeline=p, data=data),
        step=Step(microbatches=m),
        pipeline=Pipeline(schedule=schedule, chunks=2 if schedule == "interleaved" else 1),
        data=zero or Data(),
    )


def brief(action: Action) -> str:
    """F0: forward of microbatch 0; send0:1-2: its message from stage 1 to 2; receive0:2-1: its receive there."""
    if action.kind in LETTERS:
        return LETTERS[action.kind] + ("" if action.microbatch == EVERY else str(action.microbatch))
    if action.kind in ("send", "receive"):
        return f"{action.kind}{action.microbatch}:{action.stage}-{action.peer}"
    return f"{action.kind}:{action.stage}"


def said(schedule: Schedule, rank: int) -> str:
    return " ".join(brief(action) for action in schedule[rank])


def test_messages_are_sent_at_once_and_received_one_action_early() -> None:
    schedule = schedule_of(plan_of("1f1b", 3, 3))
    assert said(schedule, 0) == (
        "F0 send0:0-1 F1 send1:0-1 receive0:0-1 F2 send2:0-1 receive1:0-1 B0 receive2:0-1 B1 B2 U"
    )
    assert said(schedule, 1) == (
        "receive0:1-0 receive1:1-0 F0 send0:1-2 receive0:1-2 F1 send1:1-2 receive2:1-0 B0 send0:1-0 receive1:1-2 "
        "F2 send2:1-2 receive2:1-2 B1 send1:1-0 B2 send2:1-0 U"
    )
    assert [actions[-1] for actions in schedule] == [Action(kind="update", stage=rank, version=1) for rank in range(3)]


def test_input_grads_are_sent_and_weight_grads_are_not() -> None:
    assert said(schedule_of(plan_of("zero-bubble", 2, 2)), 1) == (
        "receive0:1-0 F0 receive1:1-0 I0 send0:1-0 F1 I1 send1:1-0 W0 W1 U"
    )


def test_gradients_are_reduced_when_they_are_complete() -> None:
    assert said(schedule_of(plan_of("zero-bubble", 2, 2, data=2)), 1).endswith("I1 send1:1-0 W0 W1 reduce:1 U")
    interleaved = said(schedule_of(plan_of("interleaved", 2, 2, data=2)), 0)
    assert interleaved.endswith("B0 send0:2-1 receive0:0-1 B1 send1:2-1 reduce:2 receive1:0-1 B0 B1 reduce:0 U")
    assert said(schedule_of(plan_of("1f1b", 1, 2, data=2)), 0) == "F0 B0 F1 B1 reduce:0 U"
    replicated = Plan(axes=Axes(replicate=2), data=Data(shard="gradients"))
    assert said(schedule_of(replicated), 0) == "F0 B0 reduce:0 U"


def test_flush_free_schedules_reduce_before_every_update() -> None:
    stream = schedule_of(plan_of("pipedream", 2, 2, data=2), drain=False)
    assert said(stream, 1) == "receive0:1-0 F0 receive1:1-0 B0 send0:1-0 reduce:1 U0 F1 B1 send1:1-0 reduce:1 U1"
    assert [action.microbatch for action in stream[1] if action.kind == "reduce"] == [0, 1]
    batches = schedule_of(plan_of("2bw", 2, 2, data=2), num_microbatches=4)
    assert [action.version for action in batches[0] if action.kind == "update"] == [1, 2]
    assert said(batches, 0).count("reduce:0 U") == 2
    # the last backward of stage 0 comes with the next call, and so do its reduce and its update
    assert "reduce" not in said(schedule_of(plan_of("2bw", 2, 2, data=2), drain=False), 0)


def test_zero_3_gathers_for_the_step_or_for_a_run_of_one_stage() -> None:
    def parameters(schedule: Schedule, rank: int) -> str:
        return " ".join(word for word in said(schedule, rank).split() if ":" not in word or "-" not in word)

    step = schedule_of(plan_of("interleaved", 2, 2, data=2, zero=ZERO_3))
    assert parameters(step, 0) == ("gather:0 F0 gather:2 F1 F0 F1 B0 B1 release:2 reduce:2 B0 B1 release:0 reduce:0 U")
    by_microbatch = Data(shard="parameters", reshard="microbatch")
    runs = schedule_of(plan_of("interleaved", 2, 2, data=2, zero=by_microbatch))
    assert parameters(runs, 0) == (
        "gather:0 F0 gather:2 F1 release:0 F0 F1 B0 gather:0 B1 release:2 reduce:2 B0 B1 release:0 reduce:0 U"
    )
    one_chunk = [schedule_of(plan_of("1f1b", 2, 4, data=2, zero=zero)) for zero in (ZERO_3, by_microbatch)]
    assert one_chunk[0] == one_chunk[1]
    assert parameters(evaluation_of(plan_of("1f1b", 2, 2, data=2, zero=ZERO_3), 2), 1) == "gather:1 F0 F1 release:1"


def test_evaluation_goes_forward_only_with_any_number_of_microbatches() -> None:
    evaluation = evaluation_of(plan_of("interleaved", 2, 2, data=2), 3)
    assert said(evaluation, 1) == (
        "receive0:1-0 receive1:1-0 F0 send0:1-2 receive0:3-2 F1 send1:1-2 receive1:3-2 F0 receive2:1-0 F1 "
        "receive2:3-2 F2 send2:1-2 F2"
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "zero"), COMBINATIONS)
def test_plans_run_and_both_ends_of_every_link_agree(p: int, name: str, zero: Data) -> None:
    times = Durations(forward_s=1, backward_s=2, input_grad_s=1, weight_grad_s=1)
    for m in (p, 2 * p, 3 * p):
        plan = plan_of(name, p, m, data=2, zero=zero)
        for schedule in (schedule_of(plan), evaluation_of(plan, m + 1)):
            simulate(schedule, times, transfer_s=3)
            sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
            received: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
            for rank, actions in enumerate(schedule):
                for action in actions:
                    if action.kind == "send":
                        message = (action.stage, action.peer, action.microbatch)
                        sent.setdefault((rank, action.peer % p), []).append(message)
                    elif action.kind == "receive":
                        message = (action.peer, action.stage, action.microbatch)
                        received.setdefault((action.peer % p, rank), []).append(message)
            assert sent == received


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream", "2bw"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_two_ranks_post_their_messages_in_one_order(schedule: str, num_ranks: int) -> None:
    """A wire without tags (NCCL) delivers in the order of posting: sends of a pair come as the other posts receives."""
    chunks = 2 if schedule == "interleaved" else 1
    plan = Plan(
        axes=Axes(pipeline=num_ranks),
        step=Step(microbatches=2 * num_ranks),
        pipeline=Pipeline(schedule=schedule, chunks=chunks),
    )
    posted: dict[tuple[str, int, int, bool, bool], list[tuple[int, int]]] = {}
    for actions in schedule_of(plan):
        for action in actions:
            if action.kind in ("send", "receive"):
                ends = (action.stage, action.peer) if action.kind == "send" else (action.peer, action.stage)
                source, target = (stage % num_ranks for stage in ends)
                channel = (action.kind, source, target, ends[0] < ends[1], source < target)
                posted.setdefault(channel, []).append((ends[0], action.microbatch))
    for (kind, *channel), messages in posted.items():
        other = "receive" if kind == "send" else "send"
        assert posted[other, *channel] == messages
