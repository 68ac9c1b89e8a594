"""The learning-rate factor at the points the drawing in schedule.py names, and the refusal of bad settings."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest

from weft.errors import JobError
from weft.optim.schedule import (
    SCHEDULES,
    Schedule,
    batch_scaling,
    constant,
    scaled,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
    warmup_step,
)

NEEDED = {"warmup-stable-decay": {"decay_steps": 2}, "warmup-step": {"drops": [5, 7]}}
"""Settings without a default."""


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


def test_polynomial() -> None:
    schedule = warmup_polynomial(2, 12, final=0.2, power=3)
    assert [schedule(step) for step in (0, 1)] == [0.5, 1.0]
    assert schedule(6) == pytest.approx(0.2 + 0.8 * 0.5**3)
    assert schedule(11) == schedule(40) == pytest.approx(0.2)
    assert warmup_polynomial(0, 10)(4) == pytest.approx(0.25)  # power 2 and down to 0, as published for LARS
    line, other = warmup_linear(3, 9, 0.2), warmup_polynomial(3, 9, 0.2, power=1)
    assert [line(step) for step in range(9)] == [other(step) for step in range(9)]


def test_stable_decay() -> None:
    schedule = warmup_stable_decay(2, 12, 4, final=0.2)
    assert [schedule(step) for step in range(12)] == pytest.approx([0.5, *[1.0] * 7, 0.8, 0.6, 0.4, 0.2])
    assert schedule(100) == pytest.approx(0.2)
    assert [warmup_stable_decay(0, 4, 4)(step) for step in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0])


def test_step() -> None:
    schedule = warmup_step(2, 10, [4, 7], 0.5)
    assert [schedule(step) for step in range(10)] == [0.5, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_warmup_constant() -> None:
    assert [warmup_constant(4, 9)(step) for step in (0, 3, 4, 100)] == [0.25, 1, 1, 1]


def test_batch_scaling() -> None:
    assert batch_scaling("linear", global_batch=8192, base_batch=256) == 32
    assert batch_scaling("sqrt", global_batch=64, base_batch=256) == 0.5
    larger = scaled(warmup_cosine(2, 9), 32)
    assert [larger(step) for step in (0, 5)] == [32 * warmup_cosine(2, 9)(step) for step in (0, 5)]
    assert pickle.loads(pickle.dumps(larger))(5) == larger(5)
    with pytest.raises(JobError) as caught:
        batch_scaling("cubic", global_batch=0, base_batch=2.5)  # type: ignore[arg-type]
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "batch_scaling is 'cubic'",
        "global_batch is 0",
        "base_batch is 2.5",
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: warmup_polynomial(0, 10, power=0), "power is 0; give a number above 0"),
        (lambda: warmup_polynomial(10, 10, power="x"), "nothing is left after the warm-up(.|\n)*power is 'x'"),
        (lambda: warmup_stable_decay(2, 10, 0), "decay_steps is 0"),
        (lambda: warmup_stable_decay(2, 10, 2.5), "decay_steps is 2.5; give a whole number of steps"),
        (lambda: warmup_stable_decay(6, 10, 5), "warmup_steps 6 and decay_steps 5 are more than the 10 steps in all"),
        (lambda: warmup_step(2, 10, []), r"drops is \[\]; list the steps"),
        (lambda: warmup_step(2, 10, [7, 4]), r"drops is \[7, 4\]; list the steps in order"),
        (lambda: warmup_step(2, 10, [1, 4]), "give steps after the warm-up of 2"),
        (lambda: warmup_step(2, 10, [4, 10]), "below the 10 steps"),
        (lambda: warmup_step(2, 10, [4], 1.5), "drop_factor is 1.5; give a number between 0 and 1"),
    ],
)
def test_bad_curves(make: Callable[[], Schedule], words: str) -> None:
    with pytest.raises(JobError, match=words):
        make()


def test_every_schedule_can_be_pickled() -> None:
    for name in SCHEDULES:
        settings = {} if name == "constant" else {"warmup_steps": 3, "total_steps": 9, **NEEDED.get(name, {})}
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
