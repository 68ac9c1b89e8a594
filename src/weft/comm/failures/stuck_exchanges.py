"""Which exchanges this rank is in, and since when: read from torch's flight recorder, so that a step pays nothing.

torch keeps the latest 2,000 operations of NCCL's groups and of gloo's collectives, with their group, number, size and
timeout. From them a rank finds an exchange that is about to time out, and the statuses of all ranks say who waits for
whom (`describe_stuck_exchange`), before torch's own watchdog ends the process with a text that names neither axis nor
ranks. Messages over gloo are not recorded; a wait for one raises in the rank itself.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _world

from weft.units import format_bytes

ALARM_FRACTION = 0.9
"""Part of its timeout after which an exchange counts as stuck."""
_READ_FRACTION = 0.7
"""Part of the timeout without progress after which the recorder itself is read, which queries CUDA events."""
_MOST_DESCRIBED = 8
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An operation of a process group that has begun here and is not over."""

    group: str
    """torch's name of the group, the same on all its ranks."""
    name: str
    """What the group is for: "data/gradients"."""
    ranks: tuple[int, ...]
    kind: str
    number: int
    """The operation's number in its group."""
    num_bytes: int
    waited_s: float
    timeout_s: float

    def __str__(self) -> str:
        size = f" of {format_bytes(self.num_bytes)}" if self.num_bytes else ""
        return f"{self.kind}{size} (number {self.number} along {self.name}, ranks {_join(self.ranks)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStatus:
    """The exchanges of a rank, as it reports them."""

    waiting: tuple[Exchange, ...]
    """Those under way, the oldest first."""
    latest: Mapping[str, int]
    """The number of the last operation begun in each group."""

    def as_json(self) -> dict[str, Any]:
        return {"waiting": [asdict(one) for one in self.waiting[:_MOST_DESCRIBED]], "latest": dict(self.latest)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> ExchangeStatus:
        waiting = (Exchange(**{**one, "ranks": tuple(one["ranks"])}) for one in fields["waiting"])
        return ExchangeStatus(waiting=tuple(waiting), latest=fields["latest"])


class StuckExchanges:
    """Checks from time to time whether an exchange of this rank is about to time out."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: of the groups of this run."""
        self._timeout_s = timeout_s
        self.poll_interval_s = min(max(timeout_s / 40, 0.05), 30.0)
        self._last_progress: dict[str, Any] = {}
        self._last_progress_s = time.monotonic()

    def is_found(self) -> bool:
        """True if an exchange has lasted nearly as long as it may."""
        status = _progress()
        if status != self._last_progress or not _has_unfinished(status):
            self._last_progress, self._last_progress_s = status, time.monotonic()
            return False
        if time.monotonic() - self._last_progress_s < _READ_FRACTION * self._timeout_s:
            return False
        return any(one.waited_s > ALARM_FRACTION * one.timeout_s for one in exchange_status().waiting)


def exchange_status() -> ExchangeStatus:
    """The exchanges that this rank is in now."""
    waiting: list[Exchange] = []
    latest: dict[str, int] = {}
    members = {name: tuple(_world.pg_group_ranks.get(group, ())) for group, name in list(_world.pg_names.items())}
    for entry in _entries():
        group, name = entry["process_group"]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        latest[group] = max(number, latest.get(group, 0))
        if entry["retired"] or entry["state"] == "completed":
            continue
        exchange = Exchange(
            group=group,
            name=name,
            ranks=members.get(group, ()),
            kind=_kind(entry["profiling_name"]),
            number=number,
            num_bytes=max(_num_bytes(entry, "input"), _num_bytes(entry, "output")),
            waited_s=time.time() - entry["time_created_ns"] / 1e9,
            timeout_s=entry["timeout_ms"] / 1e3 or math.inf,
        )
        waiting.append(exchange)
    return ExchangeStatus(waiting=tuple(sorted(waiting, key=lambda one: -one.waited_s)), latest=latest)


def describe_stuck_exchange(rank: int, statuses: Mapping[int, ExchangeStatus]) -> str:
    """The message about a stuck exchange: where its ranks are, then the ranks that those wait for.

    `rank`: the one that noticed; `statuses`: of each rank that answered.
    """
    stuck = statuses[rank].waiting[0]
    by_status: dict[str, list[int]] = {}
    to_explain, seen = [(one, stuck) for one in stuck.ranks], {rank}
    while to_explain:
        other, missed = to_explain.pop(0)
        if other in seen:
            continue
        seen.add(other)
        status = statuses.get(other)
        by_status.setdefault(_describe_status(status, stuck, missed), []).append(other)
        if status is not None and status.waiting:
            to_explain += [(one, status.waiting[0]) for one in status.waiting[0].ranks]
    parts = [f"rank {rank} has waited {stuck.waited_s:,.0f} s in {stuck}"]
    for text, ranks in list(by_status.items())[:_MOST_DESCRIBED]:
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {_join(ranks)}: {text}")
    return "; ".join(parts)


def _describe_status(status: ExchangeStatus | None, stuck: Exchange, missed: Exchange) -> str:
    """Where a rank is that others wait for in the exchange it missed."""
    if status is None:
        return "no answer"
    if any((one.group, one.number) == (stuck.group, stuck.number) for one in status.waiting):
        return "waiting in it too"
    if status.waiting:
        return f"waiting in {status.waiting[0]}"
    last = status.latest.get(missed.group)
    return "in no exchange" + (f", the last one along {missed.name} was number {last}" if last else "")


def _entries() -> Iterator[dict[str, Any]]:
    for dump in _RECORDERS:
        if hasattr(c10d, dump):
            yield from json.loads(getattr(c10d, dump)(includeCollectives=True, onlyActive=False)).get("entries", ())


def _progress() -> dict[str, Any]:
    """Numbers of the last operation begun and ended, by group; a few microseconds, and no CUDA call."""
    return {
        f"{dump}/{group}": status
        for dump in _RECORDERS
        if hasattr(c10d, dump)
        for group, status in json.loads(getattr(c10d, dump)(includeCollectives=False, onlyActive=True))
        .get("pg_status", {})
        .items()
    }


def _has_unfinished(status: Mapping[str, Mapping[str, str]]) -> bool:
    return any(one["last_enqueued_collective"] != one["last_completed_collective"] for one in status.values())


def _kind(profiling_name: str) -> str:
    """'nccl:_all_gather_base' -> 'all-gather'."""
    return profiling_name.partition(":")[2].removeprefix("_").removesuffix("_base").replace("_", "-")


def _num_bytes(entry: Mapping[str, Any], side: str) -> int:
    pairs = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
    return sum(math.prod(sizes) * _ITEM_BYTES.get(dtype, 0) for sizes, dtype in pairs)


_ITEM_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}
"""Bytes per element, by the names the recorder uses."""


def _join(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks))
