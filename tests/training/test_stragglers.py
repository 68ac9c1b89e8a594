"""Who is slow, since when, and what it cost: found from times alone."""

from __future__ import annotations

from weft.training.stragglers import FEWEST_SLOW_STEPS, WARN_AFTER_STEPS, StragglerWatch
from weft.units import format_seconds


def watch_steps(watch: StragglerWatch, times_s: list[float], num_steps: int, first: int = 1) -> list[tuple[int, str]]:
    """The warnings of steps of 8 samples on each rank."""
    samples = [8.0] * len(times_s)
    return [(step, text) for step in range(first, first + num_steps) for text in watch.add(step, times_s, samples)]


def test_a_slow_rank_is_warned_of_once_and_its_recovery_too() -> None:
    watch = StragglerWatch([0, 1, 6, 7])
    assert watch_steps(watch, [1, 1.1, 1, 0.9], 10) == []
    assert watch.now is None and watch.worst is None
    [(step, text)] = watch_steps(watch, [1, 1.1, 3, 0.9], 60, first=11)
    # it is slow once most of the last steps were, and warned of 20 steps later
    assert step == 13 + WARN_AFTER_STEPS - 1
    assert text.startswith("rank 6 takes 3.0 times as long as the median rank for the same number of samples, since")
    waited = format_seconds(WARN_AFTER_STEPS * (24.0 - 8.0))  # 3 s per sample against 1, on 8 samples
    assert f"since step 13; the others have waited {waited} for it so far" in text
    assert watch.now is not None and (watch.now.rank, watch.now.since_step) == (6, 13)
    assert watch.now.cost_s == 58 * (24.0 - 8.0)
    assert watch_steps(watch, [1, 1.1, 1.2, 0.9], 10, first=71) == [], "not yet, or it would be told again and again"
    [(step, text)] = watch_steps(watch, [1, 1.1, 1.1, 0.9], 30, first=81)
    assert step == 83 and text.startswith("rank 6 has recovered at step 83: it takes 1.1 times as long")
    assert watch.now is None
    assert watch.worst is not None and (watch.worst.rank, watch.worst.since_step) == (6, 13)


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    watch = StragglerWatch([0, 1])
    assert [step for step, _ in watch_steps(watch, [2.0, 1.0], 40)] == [3 + WARN_AFTER_STEPS - 1]
    assert watch.now is not None and watch.now.rank == 0 and watch.now.factor == 2.0


def test_one_and_a_half_times_is_slow_and_less_is_not() -> None:
    for factor, is_slow in ((1.49, False), (1.5, True)):
        watch = StragglerWatch([0, 1, 2])
        assert bool(watch_steps(watch, [1, factor, 1], 40)) == is_slow


def test_single_slow_steps_are_nothing() -> None:
    watch = StragglerWatch([0, 1])
    for step in range(1, 200):
        assert watch.add(step, [1.0, 9.0 if step % 3 == 0 else 1.0], [1, 1]) == []
    assert watch.worst is None


def test_a_short_time_is_not_worth_a_word() -> None:
    watch = StragglerWatch([0, 1])
    watch_steps(watch, [1, 1], 5)
    watch_steps(watch, [1, 3], FEWEST_SLOW_STEPS, first=6)
    assert watch.now is None
    watch_steps(watch, [1, 1], 10, first=6 + FEWEST_SLOW_STEPS)
    # of the last five steps, most are slow for as many steps as there were slow ones
    assert watch.worst is not None and watch.worst.num_steps == FEWEST_SLOW_STEPS


def test_a_rank_that_was_given_fewer_samples_costs_less() -> None:
    watch = StragglerWatch([0, 1])
    for step in range(1, 12):
        watch.add(step, [1.0, 3.0], [12.0, 4.0])
    assert watch.now is not None and watch.now.factor == 3.0 and watch.now.cost_s == 0.0


def test_the_costliest_of_several_is_named() -> None:
    watch = StragglerWatch([0, 1, 2, 3, 4])
    watch_steps(watch, [1, 2, 1, 4, 1], 30)
    assert watch.worst is not None and watch.worst.rank == 3


def test_unknown_times_are_left_out() -> None:
    watch = StragglerWatch([0, 1])
    for step in range(1, 60):
        assert watch.add(step, [0.0, 1.0], [1, 1]) == []
    assert StragglerWatch([3]).add(1, [1.0], [1]) == []
