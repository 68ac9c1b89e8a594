"""The trace of a pipeline: every span once, in microseconds, in lanes where none overlap, and read back as it was."""

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
    assert [named[1, event["tid"]] for event in spans_of(found) if event["pid"] == 1] == [
        "in",
        "in 2",
        "compute",
        "compute",
        "in",
    ]


def test_spans_of_a_lane_do_not_overlap() -> None:
    last_us: dict[tuple[int, int], float] = {}
    for event in spans_of(trace.chrome(TIMELINE)):
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= last_us.get(lane, 0.0)
        last_us[lane] = event["ts"] + event["dur"]


def test_read_gives_what_was_written(tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json", TIMELINE)
    assert trace.read(tmp_path / "trace.json") == TIMELINE
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_times_between_nanoseconds_are_rounded_to_them(tmp_path: Path) -> None:
    timeline = Timeline(num_ranks=1, spans=(span("forward", 1 / 3, 2 / 3, microbatch=0),))
    trace.write(tmp_path / "trace.json", timeline)
    assert trace.read(tmp_path / "trace.json").spans[0].start_s == 0.333333333
    assert trace.read(tmp_path / "trace.json").spans[0].stop_s == 0.666666667


def test_nothing_happened_is_a_trace_too(tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json", Timeline(spans=(), num_ranks=2))
    assert trace.read(tmp_path / "trace.json") == Timeline(spans=(), num_ranks=2)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        trace.write(tmp_path / "nowhere" / "trace.json", TIMELINE)
    with pytest.raises(DataError, match="cannot be read"):
        trace.read(tmp_path / "nowhere" / "trace.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", 'no list "traceEvents"'),
        ('{"traceEvents": 3}', 'no list "traceEvents"'),
        ('{"traceEvents": [7]}', "event 0 is not one of weft's"),
        ('{"traceEvents": [{"ph": "X", "pid": 0}]}', "event 0 is not one of weft's"),
    ],
)
def test_what_is_no_trace_of_ours_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(DataError, match=problem):
        trace.read(tmp_path / "trace.json")


def test_every_damaged_event_is_named_up_to_a_point(tmp_path: Path) -> None:
    found = trace.chrome(TIMELINE)
    events = spans_of(found)
    events[0]["args"]["kind"] = "juggle"
    events[1]["args"]["stage"] = "one"
    events[2]["ts"] = float("inf")
    events[3]["pid"] = 7
    (tmp_path / "trace.json").write_text(json.dumps(found))
    with pytest.raises(DataError) as refused:
        trace.read(tmp_path / "trace.json")
    hints = ("unknown kind juggle", "whole numbers", "infinity", "names 3 ranks, but has spans of [7]")
    assert len(refused.value.problems) == len(hints)
    assert all(hint in problem for hint, problem in zip(hints, refused.value.problems, strict=True))
    for event in events:
        del event["dur"]
    (tmp_path / "trace.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match="and 7 problems more"):
        trace.read(tmp_path / "trace.json")
