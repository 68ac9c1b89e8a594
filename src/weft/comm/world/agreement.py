"""What ranks must have in common before they exchange anything: the versions of weft and torch, and the plan.

Ranks that differ would wait for each other in different exchanges. All ranks read what all ranks said, so that all
of them refuse alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

import torch

from weft.errors import LaunchError, PlanError
from weft.plan.fields import facts_of, statement
from weft.plan.plan import SECTIONS, Plan
from weft.plan.text import parse_plan
from weft.units import name_ranks


def own_versions() -> dict[str, str]:
    """The versions of this process that must be the same on all ranks."""
    return {"weft": _version("weft"), "torch": str(torch.__version__)}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from its source
        return "unknown"


def require_same_versions(versions: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks with different versions; `versions`: of each rank, by package."""
    problems = []
    for package in own_versions():
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(versions):
            ranks.setdefault(one.get(package, "an older one"), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{name_ranks(some)}: {version}" for version, some in ranks.items())
            problems.append(f"ranks have different versions of {package} ({found}); install the same on every host")
    if problems:
        raise LaunchError(problems)


def require_same_plans(plans: Sequence[str]) -> None:
    """Refuse ranks that were given different plans; `plans`: the text of each rank's, empty where it has none yet."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(plans):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) < 2:
        return
    known = {text: parse_plan(text) for text in ranks}
    differing = []
    for section, kind in SECTIONS.items():
        for name in facts_of(kind):
            values = {text: _value(plan, section, name) for text, plan in known.items()}
            if len(set(values.values())) > 1:
                said: dict[object, list[int]] = {}
                for text, value in values.items():
                    said.setdefault(value, []).extend(ranks[text])
                differing.append(
                    "; ".join(f"{name_ranks(some)}: {statement(section, name, value)}" for value, some in said.items())
                )
    raise PlanError(f"ranks were given different plans ({', and '.join(differing)}); give every rank the same one")


def _value(plan: Plan, section: str, name: str) -> object:
    return getattr(getattr(plan, section), name)
