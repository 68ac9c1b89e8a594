"""Reads and writes plan.toml, with an exact round trip.

Reading uses tomllib; writing is done here, because the standard library has no writer and a plan needs only flat
tables. A text is refused with all its problems at once. Whether a plan can *run* is checked in `check.py`, not here, so
that a plan for another cluster can be read, drawn and simulated.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from weft.errors import PlanError, WeftError, nearest
from weft.plan.fields import accept_values, facts_of, statement, toml
from weft.plan.plan import SECTIONS, Plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file."""
    return parse_plan(read_text(path, kind=PlanError), source=os.fspath(path))


def as_plan(given: object) -> Plan:
    """A plan that was given as itself, or as the path of its file."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | os.PathLike):
        return read_plan(given)
    raise PlanError(f"the plan is a {type(given).__name__}; give a weft.Plan, or the path of a plan file")


def read_text(path: str | os.PathLike[str], *, kind: type[WeftError]) -> str:
    """The content of a text file; an error of this kind if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise kind(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{os.fspath(path)}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from error


def parse_toml(text: str, *, source: str, kind: type[WeftError]) -> dict[str, Any]:
    """The tables of a TOML text; an error of this kind if it is not valid."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # huge numbers and deep nesting raise no TOMLDecodeError
        raise kind(f"{source}: is not valid TOML: {error}") from error


def parse_plan(text: str, *, source: str = "plan") -> Plan:
    """The plan in a text; `source` names it in messages."""
    tables = parse_toml(text, source=source, kind=PlanError)
    problems: list[str] = []
    for name, table in tables.items():
        if name not in SECTIONS:
            problems.append(_unknown_section(name, table))
        elif not isinstance(table, dict):
            problems.append(f"{name} must be a section: write [{name}], and its fields on the lines below")
        else:
            problems += accept_values(SECTIONS[name], table, SECTIONS)[1]
    if problems:
        raise PlanError([f"{source}: {problem}" for problem in problems])
    sections: dict[str, Any] = {name: SECTIONS[name](**table) for name, table in tables.items()}
    return Plan(**sections)


def _unknown_section(name: str, table: object) -> str:
    if isinstance(table, dict):
        return f"[{name}] is not a section of a plan; {nearest(name, SECTIONS)}"
    homes = [section for section in SECTIONS if name in facts_of(SECTIONS[section])]
    hint = f"put it under [{homes[0]}]" if homes else "put each field under its section"
    return f"{statement('', name, table).removeprefix('[] ')} stands outside any section; {hint}"


def format_plan(plan: Plan) -> str:
    """The plan as text: the data axis, and all fields that differ from their defaults."""
    blocks: list[str] = []
    for name, section in SECTIONS.items():
        values = {field: getattr(getattr(plan, name), field) for field in facts_of(section)}
        lines = [
            f"{field} = {toml(values[field])}"
            for field, facts in facts_of(section).items()
            if values[field] != facts.default or (name, field) == ("axes", "data")
        ]
        if lines:
            blocks.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(blocks)


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to a file atomically."""
    write_text(path, format_plan(plan), kind=PlanError)


def write_text(path: str | os.PathLike[str], text: str, *, kind: type[WeftError]) -> None:
    """Write a text file atomically: under a temporary name, which is then renamed."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise kind(f"{target}: cannot be written: {error.strerror or error}") from error
