"""Refusals: combinations that have no sound meaning, or none yet, each with the reason and a remedy.

Each is declared once, in `rules.py` if it depends on the plan alone and in `model_refusals.py` if it needs a kind of
model, batch or machine. The code that refuses fills in the sentences, and docs/refusals.md is a table of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weft.plan.fields import toml
from weft.plan.plan import Plan, said, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination that is refused.

    In its sentences `{section.field}` is a field of the plan as `[section] field = value`, `{section.field:value}` is
    its value alone, and the caller fills in any other name in braces.
    """

    combination: str
    """A short description for the table."""
    why: str
    remedy: str

    def message(self, plan: Plan | None = None, /, **values: object) -> str:
        """The reason and the remedy, filled in; needs the plan if the sentences refer to its fields."""
        text = f"{self.why}; {self.remedy}"
        if plan is not None:
            text = re.sub(r"\{(\w+\.\w+)\}", lambda field: said(plan, field[1]), text)
            text = re.sub(r"\{(\w+\.\w+):value\}", lambda field: toml(value_at(plan, field[1])), text)
        return text.format(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The known properties of an optimizer."""

    name: str | None = None
    """Name of its class."""
    elementwise: bool = True
    """True if it updates each element independently of the others, or is told the norms of whole tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Refusal):
    """A refusal that depends on the plan and the optimizer alone."""

    broken: Callable[[Plan, Optimizer], bool | Mapping[str, object]]
    """True, or the values to fill in besides `optimizer`, if a plan breaks the rule."""

    def problems(self, plan: Plan, optimizer: Optimizer | None = None) -> Iterator[str]:
        optimizer = optimizer or Optimizer()
        if found := self.broken(plan, optimizer):
            values = found if isinstance(found, Mapping) else {}
            yield self.message(plan, optimizer=optimizer.name or "this optimizer", **values)
