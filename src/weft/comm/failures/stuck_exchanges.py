"""Which exchanges this rank is in, and since when: what weft notes itself, and what torch's flight recorder knows.

weft notes where a host waits (`activity.py`): through shared memory and over gloo. Over NCCL hosts do not wait, and
scripts have exchanges of their own; torch keeps the latest 2,000 operations of NCCL's groups and of gloo's collectives,
with their group, number and size. Asking it how far they are takes a few microseconds and no CUDA call.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _world

from weft.comm.failures.activity import exchange_records
from weft.units import format_bytes, name_ranks

_MOST_DESCRIBED = 8
_QUIET = 100
"""Times as long as asking the recorder took, it is left alone: its answer lists all ranks of all groups."""
_LONGEST_QUIET_S = 1.0
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
    timeout_s: float = math.inf
    """Of torch's own watchdog; none where weft waits itself."""
    awaits: tuple[int, ...] = ()
    """Ranks that a message comes from, or goes to; none: all of `ranks`."""

    def __str__(self) -> str:
        size = f" of {format_bytes(self.num_bytes)}" if self.num_bytes else ""
        if self.awaits:
            way = "to" if self.kind == "send" else "from"
            return f"{self.kind}{size} {way} {name_ranks(self.awaits)} (along {self.name})"
        return f"{self.kind}{size} (number {self.number} along {self.name}, {name_ranks(self.ranks)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStatus:
    """The exchanges of a rank, as it reports them."""

    waiting: tuple[Exchange, ...]
    """Those under way, the oldest first."""
    latest: Mapping[str, int]
    """The number of the last operation begun in each group."""

    def as_json(self) -> dict[str, Any]:
        names = [field.name for field in fields(Exchange)]
        waiting = [{name: getattr(one, name) for name in names} for one in self.waiting[:_MOST_DESCRIBED]]
        for one in waiting:
            one["ranks"] = as_runs(one["ranks"])
        return {"waiting": waiting, "latest": dict(self.latest)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> ExchangeStatus:
        waiting = (
            Exchange(**{**one, "ranks": from_runs(one["ranks"]), "awaits": tuple(one["awaits"])})
            for one in fields["waiting"]
        )
        return ExchangeStatus(waiting=tuple(waiting), latest=fields["latest"])


class RecorderWatch:
    """Sees from time to time whether the operations that torch records still move."""

    def __init__(self) -> None:
        self._last_progress: dict[str, Any] = {}
        self._last_progress_s = time.monotonic()
        self._next_s = 0.0

    def waited_s(self) -> float:
        """Seconds since an operation began or ended, if one is under way; else 0."""
        now = time.monotonic()
        if now >= self._next_s:
            begun_s, status = time.thread_time(), _progress()
            self._next_s = now + min(_QUIET * (time.thread_time() - begun_s), _LONGEST_QUIET_S)
            if status != self._last_progress or not _has_unfinished(status):
                self._last_progress, self._last_progress_s = status, now
        return now - self._last_progress_s if _has_unfinished(self._last_progress) else 0.0


def exchange_status(*, reads_recorder: bool = True) -> ExchangeStatus:
    """The exchanges that this rank is in now; without the recorder, those that its host waits in."""
    waiting = _noted()
    known, noted = {one.group for one in waiting}, {one.group: one.begun for one in exchange_records() if one.begun}
    latest: dict[str, int] = {}
    members = {name: tuple(_world.pg_group_ranks.get(group, ())) for group, name in list(_world.pg_names.items())}
    for entry in _entries() if reads_recorder else ():
        group, name = entry["process_group"]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        latest[group] = max(number, latest.get(group, 0))
        if entry["retired"] or entry["state"] == "completed" or group in known:
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
    latest |= noted  # which counts messages too, and must be compared with itself on other ranks
    return ExchangeStatus(waiting=tuple(sorted(waiting, key=lambda one: -one.waited_s)), latest=latest)


def _noted() -> list[Exchange]:
    """The exchanges that weft itself waits in."""
    found, now = [], time.perf_counter()
    for record in exchange_records():
        if (what := record.waiting) is not None:
            kind, num_bytes, number, awaits = what
            found.append(
                Exchange(
                    group=record.group,
                    name=record.name,
                    ranks=record.ranks,
                    kind=kind,
                    number=number,
                    num_bytes=num_bytes,
                    waited_s=now - record.since_s,
                    awaits=awaits,
                )
            )
    return found


def _entries() -> Iterator[dict[str, Any]]:
    for dump in _RECORDERS:
        if hasattr(c10d, dump):
            try:
                text = getattr(c10d, dump)(includeCollectives=True, onlyActive=False)
            except RuntimeError:  # a device that has failed; the watch must live on
                continue
            yield from json.loads(text).get("entries", ())


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


def as_runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranks as (first, step, number) of evenly spaced ones: however many a group has, these are few."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, step, number = runs[-1] if runs else (0, 0, 0)
        if number == 1 or (number > 1 and rank == first + step * number):
            runs[-1] = first, rank - first if number == 1 else step, number + 1
        else:
            runs.append((rank, 1, 1))
    return runs


def from_runs(runs: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(first + step * place for first, step, number in runs for place in range(number))
