"""Simulated times equal the formulas, exactly: with whole numbers as seconds nothing is rounded."""

from __future__ import annotations

from fractions import Fraction

import pytest

from weft.plan.pipeline import schedules
from weft.plan.pipeline.actions import Action, Schedule
from weft.plan.pipeline.communication import with_exchanges
from weft.plan.pipeline.timeline import Span, Timeline
from weft.planning.simulate import Durations, simulate

STAGES = range(1, 9)
MICROBATCHES = range(1, 13)


def durations(forward_s: int = 1, input_grad_s: int = 1, weight_grad_s: int = 1) -> Durations:
    return Durations(
        forward_s=forward_s,
        backward_s=input_grad_s + weight_grad_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
    )


def makespan_s(order: Schedule, times: Durations) -> float:
    return simulate(with_exchanges(order), times).makespan_s


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", STAGES)
def test_makespans_of_the_flush_schedules(p: int) -> None:
    for m in MICROBATCHES:
        for forward_s, input_grad_s, weight_grad_s in ((1, 1, 1), (3, 2, 5), (2, 1, 0)):
            times = durations(forward_s, input_grad_s, weight_grad_s)
            both_s = forward_s + input_grad_s + weight_grad_s
            assert makespan_s(schedules.naive(p, m), times) == p * m * both_s
            assert makespan_s(schedules.gpipe(p, m), times) == (m + p - 1) * both_s
            assert makespan_s(schedules.one_f_one_b(p, m), times) == (m + p - 1) * both_s
            if m % p == 0:
                for chunks in (1, 2, 3):  # a chunk takes a v-th of the time that the rank's layers take
                    assert makespan_s(schedules.interleaved(p, m, chunks), times) == (chunks * m + p - 1) * both_s


@pytest.mark.parametrize("p", STAGES)
def test_makespan_of_zero_bubble(p: int) -> None:
    for m in MICROBATCHES:
        for forward_s, input_grad_s, weight_grad_s in (
            (1, 1, 1),
            (3, 2, 1),
            (2, 3, 2),
            (1, 2, 2),
            (2, 1, 2),
            (1, 1, 3),
        ):
            made_s = makespan_s(schedules.zero_bubble(p, m), durations(forward_s, input_grad_s, weight_grad_s))
            all_s = m * (forward_s + input_grad_s + weight_grad_s)
            bubble_s = (p - 1) * (forward_s + input_grad_s - weight_grad_s)
            if m >= p and weight_grad_s <= min(forward_s, input_grad_s):
                assert made_s == all_s + bubble_s
            else:
                assert all_s + bubble_s <= made_s <= all_s + bubble_s + 2 * (p - 1) * weight_grad_s  # 1F1B


def test_weight_grads_that_are_not_put_off_cost_a_bubble() -> None:
    p, m = 4, 8
    at_once = tuple(
        tuple(
            made
            for action in actions
            for made in (action, Action(kind="weight-grad", stage=action.stage, microbatch=action.microbatch))
            if action.kind != "weight-grad" and (made is action or action.kind == "input-grad")
        )
        for actions in schedules.zero_bubble(p, m)
    )
    assert schedules.live_activations(at_once) == (4, 3, 2, 1)
    assert makespan_s(at_once, durations(3, 2, 2)) == m * 7 + (p - 1) * (3 + 2)


def test_utilisation_of_the_lecture() -> None:
    times = durations()
    assert simulate(with_exchanges(schedules.naive(4, 4)), times).utilisation == 1 / 4
    gpipe = [simulate(with_exchanges(schedules.gpipe(4, m)), times) for m in (1, 4, 8, 16, 32)]
    assert [timeline.utilisation for timeline in gpipe] == [1 / 4, 4 / 7, 8 / 11, 16 / 19, 32 / 35]
    assert [timeline.bubble_fraction for timeline in gpipe] == pytest.approx([3 / (m + 3) for m in (1, 4, 8, 16, 32)])


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_flush_free_schedules_have_no_bubble_in_steady_state(p: int) -> None:
    times = Durations(forward_s=2, backward_s=3, input_grad_s=0, weight_grad_s=0)
    for order in (schedules.pipedream(p, 30), schedules.two_bw(p, 10, num_batches=3)):
        for rank in range(p):
            spans = [span for span in simulate(with_exchanges(order), times).spans if span.rank == rank]
            begun_s = {span.action.microbatch: span.start_s for span in spans if span.action.kind == "forward"}
            assert begun_s[29] - begun_s[2 * p] == (29 - 2 * p) * (2 + 3)


