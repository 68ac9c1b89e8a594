"""Refusals: combinations that have no sound meaning, or none yet, each with the reason and a remedy.

Each is declared once, in `rules.py` if it depends on the plan alone and in `model_refusals.py` if it needs a kind of
model, batch or machine. The code that refuses fills in the sentences, and docs/refusals.md is a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weft.plan.fields import toml
from weft.plan.plan import SECTIONS, Plan, said, value_at


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
        fields = {} if plan is None else {section: _Section(plan, section) for section in SECTIONS}
        return f"{self.why}; {self.remedy}".format(**fields, **values)


class _Section:
    """A section of a plan whose fields are their texts in a message."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name

    def __getattr__(self, field: str) -> _Field:
        return _Field(self._plan, f"{self._name}.{field}")


class _Field:
    def __init__(self, plan: Plan, path: str) -> None:
        self._plan, self._path = plan, path

    def __format__(self, spec: str) -> str:
        return toml(value_at(self._plan, self._path)) if spec == "value" else said(self._plan, self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The known properties of an optimizer."""

    name: str | None = None
    """Name of its class."""
    elementwise: bool = True
    """True if it updates each element independently of the others."""


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
