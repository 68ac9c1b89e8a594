"""Learning-rate schedules: functions from the step (counted from 0) to a factor of the learning rate.

A schedule is a pure function of the step, so that a resumed run needs only its step number and every rank computes the
same factor. All can be pickled, and are therefore partial functions, not closures.

With w warm-up steps of n in all, the factor runs through these points, joined by a line and then by the curve:

    step      0 ...... w-1 .............. n-1 ......
    factor   1/w ....   1  .. curve .... final  final

The first step already learns (1/w, not 0), step w-1 has the full rate, and the last step has the final factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from weft.errors import JobError

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """The full rate throughout."""
    return _always_one


def warmup_cosine(warmup_steps: int, total_steps: int, final: float = 0.1) -> Schedule:
    """A linear rise over the warm-up, then half a cosine down to `final` at the last step."""
    _check(warmup_steps, total_steps, final)
    return partial(_factor, curve="cosine", warmup_steps=warmup_steps, total_steps=total_steps, final=final)


def warmup_linear(warmup_steps: int, total_steps: int, final: float = 0.1) -> Schedule:
    """A linear rise over the warm-up, then a straight line down to `final` at the last step."""
    _check(warmup_steps, total_steps, final)
    return partial(_factor, curve="linear", warmup_steps=warmup_steps, total_steps=total_steps, final=final)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "warmup-cosine": warmup_cosine,
    "warmup-linear": warmup_linear,
}
"""The schedules by their names in job files."""


def _check(warmup_steps: int, total_steps: int, final: float) -> None:
    problems = []
    for name, steps in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        if isinstance(steps, bool) or not isinstance(steps, int):
            problems.append(f"{name} is {steps!r}; give a whole number of steps")
    if isinstance(final, bool) or not isinstance(final, int | float) or not 0 <= final <= 1:
        problems.append(f"final is {final!r}; give the factor of the last step, from 0 to 1")
    if not problems:
        if warmup_steps < 0:
            problems.append(f"warmup_steps is {warmup_steps}; give 0 for none")
        if total_steps <= warmup_steps:
            problems.append(
                f"total_steps is {total_steps} and warmup_steps {warmup_steps}: nothing is left after the warm-up; "
                f"give fewer than {total_steps} warm-up steps or more steps in all"
            )
    if problems:
        raise JobError(problems)


def _always_one(step: int) -> float:
    return 1.0


def _factor(step: int, *, curve: str, warmup_steps: int, total_steps: int, final: float) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step + 1 - warmup_steps) / (total_steps - warmup_steps))
    if curve == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    return 1 - (1 - final) * done
