"""The trace of a pipeline: every span once, in microseconds, in lanes where none overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import DataError
from weft.plan.pipeline.actions import Action, Kind
from weft.plan.pipeline.timeline import Span, Timeline
from weft.report import trace


def span(kind: Kind, start_s: float, stop_s: float, *, rank: int = 0, **action: int) -> Span:
    return Span(rank=rank, action=Action(kind=kind, stage=rank, **action), start_s=start_s, stop_s=stop_s)


TIMELINE = Timeline(
    num_ranks=3,
    spans=(
        span("gather", 0.1, 0.2),
        span("receive", 0.1, 0.3, rank=1, microbatch=3, peer=0),
        span("forward", 0.2, 0.25, microbatch=3, version=2),
        span("receive", 0.22, 0.4, rank=1, microbatch=4, peer=0),
        span("send", 0.25, 0.3, microbatch=3, peer=1),
        span("input-grad", 0.30, 0.4, rank=1, microbatch=3, version=2),
        span("weight-grad", 0.4, 0.5, rank=1, microbatch=3, version=2),
        span("receive", 0.4, 0.5, rank=1, microbatch=5, peer=0),
        span("backward", 0.45, 0.5, microbatch=3, version=2),
        span("reduce", 0.5, 0.6),
        span("release", 0.5, 0.5),
        span("update", 0.6, 0.6, version=3),
    ),
)
"""Rank 2 does nothing, and is there all the same."""


def spans_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def names_of(found: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    events = (event for event in found["traceEvents"] if event["name"] == what)
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events}


def test_every_span_once_with_its_name_and_arguments() -> None:
    events = spans_of(trace.chrome(TIMELINE))
    names = "gather|receive 3|F3|receive 4|send 3|I3|W3|receive 5|B3|reduce|release|update v3"
    assert [event["name"] for event in events] == names.split("|")
    assert [event["pid"] for event in events] == [span.rank for span in TIMELINE.spans]
    assert events[2]["args"] == {"kind": "forward", "stage": 0, "microbatch": 3, "peer": -1, "version": 2}


def test_times_are_in_microseconds() -> None:
    forward = spans_of(trace.chrome(TIMELINE))[2]
    assert (forward["ts"], forward["dur"]) == (200_000.0, 50_000.0)


def test_ranks_and_lanes_are_named() -> None:
    found = trace.chrome(TIMELINE)
    assert names_of(found, "process_name") == {(0, 0): "rank 0", (1, 0): "rank 1", (2, 0): "rank 2"}
    named = names_of(found, "thread_name")
    lanes = {(event["pid"], event["tid"]): event["cat"] for event in spans_of(found)}
    assert set(lanes) == set(named)
    lanes_of_1 = [named[1, event["tid"]] for event in spans_of(found) if event["pid"] == 1]
    assert lanes_of_1 == ["in", "in 2", "compute", "compute", "in"]


def test_spans_of_a_lane_do_not_overlap() -> None:
    last_us: dict[tuple[int, int], float] = {}
    for event in spans_of(trace.chrome(TIMELINE)):
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= last_us.get(lane, 0.0)
        last_us[lane] = event["ts"] + event["dur"]


def test_a_trace_is_a_file_of_json_with_times_to_the_nanosecond(tmp_path: Path) -> None:
    timeline = Timeline(num_ranks=1, spans=(span("forward", 1 / 3, 2 / 3, microbatch=0),))
    trace.write(tmp_path / "trace.json", timeline)
    (event,) = spans_of(json.loads((tmp_path / "trace.json").read_text()))
    assert (event["ts"], event["dur"]) == (333333.333, 333333.334)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    trace.write(tmp_path / "trace.json", Timeline(spans=(), num_ranks=2))
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2, "the names of both ranks"
    with pytest.raises(DataError, match="cannot be written"):
        trace.write(tmp_path / "nowhere" / "trace.json", TIMELINE)
