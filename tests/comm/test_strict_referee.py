"""The referee of the strict stand-in for NCCL, without processes."""

from __future__ import annotations

import pytest
from strict_nccl.calls import Call, Part
from strict_nccl.mode import StrictMode
from strict_nccl.referee import Referee


def called(rank: int, number: int, *parts: tuple[int, int], payload: bytes = b"") -> Call:
    """A barrier, or a batch of messages, of ranks 0 and 1."""
    messages = tuple(Part(source=source, target=target, content="1 uint8") for source, target in parts)
    return Call(
        number=number,
        rank=rank,
        communicator=("group", (0, 1)),
        group_name="test",
        text="batch" if parts else "barrier",
        site="here",
        parts=messages,
        payload=[payload] * max(len(parts), 1),
    )


def test_the_referee_is_patient_with_a_rank_that_computes() -> None:
    referee = Referee(2, StrictMode())
    referee.call(called(0, 1), 0.0)
    referee.wait(0, 1, 1.0)
    referee.advance(10.9)
    assert referee.failure is None and referee.sleep_s(10.9) == pytest.approx(0.1)
    referee.advance(11.0)
    assert referee.failure is not None
    assert "rank 0 waits for barrier on 'test' (here), which rank 1 has not called" in referee.failure
    assert "rank 1 does not wait; its last call was none at all" in referee.failure
    assert referee.replies == [(rank, ("failed", referee.failure)) for rank in range(2)]


def test_messages_of_a_batch_run_in_any_order() -> None:
    referee = Referee(2, StrictMode())
    referee.call(called(0, 1, (0, 1), (1, 0), payload=b"a"), 0.0)
    referee.call(called(1, 1, (0, 1), payload=b"b"), 0.0)
    referee.call(called(1, 2, (1, 0), payload=b"c"), 0.0)
    referee.advance(0.0)
    replies = {(rank, number): results for rank, (_, number, results) in referee.replies}
    assert replies == {(0, 1): [None, b"c"], (1, 1): [b"a"], (1, 2): [None]}


def test_a_delayed_operation_holds_up_those_behind_it() -> None:
    referee = Referee(2, StrictMode(delay_ms=1000.0))
    for rank, number in ((0, 1), (0, 2), (1, 1), (1, 2)):
        referee.call(called(rank, number), 0.0)
    times_s = []
    now_s = 0.0
    while len(referee.replies) < 4:
        referee.advance(now_s)
        times_s += [now_s] * (len(referee.replies) - len(times_s))
        now_s += 0.01
    assert [reply[1] for _, reply in referee.replies] == [1, 1, 2, 2]
    assert 0.0 < times_s[0] == times_s[1] < times_s[2] == times_s[3]