def all_orders(p: int, m: int) -> list[Schedule]:
    orders = [
        schedules.naive(p, m),
        schedules.gpipe(p, m),
        schedules.one_f_one_b(p, m),
        schedules.zero_bubble(p, m),
        schedules.pipedream(p, m),
        schedules.pipedream(p, m, vertical_sync=True),
        schedules.forward_only(p, m, 1),
        schedules.forward_only(p, m, 3),
        *(schedules.interleaved(p, m, chunks) for chunks in (1, 2, 4)),
    ]
    if m >= p:
        orders.append(schedules.two_bw(p, m, num_batches=2))
    return orders


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", STAGES)
def test_no_schedule_stops_or_computes_before_its_input_is_there(p: int) -> None:
    for m in MICROBATCHES:
        for order in all_orders(p, m):
            timeline = simulate(with_exchanges(order), durations(2, 3, 1), transfer_s=5)
            spans = {
                (s.action.kind, s.action.stage, s.action.microbatch): s for s in timeline.spans if s.action.is_compute
            }
            for (kind, stage, microbatch), span in spans.items():
                source = spans.get((kind, stage + (-1 if kind == "forward" else 1), microbatch))
                if source is not None and kind in ("forward", "backward", "input-grad"):
                    assert span.start_s >= source.stop_s + 5
            for rank, actions in enumerate(order):
                times = durations(2, 3, 1).of_kinds(4 * p)
                assert timeline.busy_s(rank) == sum(times[action.kind][action.stage] for action in actions)


def test_times_of_each_stage_and_of_transfers() -> None:
    times = Durations(
        forward_s=(1, 2), backward_s=(3, 4), input_grad_s=0, weight_grad_s=0, update_s=5, gather_s=6, reduce_s=(7, 8)
    )
    order = tuple(
        (*actions, Action(kind="update", stage=rank)) for rank, actions in enumerate(schedules.one_f_one_b(2, 1))
    )
    schedule = with_exchanges(order, gathers="step", reduces_gradients=True)
    spans = simulate(schedule, times, transfer_s=Fraction(1, 2)).spans  # type: ignore[arg-type]
    half = Fraction(1, 2)
    assert [(span.rank, span.action.kind, span.start_s, span.stop_s) for span in spans] == [
        (0, "receive", 0, 14),
        (0, "gather", 0, 6),
        (0, "forward", 6, 7),
        (0, "send", 7, 7 + half),
        (0, "backward", 14, 17),
        (0, "release", 17, 17),
        (0, "reduce", 17, 24),
        (0, "update", 24, 29),
        (1, "receive", 0, 7 + half),
        (1, "gather", 0, 6),
        (1, "forward", 7 + half, 9 + half),
        (1, "backward", 9 + half, 13 + half),
        (1, "send", 13 + half, 14),
        (1, "release", 13 + half, 13 + half),
        (1, "reduce", 13 + half, 21 + half),
        (1, "update", 21 + half, 26 + half),
    ]


def test_a_message_that_is_never_sent_is_named() -> None:
    first, second = with_exchanges(schedules.one_f_one_b(2, 2))
    silent = tuple(action for action in first if action.kind != "send" or action.microbatch != 1)
    with pytest.raises(ValueError, match="cannot go on") as caught:
        simulate((silent, second), durations())
    message = str(caught.value)
    assert (
        "rank 1, forward of microbatch 1 on stage 1, waits for the message of microbatch 1 from stage 0 to stage 1, "
        "which is never sent" in message
    )
    assert "rank 0, backward of microbatch 1 on stage 0, waits for" in message


def test_a_receive_that_is_never_posted_is_named() -> None:
    first, second = with_exchanges(schedules.gpipe(2, 1))
    deaf = tuple(action for action in second if action.kind != "receive")
    with pytest.raises(ValueError, match="rank 1, forward of microbatch 0 on stage 1, needs .* posts no receive"):
        simulate((first, deaf), durations())


def test_durations_for_another_number_of_stages_are_refused() -> None:
    times = Durations(forward_s=(1, 1), backward_s=1, input_grad_s=1, weight_grad_s=1)
    with pytest.raises(ValueError, match="forward_s has 2 durations for 3 stages"):
        simulate(with_exchanges(schedules.gpipe(3, 1)), times)


def test_a_timeline_counts_from_its_own_beginning_and_survives_rows() -> None:
    forward = Action(kind="forward", stage=0, microbatch=0, version=3)
    send = Action(kind="send", stage=0, microbatch=0, peer=1)
    timeline = Timeline(
        spans=(
            Span(rank=0, action=forward, start_s=10.0, stop_s=12.0),
            Span(rank=0, action=send, start_s=12.0, stop_s=14.0),
        ),
        num_ranks=2,
    )
    assert (timeline.makespan_s, timeline.busy_s(0), timeline.busy_s(1)) == (4.0, 2.0, 0)
    assert timeline.utilisation == 0.25
    assert Timeline.from_rows(timeline.as_rows(), num_ranks=2) == timeline
    assert Timeline(spans=(), num_ranks=2).utilisation == 0.0
