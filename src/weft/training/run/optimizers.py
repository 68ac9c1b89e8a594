"""The optimizer and the learning-rate schedule that a job names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn

from weft.errors import JobError, nearest
from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.schedule import SCHEDULES, Schedule, batch_scaling, scaled
from weft.plan.fields import statement, toml
from weft.training.parallelize import ParameterGroups
from weft.training.run.imports import load_function, setting_problems
from weft.training.run.job import EXCLUDE_ONE_DIM, Job, Part

_OWN: dict[str, type[torch.optim.Optimizer]] = {"lamb": LAMB, "lars": LARS}


def make_optimizer(part: Part) -> Callable[..., torch.optim.Optimizer]:
    """What makes the named optimizer from parameters."""
    if ":" in part.name:
        return functools.partial(load_function(part.name), **part.settings)
    known = _OWN | {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if part.name not in known:
        raise JobError(f'[optimizer] name = "{part.name}" is not known; {nearest(part.name, known)}')
    kind, settings = known[part.name], dict(part.settings)
    if part.name in _OWN:
        _take_exclusion(settings)
    elif "fused" in inspect.signature(kind).parameters:  # three times faster than the loop on CPUs
        settings.setdefault("fused", True)
    if problems := setting_problems(kind, {"params": (), **settings}, "[optimizer]"):
        raise JobError(problems)
    try:
        kind([nn.Parameter(torch.zeros(1))], **settings)  # torch checks values when an optimizer is built
    except JobError as error:
        raise JobError([f"[optimizer] {problem}" for problem in error.problems]) from error
    except Exception as error:  # of any type, caused by the settings
        raise JobError(f"[optimizer] {kind.__name__}: {error}") from error
    return functools.partial(kind, **settings)


def make_groups(job: Job) -> ParameterGroups | None:
    """LARS and LAMB leave biases and norms alone, unless the job says otherwise."""
    if job.optimizer.name not in _OWN or not _take_exclusion(dict(job.optimizer.settings)):
        return None
    return exclude_one_dim


def make_schedule(job: Job) -> Schedule:
    """The schedule, with the factor of the batch's growth in it."""
    name, settings = job.schedule.name, dict(job.schedule.settings)
    if name not in SCHEDULES:
        raise JobError(f'there is no learning-rate schedule "{name}"; {nearest(name, SCHEDULES)}')
    problems: list[str] = []
    factor = 1.0
    rule, base_batch = (settings.pop(key, None) for key in ("batch_scaling", "base_batch"))
    if rule is not None and base_batch is not None:
        try:
            factor = batch_scaling(rule, global_batch=job.steps.global_batch, base_batch=base_batch)
        except JobError as error:
            problems += [f"[optimizer] {problem}" for problem in error.problems]
    elif rule is not None:
        problems.append(
            f"[optimizer] batch_scaling = {toml(rule)} needs base_batch: the number of samples per step that lr was "
            "found with"
        )
    elif base_batch is not None:
        problems.append(
            f"[optimizer] base_batch = {toml(base_batch)} has no effect without batch_scaling; set batch_scaling to "
            '"linear" or "sqrt", or leave it out'
        )
    if name != "constant":
        settings = {"warmup_steps": 0, **settings, "total_steps": job.steps.total}
    problems += setting_problems(SCHEDULES[name], settings, f'schedule "{name}"')
    if problems:
        raise JobError(problems)
    schedule = SCHEDULES[name](**settings)
    return schedule if rule is None else scaled(schedule, factor)


def _take_exclusion(settings: dict[str, object]) -> bool:
    value = settings.pop(EXCLUDE_ONE_DIM, True)
    if not isinstance(value, bool):
        raise JobError(f"{statement('optimizer', EXCLUDE_ONE_DIM, value)} must be true or false")
    return value
