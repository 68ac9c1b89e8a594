"""Declarations of fields: default, allowed values and meaning, stated once.

Validation, `plan.toml`, the reference page and command-line help all read the same declaration. A *kind* accepts and
normalises values, and describes them in words. A `Section` validates itself on creation. The sections and fields of the
plan are in `plan.py`; this file knows none of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Protocol, TypeVar, cast

from weft.errors import PlanError, WeftError, nearest

Value = TypeVar("Value")

# TOML guarantees 64-bit integers only.
_LARGEST_WHOLE = 2**63 - 1
_LONGEST_SHOWN = 80


class Kind(Protocol):
    """The values that a field takes."""

    @property
    def allowed(self) -> str:
        """The values in words, after "must be"."""

    def accept(self, value: object) -> object:
        """The value in its normal form; ValueError with the end of the sentence "[section] field = value ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Whole numbers from `minimum`, or words that stand for one."""

    minimum: int
    words: tuple[str, ...] = ()
    hint: str = ""
    """What to write instead of a number that is too small."""
    among: tuple[int, ...] = ()
    """The only numbers that are taken, if there are few."""

    @property
    def allowed(self) -> str:
        if self.among:
            return one_of(self.among)
        number = f"a whole number, at least {self.minimum}"
        return f"{number}, or {one_of(self.words)}" if self.words else number

    def accept(self, value: object) -> object:
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < self.minimum:
            raise ValueError(f"must be {self.allowed}{self.hint and '; '}{self.hint}")
        if self.among and value not in self.among:
            raise ValueError(f"must be {self.allowed}")
        if value > _LARGEST_WHOLE:
            raise ValueError(f"is too large; the largest whole number is {_LARGEST_WHOLE}")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Finite numbers between bounds; `above` and `below` are exclusive."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def allowed(self) -> str:
        bounds = (("above", self.above), ("at least", self.minimum), ("below", self.below), ("at most", self.maximum))
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        return f"a number, {words}" if words else "a number"

    def accept(self, value: object) -> object:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"is not finite; it must be {self.allowed}")
        bounds = ((ge, self.minimum), (le, self.maximum), (gt, self.above), (lt, self.below))
        if not all(bound is None or holds(number, bound) for holds, bound in bounds):
            raise ValueError(f"must be {self.allowed}")
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    @property
    def allowed(self) -> str:
        return "true or false"

    def accept(self, value: object) -> object:
        if not isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return one_of(self.values)

    def accept(self, value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f"must be {self.allowed}")
        if value not in self.values:
            raise ValueError(f"is not a known value; {nearest(value, self.values)}")
        return self.values[self.values.index(value)]


@dataclass(frozen=True, slots=True)
class Permutation:
    """All of a few words, each once, in any order."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"a list that names each of {', '.join(self.values)} once"

    def accept(self, value: object) -> object:
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"must be {self.allowed}")
        if unknown := [word for word in value if word not in self.values]:
            raise ValueError(f"names {toml(unknown[0])}, which is not known; {nearest(unknown[0], self.values)}")
        if missing := [word for word in self.values if word not in value]:
            raise ValueError(f"must be {self.allowed}; add {', '.join(missing)}")
        if repeated := sorted({word for word in value if value.count(word) > 1}):
            raise ValueError(f"must be {self.allowed}; repeated: {', '.join(repeated)}")
        return tuple(map(str, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Increasing:
    """A list of whole numbers from `minimum`, each greater than the one before; may be empty."""

    minimum: int

    @property
    def allowed(self) -> str:
        return f"a list of increasing whole numbers, each at least {self.minimum}"

    def accept(self, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be {self.allowed}")
        try:
            numbers = [cast(int, Whole(minimum=self.minimum).accept(number)) for number in value]
        except ValueError:
            raise ValueError(f"must be {self.allowed}") from None
        if any(left >= right for left, right in pairwise(numbers)):
            raise ValueError(f"must be {self.allowed}")
        return tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The declaration of one field: its name, default, kind, and a sentence about it."""

    name: str
    default: object
    kind: Kind
    doc: str


def declare(default: Value, kind: Kind, doc: str) -> Value:
    """A dataclass field with its kind and sentence."""
    # The dataclass puts the default in the field's place, so the annotation is true of every instance.
    return dataclasses.field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table of the plan. Its docstring heads its part of the reference page."""

    error: ClassVar[type[WeftError]] = PlanError

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        accepted, problems = accept_values(type(self), given)
        if problems:
            raise self.error(problems)
        for name, value in accepted.items():
            object.__setattr__(self, name, value)


def section_name(section: type[Section]) -> str:
    """The name of a section in plan.toml."""
    return section.__name__.lower()


def facts_of(section: type[Section]) -> Mapping[str, Facts]:
    """The section's fields in order, by name."""
    return _facts_of(cast(Any, section))  # mypy does not see that a class is hashable


@functools.cache  # a search for a plan makes and checks thousands
def _facts_of(section: Any) -> Mapping[str, Facts]:
    return {
        field.name: Facts(name=field.name, default=field.default, **field.metadata)
        for field in dataclasses.fields(section)
    }


def accept_values(
    section: type[Section], values: Mapping[str, object], others: Mapping[str, type[Section]] | None = None
) -> tuple[dict[str, object], list[str]]:
    """The acceptable values in normal form, and a problem for each bad value and each unknown name.

    If there is no problem, `section(**values)` works. `others`: sections that an unknown name may belong to.
    """
    facts, title = facts_of(section), section_name(section)
    accepted: dict[str, object] = {}
    problems: list[str] = []
    for name, value in values.items():
        if name not in facts:
            elsewhere = [other for other, fields in (others or {}).items() if name in facts_of(fields)]
            hint = f"it belongs in [{elsewhere[0]}]" if elsewhere else nearest(name, facts)
            problems.append(f"{statement(title, name, value)} is not a field of [{title}]; {hint}")
            continue
        try:
            accepted[name] = facts[name].kind.accept(value)
        except ValueError as error:
            problems.append(f"{statement(title, name, value)} {error}")
    return accepted, problems


def toml(value: object) -> str:
    """A value as plan.toml writes it; its Python form if TOML has none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(name)} = {toml(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def toml_key(name: str) -> str:
    """A name as TOML writes it left of an equals sign."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def one_of(values: tuple[object, ...]) -> str:
    """Values in words, the last after "or"."""
    *first, last = map(toml, values)
    return f"{', '.join(first)} or {last}" if first else last


def statement(section: str, name: str, value: object) -> str:
    """A field and its value as messages name them; a very long value is truncated."""
    try:
        text = toml(value)
    except ValueError:
        text = "(too long to print)"
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[:_LONGEST_SHOWN]}…"
    return f"[{section}] {name} = {text}"
