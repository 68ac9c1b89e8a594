"""cluster.toml <-> Cluster, with an exact round trip, and the description of its fields for the documentation.

The file is a [cluster] table and lists of tables: [[device]], [[link]], [[timing]], [[compression]]. It is written by
`weft profile` and may be written by hand, so a text is refused with all its problems at once. A field without a
sensible default must be there; which ones these are follows from the declarations, for their defaults are values that
no field accepts.

    python -m weft.profiles.cluster_text       prints the tables of docs/profile.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from weft.errors import ClusterError, nearest
from weft.plan.fields import Flag, Kind, Section, accept_values, facts_of, section_name, statement, toml
from weft.plan.text import parse_toml, read_text, write_text
from weft.profiles.cluster import Cluster, Compression, Device, Link, Text, Timing

LISTS: dict[str, type[Section]] = {section_name(section): section for section in (Device, Link, Timing, Compression)}
_HEAD: dict[str, Kind] = {"name": Text(), "measured": Flag()}


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    return parse_cluster(read_text(path, kind=ClusterError), source=os.fspath(path))


def parse_cluster(text: str, *, source: str = "cluster") -> Cluster:
    """The cluster in a text; `source` names it in messages."""
    tables = parse_toml(text, source=source, kind=ClusterError)
    head = tables.pop("cluster", {})
    problems = ["cluster must be a section: write [cluster], and its fields on the lines below"]
    if isinstance(head, dict):
        problems = _value_problems("cluster", "[cluster]", _HEAD, head)
    for name, rows in tables.items():
        if name not in LISTS:
            problems.append(f"[[{name}]] is not a part of a cluster; {nearest(name, ('cluster', *LISTS))}")
        elif not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            problems.append(f"{name} must be a list of tables: write [[{name}]] above the fields of each")
        else:
            for place, row in enumerate(rows):
                problems += [f"{name} {place}: {problem}" for problem in _row_problems(LISTS[name], row)]
    if not problems:
        made: dict[str, Any] = {
            f"{name}s": tuple(section(**row) for row in tables.get(name, [])) for name, section in LISTS.items()
        }
        try:
            return Cluster(**head, **made)
        except ClusterError as error:
            problems = list(error.problems)
    raise ClusterError([f"{source}: {problem}" for problem in problems])


def format_cluster(cluster: Cluster) -> str:
    """The cluster as text, every field of every part."""
    blocks = [f"[cluster]\nname = {toml(cluster.name)}\nmeasured = {toml(cluster.measured)}\n"]
    for name, section in LISTS.items():
        for row in getattr(cluster, f"{name}s"):
            lines = (f"{field} = {toml(getattr(row, field))}" for field in facts_of(section))
            blocks.append("\n".join([f"[[{name}]]", *lines]) + "\n")
    return "\n".join(blocks)


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write the cluster to a file, whole or not at all."""
    write_text(path, format_cluster(cluster), kind=ClusterError)


def _row_problems(section: type[Section], row: dict[str, Any]) -> list[str]:
    name, facts = section_name(section), facts_of(section)
    return _value_problems(name, f"[[{name}]]", {each.name: each.kind for each in facts.values()}, row) + [
        f"{each.name} is missing; give {each.kind.allowed}"
        for each in facts.values()
        if each.name not in row and accept_values(section, {each.name: each.default})[1]
    ]


def _value_problems(name: str, table: str, kinds: Mapping[str, Kind], values: dict[str, Any]) -> list[str]:
    problems = []
    for field, value in values.items():
        if field not in kinds:
            problems.append(f"{statement(name, field, value)} is not a field of {table}; {nearest(field, kinds)}")
            continue
        try:
            kinds[field].accept(value)
        except ValueError as error:
            problems.append(f"{statement(name, field, value)} {error}")
    return problems
