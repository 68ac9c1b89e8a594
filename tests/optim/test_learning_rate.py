"""The learning-rate factor at the points the drawing in schedule.py names, and the refusal of bad settings."""

from __future__ import annotations

import math
import pickle

import pytest

from weft.errors import JobError
from weft.optim.schedule import SCHEDULES, Schedule, constant, warmup_cosine, warmup_linear


def test_constant_is_one() -> None:
    assert [constant()(step) for step in (0, 1, 10**9)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [warmup_cosine, warmup_linear])
def test_the_drawn_points(make: type[Schedule]) -> None:
    schedule = make(4, 14, 0.2)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(8) == pytest.approx(0.6)  # half-way down, where line and cosine meet
    assert [schedule(step) for step in (13, 14, 1000)] == pytest.approx([0.2] * 3)
    falling = [schedule(step) for step in range(3, 14)]
    assert falling == sorted(falling, reverse=True)


def test_linear_and_cosine_between_the_points() -> None:
    line, curve = warmup_linear(0, 10, 0.0), warmup_cosine(0, 10, 0.0)
    assert [line(step) for step in range(10)] == pytest.approx([1 - (step + 1) / 10 for step in range(10)])
    assert curve(1) == pytest.approx((1 + math.cos(math.pi * 0.2)) / 2)


def test_every_schedule_can_be_pickled() -> None:
    for name in SCHEDULES:
        settings = {} if name == "constant" else {"warmup_steps": 3, "total_steps": 9}
        schedule = SCHEDULES[name](**settings)
        assert pickle.loads(pickle.dumps(schedule))(5) == schedule(5)


def test_bad_settings_are_all_named() -> None:
    with pytest.raises(JobError, match="total_steps is 10 and warmup_steps 10: nothing is left"):
        warmup_cosine(10, 10)
    with pytest.raises(JobError, match="warmup_steps is -1"):
        warmup_linear(-1, 10)
    with pytest.raises(JobError) as caught:
        warmup_linear(0.5, True, 2)  # type: ignore[arg-type]
    assert [problem.split()[0] for problem in caught.value.problems] == ["warmup_steps", "total_steps", "final"]
