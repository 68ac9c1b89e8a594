"""Everything wrong with a job, found before any rank is started: in its form, its plan, its parts, and between them.

What only ranks can know (files of other hosts, a model that fails when it runs) they find themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from weft.errors import JobError
from weft.plan.plan import Plan
from weft.training.run.components import Parts, build
from weft.training.run.job import Reading
from weft.training.setup.setup_problems import setup_problems


def require_sound(
    reading: Reading, plan: Plan, *, num_ranks: int, global_batch: int, besides: Sequence[str] = ()
) -> None:
    """Raise one error with all problems of a job under a plan, and those found `besides`."""
    parts, problems = build(reading.job, doubtful=reading.doubtful)
    problems = [*besides, *reading.problems, *problems]
    if "plan" not in reading.doubtful:
        found = setup_problems(
            _model(parts, is_refused=bool(problems)),
            plan,
            loss=parts.loss,
            optimizer=parts.optimizer,
            num_ranks=num_ranks,
            device=torch.device("cpu"),
            global_batch=None if "steps" in reading.doubtful else global_batch,
        )
        problems += [problem for error in found for problem in error.problems]
    if problems:
        raise JobError(problems)


def _model(parts: Parts, *, is_refused: bool) -> nn.Module | None:
    """The model without memory. A user's function is called only for a job that is refused anyway, whose ranks would
    not come to say what is wrong with the model: building it may take long, and each rank does."""
    if parts.make_empty is None or not (is_refused or parts.described is not None):
        return None
    with contextlib.suppress(Exception), torch.device("meta"):
        model = parts.make_empty()
        return model if isinstance(model, nn.Module) else None
    return None
