"""What a refusal is: a combination that has no sound meaning, or none yet, with the reason and the way out.

Each is declared once, in `rules.py` if a plan decides it by itself and in `model_refusals.py` if it takes a kind of
model, batch or machine. The code that refuses fills the sentences in, and docs/refusals.md is a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weft.plan.plan import SECTIONS, Plan, said

Values = Mapping[str, object]
"""What is filled in, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination that is refused. In its sentences {section.field} is that field of the plan with its value, and any
    other name in braces is filled in by whoever refuses."""

    combination: str
    """In a few words, for the table."""
    why: str
    remedy: str

    def message(self, plan: Plan | None = None, /, **values: object) -> str:
        """What is wrong and what to do; with a plan where the sentences name its fields in braces."""
        fields = {} if plan is None else {section: _Said(plan, section) for section in SECTIONS}
        return f"{self.why}; {self.remedy}".format(**fields, **values)


class _Said:
    """A section of a plan, whose fields are what messages say of them."""

    def __init__(self, plan: Plan, section: str) -> None:
        self._plan, self._section = plan, section

    def __getattr__(self, field: str) -> str:
        return said(self._plan, f"{self._section}.{field}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What is known of the optimizer."""

    name: str | None = None
    """Of its class."""
    elementwise: bool = True
    """Whether it treats each element by itself."""

    @property
    def values(self) -> Values:
        return {"optimizer": self.name or "this optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Refusal):
    """A refusal that a plan, with an optimizer, decides by itself."""

    broken: Callable[[Plan, Optimizer], Values | None]
    """What to fill in where a plan breaks the rule, None where it does not."""

    def problems(self, plan: Plan, optimizer: Optimizer | None = None) -> Iterator[str]:
        values = self.broken(plan, optimizer or Optimizer())
        if values is not None:
            yield self.message(plan, **values)


def values_if(is_broken: bool, **values: object) -> Values | None:
    """The answer of a rule in one line."""
    return values if is_broken else None
