"""A network from text: the defaults, a preset, a topology file and flags, each overriding the one before.

`docs/lab.md` shows the format of the file. All problems are reported together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from weft.errors import LaunchError, nearest
from weft.lab.network import Host, Network, Route
from weft.lab.quantities import parse_rate, parse_share, parse_time
from weft.plan.fields import Flag, Real
from weft.plan.text import parse_toml, read_text

MAX_HOSTS = 64
DEFAULT_PRESET = "1GbE"
_DEFAULTS: dict[str, object] = {"hosts": 2, "ranks": 1, "jitter": "0ms", "loss": "0%", "compute": 0.0, "mtu": 65000}


def _whole(minimum: int, maximum: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"must be a whole number from {minimum} to {maximum}")
        return value

    return parse


def _members(value: object) -> object:
    whole = isinstance(value, list) and value and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    if value != "all" and not whole:
        raise ValueError('must be "all" or a list of host numbers, like [0, 1]')
    return value


_cores = Real(minimum=0, maximum=1024).accept  # 0: no limit
_Parsers = Mapping[str, Callable[[object], Any]]
_ROUTE_FIELDS = {"delay": "delay_s", "jitter": "jitter_s", "loss": "loss"}
_ROUTE: _Parsers = {"delay": parse_time, "jitter": parse_time, "loss": parse_share}
_GENERAL: _Parsers = {
    "hosts": _whole(1, MAX_HOSTS),
    "ranks": _whole(1, 64),
    "bandwidth": parse_rate,
    **_ROUTE,
    "compute": _cores,
    "mtu": _whole(576, 65000),
}
_HOST: _Parsers = {
    "number": _whole(0, MAX_HOSTS - 1),
    "ranks": _whole(1, 64),
    "bandwidth": parse_rate,
    "upload": parse_rate,
    "download": parse_rate,
    "compute": _cores,
}
_LINK: _Parsers = {"from": _members, "to": _members, "bandwidth": parse_rate, **_ROUTE, "one_way": Flag().accept}


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Named networks, as tables of a topology file; `about` describes each."""
    return tomllib.loads((resources.files("weft.lab") / "presets.toml").read_text("utf-8"))


def make_network(
    *,
    preset: str | None = None,
    topology: str | os.PathLike[str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Network:
    """The network of a preset, a topology file and flags, named as the file's fields; flags win, then the file."""
    problems: list[str] = []
    file: dict[str, Any] = {}
    if topology is not None:
        source = os.fspath(topology)
        file = parse_toml(read_text(topology, kind=LaunchError), source=source, kind=LaunchError)
        if preset is not None:
            problems.append(f'--preset and --topology both describe the network; write preset = "{preset}" in {source}')
        preset = file.pop("preset", preset)
    if preset is not None and preset not in presets():
        problems.append(f'preset "{preset}" is not known; {nearest(str(preset), presets())}')
        preset = None
    base = {name: value for name, value in presets()[preset or DEFAULT_PRESET].items() if name != "about"}
    general = {**_DEFAULTS, **base, **file, **(flags or {})}
    hosts = _tables(general.pop("host", []), "host", _HOST, problems)
    links = _tables(general.pop("link", []), "link", _LINK, problems)
    values = _parse(general, _GENERAL, "", problems)
    network = None if problems else _assemble(values, hosts, links, problems)
    if network is None or problems:
        raise LaunchError([f"{os.fspath(topology)}: {each}" for each in problems] if topology is not None else problems)
    return network


def _parse(table: Mapping[str, object], parsers: _Parsers, where: str, problems: list[str]) -> dict[str, Any]:
    values = {}
    for name, value in table.items():
        if name not in parsers:
            problems.append(f"{where}{name} is not known; {nearest(name, parsers)}")
            continue
        try:
            values[name] = parsers[name](value)
        except ValueError as error:
            shown = f'"{value}"' if isinstance(value, str) else str(value)
            problems.append(f"{where}{name} = {shown} {error}")
    return values


def _tables(tables: object, name: str, parsers: _Parsers, problems: list[str]) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        problems.append(f"{name} must be a table: write [[{name}]], and its fields on the lines below")
        return []
    return [_parse(table, parsers, f"[[{name}]] {index}: ", problems) for index, table in enumerate(tables)]


def _assemble(
    values: dict[str, Any], hosts: list[dict[str, Any]], links: list[dict[str, Any]], problems: list[str]
) -> Network:
    """The network of parsed values; worthless if there are problems."""
    count = values["hosts"]
    known = f"the {count} hosts are numbered 0 to {count - 1}"
    of_host: list[dict[str, Any]] = [{**values} for _ in range(count)]
    for index, table in enumerate(hosts):
        if table.get("number", count) < count:
            of_host[table["number"]].update(table)
        else:
            said = f"number = {table['number']}" if "number" in table else "no number"
            problems.append(f"[[host]] {index}: {said}; {known}")
    routes, trunks = _routes(values, links, known, problems)
    for pair, route in routes.items():
        if route.jitter_s > route.delay_s and not problems:
            problems.append(
                f"jitter {route.jitter_s * 1e3:g} ms is more than the delay of {route.delay_s * 1e3:g} ms from host "
                f"{pair[0]} to {pair[1]}; packets cannot arrive before they are sent"
            )
    return Network(
        hosts=tuple(
            Host(
                ranks=host["ranks"],
                upload_bits_per_s=host.get("upload", host["bandwidth"]),
                download_bits_per_s=host.get("download", host["bandwidth"]),
                compute=host["compute"],
            )
            for host in of_host
        ),
        routes=routes,
        trunks=tuple(trunks),
        mtu_bytes=values["mtu"],
    )


def _routes(
    values: dict[str, Any], links: list[dict[str, Any]], known: str, problems: list[str]
) -> tuple[dict[tuple[int, int], Route], list[float]]:
    """The route between every two hosts, and the trunks that links make. A later link is over an earlier one."""
    count, trunks = values["hosts"], list[float]()
    usual = Route(**{field: values[name] for name, field in _ROUTE_FIELDS.items()})
    routes = dict.fromkeys(itertools.permutations(range(count), 2), usual)
    for index, link in enumerate(links):
        sides = [list(range(count)) if link.get(side) == "all" else link.get(side) for side in ("from", "to")]
        for side, members in zip(("from", "to"), sides, strict=True):
            strangers = [number for number in members or () if not 0 <= number < count]
            if members is None or strangers:
                said = "missing" if members is None else f"{strangers}"
                problems.append(f"[[link]] {index}: {side} = {said}; {known}")
        if problems:
            continue
        for sources, destinations in (sides,) if link.get("one_way") else (sides, sides[::-1]):
            changes = {field: link[name] for name, field in _ROUTE_FIELDS.items() if name in link}
            if "bandwidth" in link:
                changes["trunk"] = len(trunks)
                trunks.append(link["bandwidth"])
            for pair in itertools.product(sources or (), destinations or ()):
                if pair in routes:
                    routes[pair] = dataclasses.replace(routes[pair], **changes)
    return routes, trunks
