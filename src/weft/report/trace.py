"""The pipeline as a trace: the JSON that Perfetto (ui.perfetto.dev) and Chrome's chrome://tracing open.

A rank is a process there, and its lanes are threads: one for computation, and as many as needed for outgoing (send,
reduce) and incoming messages (receive, gather, release), because viewers show overlapping spans of one lane wrongly.

Times are kept to the nanosecond: the format counts in microseconds, of which three decimals are written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from weft.errors import DataError
from weft.plan.pipeline.actions import EVERY, Action, Kind
from weft.plan.pipeline.timeline import Timeline
from weft.plan.text import write_text

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input-grad": "I", "weight-grad": "W"}
LANES = ("compute", "out", "in")


def chrome(timeline: Timeline) -> dict[str, Any]:
    """The trace as plain values for JSON: one complete event ("X") per span, and the names of ranks and lanes."""
    ranks = [_name("process_name", rank, 0, f"rank {rank}") for rank in range(timeline.num_ranks)]
    return {"displayTimeUnit": "ms", "traceEvents": [*ranks, *_span_events(timeline)]}


def write(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write the trace to a file, whole or not at all."""
    write_text(path, json.dumps(chrome(timeline), separators=(",", ":")) + "\n", kind=DataError)


def _span_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The spans in their order; a lane is named where it is first used."""
    free_ns: dict[tuple[int, str], list[int]] = {}
    for span in timeline.spans:
        start_ns, stop_ns = round(span.start_s * 1e9), round(span.stop_s * 1e9)
        lane = "compute" if span.action.is_compute else "out" if span.action.kind in ("send", "reduce") else "in"
        free = free_ns.setdefault((span.rank, lane), [])
        place = next((at for at, since_ns in enumerate(free) if since_ns <= start_ns), len(free))
        tid = LANES.index(lane) + len(LANES) * place
        if place == len(free):
            free.append(stop_ns)
            yield _name("thread_name", span.rank, tid, lane if place == 0 else f"{lane} {place + 1}")
        free[place] = stop_ns
        yield {
            "ph": "X",
            "name": _label(span.action),
            "cat": span.action.kind,
            "pid": span.rank,
            "tid": tid,
            "ts": start_ns / 1000,
            "dur": (stop_ns - start_ns) / 1000,
            "args": asdict(span.action),
        }


def _name(event: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": tid, "args": {"name": name}}


def _label(action: Action) -> str:
    """forward of microbatch 3: F3; an update that makes version 4: update v4; a send of microbatch 3: send 3."""
    if action.kind == "update":
        return f"update v{action.version}"
    if action.kind in LETTERS:
        return f"{LETTERS[action.kind]}{action.microbatch}"
    return action.kind if action.microbatch == EVERY else f"{action.kind} {action.microbatch}"
