"""What the jobs of all workers of a run must say alike, besides their plans (`plan/shared_fields.py`).

Tensors and optimizer are compared by the servers. Without these, workers would count samples or steps otherwise, draw
them in another order, or follow another schedule, and nothing would show it. Folders may differ from host to host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import JobError
from weft.plan.shared_fields import differences
from weft.training.run.job import Job

_STEPS = ("total", "global_batch", "seed")


def shared_facts(job: Job) -> dict[str, Any]:
    """The value of each of these fields, by its name in messages."""
    return {
        f"[model] {job.model.key}": job.model.name,
        "[model] loss": job.loss,
        "[dataset] name": job.dataset.name,
        "[optimizer] name": job.optimizer.name,
        "[optimizer] schedule": job.schedule.name,
        **{f"[optimizer] {name}": value for name, value in job.schedule.settings.items()},
        **{f"[steps] {name}": getattr(job.steps, name) for name in _STEPS},
    }


def require_same_job(job: Job, described: Mapping[str, Any]) -> None:
    """Raise with what differs from the run that is joined; `described`: what that says of itself."""
    if found := differences(shared_facts(job), described):
        raise JobError(found)
