"""The pipeline as a trace: the JSON that Perfetto (ui.perfetto.dev) and Chrome's chrome://tracing open.

A rank is a process there, and its lanes are threads: one for what it computes, and as many as needed for what goes out
(send, reduce) and comes in (receive, gather, release), since the viewers show spans that overlap in one lane wrongly.

Times are kept to the nanosecond: the format counts in microseconds, of which three decimals are written. So a timeline
whose times are whole nanoseconds is read back exactly as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, get_args

from weft.errors import DataError
from weft.plan.pipeline.actions import EVERY, Action, Kind
from weft.plan.pipeline.timeline import Span, Timeline
from weft.plan.text import write_text

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input-grad": "I", "weight-grad": "W"}
LANES = ("compute", "out", "in")
ARGUMENTS = tuple(field.name for field in fields(Action))
MOST_PROBLEMS = 5


def chrome(timeline: Timeline) -> dict[str, Any]:
    """The trace as the plain values of its JSON: one complete event ("X") a span, and the names of ranks and lanes."""
    ranks = [_name("process_name", rank, 0, f"rank {rank}") for rank in range(timeline.num_ranks)]
    return {"displayTimeUnit": "ms", "traceEvents": [*ranks, *_span_events(timeline)]}


def write(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write the trace to a file, whole or not at all."""
    write_text(path, json.dumps(chrome(timeline), separators=(",", ":")) + "\n", kind=DataError)


def read(path: str | os.PathLike[str]) -> Timeline:
    """The timeline that `write` wrote."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); a trace is written by trace.write") from error
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise DataError(f'{path}: holds no list "traceEvents"; a trace is written by trace.write')
    spans, problems = [], []
    for number, event in enumerate(events):
        try:
            if event["ph"] == "X":
                spans.append(_span(event))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            problems.append(f"{path}: event {number} is not one of weft's ({error!r}): {json.dumps(event)[:120]}")
    named = [event for event in events if isinstance(event, dict) and event.get("name") == "process_name"]
    strangers = {span.rank for span in spans} - set(range(len(named)))
    if strangers:
        problems.append(f"{path}: names {len(named)} ranks, but has spans of {sorted(strangers)} too; is it whole?")
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise DataError(problems[:MOST_PROBLEMS] + ([f"{path}: and {more} problems more"] if more > 0 else []))
    return Timeline(spans=tuple(spans), num_ranks=len(named))


def _span_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The spans in their order; a lane is named where it is first used."""
    free_ns: dict[tuple[int, str], list[int]] = {}
    for span in timeline.spans:
        start_ns, stop_ns = round(span.start_s * 1e9), round(span.stop_s * 1e9)
        lane = _lane(span.action)
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
            "args": {name: getattr(span.action, name) for name in ARGUMENTS},
        }


def _name(event: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": tid, "args": {"name": name}}


def _lane(action: Action) -> str:
    if action.is_compute:
        return "compute"
    return "out" if action.kind in ("send", "reduce") else "in"


def _label(action: Action) -> str:
    """forward of microbatch 3: F3; an update that makes version 4: update v4; a send of microbatch 3: send 3."""
    if action.kind == "update":
        return f"update v{action.version}"
    if action.kind in LETTERS:
        return f"{LETTERS[action.kind]}{action.microbatch}"
    return action.kind if action.microbatch == EVERY else f"{action.kind} {action.microbatch}"


def _span(event: dict[str, Any]) -> Span:
    start_ns = round(event["ts"] * 1000)
    stop_ns = start_ns + round(event["dur"] * 1000)
    action = Action(**{name: event["args"][name] for name in ARGUMENTS})
    if action.kind not in get_args(Kind):
        raise ValueError(f"unknown kind {action.kind}")
    if not all(isinstance(number, int) for number in (event["pid"], *astuple(action)[1:])):
        raise ValueError("rank, stage, microbatch, peer and version are whole numbers")
    return Span(rank=event["pid"], action=action, start_s=start_ns / 1e9, stop_s=stop_ns / 1e9)
