"""What the plans of all workers of a run must say alike: whoever joins a run compares its own plan with the run's.

The rest of a plan is each worker's own affair: how it compiles, recomputes, or divides a batch into microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.plan.fields import facts_of, toml
from weft.plan.plan import SECTIONS, Plan, value_at

_SECTIONS = ("axes", "server", "codec", "precision")
_FIELDS = ("data.sync", "step.clip_norm", "comm.bucket_bytes")


def shared_fields(plan: Plan) -> dict[str, Any]:
    """The value of each of these fields, by its name in messages, as JSON gives it back."""
    paths = [f"{section}.{name}" for section in _SECTIONS for name in facts_of(SECTIONS[section])] + list(_FIELDS)
    return {_named(path): _plain(value_at(plan, path)) for path in paths}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What is another value here than in the run that is to be joined, in words; `theirs` may lack fields."""
    return [
        f"{name} is {toml(value)} here and {toml(theirs[name])} in the run that is to be joined; start with the same "
        "plan and job"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]


def _named(path: str) -> str:
    section, name = path.split(".")
    return f"[{section}] {name}"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
