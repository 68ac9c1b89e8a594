"""Learning-rate schedules: functions from the step (counted from 0) to a factor of the learning rate.

A schedule is a pure function of the step, so that a resumed run needs only its step number and every rank computes the
same factor. All can be pickled, and are therefore partial functions, not closures.

With w warm-up steps of n in all, the factor runs through these points, joined by a line and then by the curve:

    step      0 ...... w-1 .............. n-1 ......
    factor   1/w ....   1  .. curve .... final  final

The first step already learns (1/w, not 0), step w-1 has the full rate, and the last step has the final factor. The
curves, where x goes from 0 to 1 between step w-1 and step n-1:

    cosine        half a cosine
    linear        1 - x
    polynomial    (1 - x)^power
    stable-decay  1, then a line down over the last `decay_steps`
    step          1, times `drop_factor` from each step of `drops` on
    constant      1
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from weft.errors import JobError, nearest

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """The full rate throughout."""
    return _always_one


def warmup_constant(warmup_steps: int, total_steps: int) -> Schedule:
    """A linear rise over the warm-up, then the full rate."""
    _check(warmup_steps, total_steps, 0.0)
    return partial(_factor, curve=_flat, warmup_steps=warmup_steps, total_steps=total_steps)


def warmup_cosine(warmup_steps: int, total_steps: int, final: float = 0.1) -> Schedule:
    """A linear rise over the warm-up, then half a cosine down to `final` at the last step."""
    _check(warmup_steps, total_steps, final)
    curve = partial(_cosine, final=final)
    return partial(_factor, curve=curve, warmup_steps=warmup_steps, total_steps=total_steps)


def warmup_linear(warmup_steps: int, total_steps: int, final: float = 0.1) -> Schedule:
    """A linear rise over the warm-up, then a straight line down to `final` at the last step."""
    return warmup_polynomial(warmup_steps, total_steps, final, power=1.0)


def warmup_polynomial(warmup_steps: int, total_steps: int, final: float = 0.0, power: float = 2.0) -> Schedule:
    """A linear rise over the warm-up, then a power of the steps that are left, down to `final` at the last step."""
    problems = [] if _is_number(power) and power > 0 else [f"power is {power!r}; give a number above 0, such as 2"]
    _check(warmup_steps, total_steps, final, problems)
    curve = partial(_polynomial, final=final, power=power)
    return partial(_factor, curve=curve, warmup_steps=warmup_steps, total_steps=total_steps)


def warmup_stable_decay(warmup_steps: int, total_steps: int, decay_steps: int, final: float = 0.0) -> Schedule:
    """A linear rise over the warm-up, the full rate, then a straight line down to `final` over the last steps."""
    problems = _not_whole("decay_steps", decay_steps)
    if not problems and decay_steps < 1:
        problems = [f"decay_steps is {decay_steps}; give 1 or more, or use a schedule without a decay"]
    if not problems and not _not_whole("", warmup_steps) and not _not_whole("", total_steps):
        if warmup_steps + decay_steps > total_steps > warmup_steps:
            problems = [
                f"warmup_steps {warmup_steps} and decay_steps {decay_steps} are more than the {total_steps} steps in "
                "all; give fewer of them or more steps"
            ]
    _check(warmup_steps, total_steps, final, problems)
    length = total_steps - warmup_steps
    curve = partial(_stable_decay, final=final, decaying=decay_steps / length)
    return partial(_factor, curve=curve, warmup_steps=warmup_steps, total_steps=total_steps)


def warmup_step(warmup_steps: int, total_steps: int, drops: Sequence[int], drop_factor: float = 0.1) -> Schedule:
    """A linear rise over the warm-up, then the full rate, multiplied by `drop_factor` from each step of `drops` on."""
    problems = []
    if not isinstance(drops, list | tuple) or not drops or any(_not_whole("", one) for one in drops):
        problems.append(f"drops is {drops!r}; list the steps from which the rate is lower, such as [1000, 2000]")
    elif list(drops) != sorted(set(drops)):
        problems.append(f"drops is {list(drops)}; list the steps in order, each once")
    elif not _not_whole("", warmup_steps) and not _not_whole("", total_steps):
        if not warmup_steps <= drops[0] or not drops[-1] < total_steps:
            problems.append(
                f"drops is {list(drops)}; give steps after the warm-up of {warmup_steps} and below the {total_steps} "
                "steps in all"
            )
    if not _is_number(drop_factor) or not 0 < drop_factor < 1:
        problems.append(f"drop_factor is {drop_factor!r}; give a number between 0 and 1")
    _check(warmup_steps, total_steps, 0.0, problems)
    return partial(_steps, warmup_steps=warmup_steps, drops=tuple(drops), drop_factor=drop_factor)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "warmup-constant": warmup_constant,
    "warmup-cosine": warmup_cosine,
    "warmup-linear": warmup_linear,
    "warmup-polynomial": warmup_polynomial,
    "warmup-stable-decay": warmup_stable_decay,
    "warmup-step": warmup_step,
}
"""The schedules by their names in job files."""

BATCH_SCALINGS = {"linear": 1.0, "sqrt": 0.5}
"""The rules of batch scaling, and the power of the batch's growth that each multiplies the rate by."""


def batch_scaling(rule: Literal["linear", "sqrt"], *, global_batch: int, base_batch: int) -> float:
    """The factor of a learning rate that was found with `base_batch` samples per step, for `global_batch` of them.

    "linear" is usual for SGD and LARS, "sqrt" for Adam and LAMB.
    """
    problems = []
    if rule not in BATCH_SCALINGS:
        problems.append(f"batch_scaling is {rule!r}; {nearest(str(rule), BATCH_SCALINGS)}")
    for name, size in (("global_batch", global_batch), ("base_batch", base_batch)):
        problems += _not_whole(name, size) or ([f"{name} is {size}; give 1 or more samples"] if size < 1 else [])
    if problems:
        raise JobError(problems)
    return float((global_batch / base_batch) ** BATCH_SCALINGS[rule])


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with every rate multiplied by a factor, such as that of `batch_scaling`."""
    return partial(_scaled, schedule=schedule, factor=factor)


def _check(warmup_steps: int, total_steps: int, final: float, problems: Sequence[str] = ()) -> None:
    """Refuse settings without a meaning; `problems` are those that the caller found."""
    found = [*_not_whole("warmup_steps", warmup_steps), *_not_whole("total_steps", total_steps)]
    is_whole = not found
    if not _is_number(final) or not 0 <= final <= 1:
        found.append(f"final is {final!r}; give the factor of the last step, from 0 to 1")
    if is_whole:
        if warmup_steps < 0:
            found.append(f"warmup_steps is {warmup_steps}; give 0 for none")
        if total_steps <= warmup_steps:
            found.append(
                f"total_steps is {total_steps} and warmup_steps {warmup_steps}: nothing is left after the warm-up; "
                f"give fewer than {total_steps} warm-up steps or more steps in all"
            )
    if found or problems:
        raise JobError([*found, *problems])


def _not_whole(name: str, steps: Any) -> list[str]:
    is_whole = isinstance(steps, int) and not isinstance(steps, bool)
    return (
        [] if is_whole else [f"{name} is {steps!r}; give a whole number of {'samples' if 'batch' in name else 'steps'}"]
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _always_one(step: int) -> float:
    return 1.0


def _factor(step: int, *, curve: Callable[[float], float], warmup_steps: int, total_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return curve(min(1.0, (step + 1 - warmup_steps) / (total_steps - warmup_steps)))


def _steps(step: int, *, warmup_steps: int, drops: tuple[int, ...], drop_factor: float) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return float(drop_factor ** bisect.bisect_right(drops, step))


def _scaled(step: int, *, schedule: Schedule, factor: float) -> float:
    return factor * schedule(step)


def _flat(done: float) -> float:
    return 1.0


def _cosine(done: float, *, final: float) -> float:
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def _polynomial(done: float, *, final: float, power: float) -> float:
    return float(final + (1 - final) * (1 - done) ** power)


def _stable_decay(done: float, *, final: float, decaying: float) -> float:
    return 1 - (1 - final) * max(0.0, 1 - (1 - done) / decaying)
