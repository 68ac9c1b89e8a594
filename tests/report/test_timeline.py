"""The picture of a pipeline: valid SVG, a box for each computation, lengths in proportion to time, words escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from weft.errors import DataError
from weft.plan.pipeline.actions import Action, Kind
from weft.plan.pipeline.timeline import Span, Timeline
from weft.report import colours
from weft.report.timeline import draw as draw_all

SVG = "{http://www.w3.org/2000/svg}"


def span(kind: Kind, start_s: float, stop_s: float, *, rank: int = 0, **action: int) -> Span:
    stage = action.pop("stage", rank)
    return Span(rank=rank, action=Action(kind=kind, stage=stage, **action), start_s=start_s, stop_s=stop_s)


def two_ranks(*, since_s: float = 0.0) -> Timeline:
    """F0 .. B0, as a naive schedule has it, with its exchanges and an update that takes no time."""
    return Timeline(
        num_ranks=2,
        spans=(
            span("forward", since_s, since_s + 1, microbatch=0),
            span("send", since_s + 1, since_s + 1.5, microbatch=0, peer=1),
            span("receive", since_s, since_s + 1.5, rank=1, microbatch=0, peer=0),
            span("forward", since_s + 1.5, since_s + 2.5, rank=1, microbatch=0),
            span("backward", since_s + 2.5, since_s + 4.5, rank=1, microbatch=0),
            span("release", since_s + 4.5, since_s + 4.5, rank=1),
            span("update", since_s + 4.5, since_s + 4.5, rank=1, version=1),
            span("backward", since_s + 5, since_s + 7, microbatch=0),
            span("update", since_s + 7, since_s + 7, version=1),
        ),
    )


def draw(timeline: Timeline, *, title: str = "", **settings: Any) -> str:
    return draw_all([(title, timeline)], **settings)


def drawn(svg: str, role: str = "box") -> list[ElementTree.Element]:
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [group for group in groups if role in group.attrib["class"].split()]


def rectangle(box: ElementTree.Element) -> dict[str, float]:
    found = box.find(f"{SVG}rect")
    assert found is not None
    return {name: float(found.attrib[name]) for name in ("x", "y", "width", "height")}


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tooltips(boxes: list[ElementTree.Element]) -> list[str]:
    return [box.findtext(f"{SVG}title", "") for box in boxes]


def test_a_box_for_each_computation_and_no_other() -> None:
    boxes = drawn(draw(two_ranks()))
    assert sorted(box.attrib["class"] for box in boxes) == sorted(
        ["box forward m0", "box forward m0", "box backward m0", "box backward m0", "box update", "box update"]
    )
    assert not drawn(draw(two_ranks()), "mark")


def test_exchanges_are_drawn_on_demand_and_need_room() -> None:
    with_exchanges = draw(two_ranks(), exchanges=True)
    marks = [mark for mark in drawn(with_exchanges, "mark") if mark.find(f"{SVG}title") is not None]
    assert [mark.attrib["class"] for mark in marks] == ["mark send m0", "mark receive m0"]
    assert "peer stage 1" in tooltips(marks)[0]
    height = [float(ElementTree.fromstring(svg).attrib["height"]) for svg in (draw(two_ranks()), with_exchanges)]
    assert height[1] > height[0]
    assert {"send", "receive"} <= set(words(with_exchanges)) and "gather" not in words(with_exchanges)


def test_lengths_are_in_proportion_to_time_and_rows_to_ranks() -> None:
    svg = draw(two_ranks())
    first, second, third, fourth = (rectangle(box) for box in drawn(svg) if "m0" in box.attrib["class"])
    assert second["x"] - first["x"] == pytest.approx(1.5 * first["width"], abs=0.02)
    assert third["width"] == pytest.approx(2 * first["width"], abs=0.02)
    assert fourth["x"] - first["x"] == pytest.approx(5 * first["width"], abs=0.05)
    assert first["y"] == fourth["y"] < second["y"] == third["y"]
    assert fourth["x"] + fourth["width"] <= float(ElementTree.fromstring(svg).attrib["width"])


def test_the_clocks_zero_does_not_matter() -> None:
    assert draw(two_ranks(since_s=1024.0)) == draw(two_ranks())


def test_until_cuts_what_goes_on_and_leaves_out_what_comes_later() -> None:
    boxes = drawn(draw(two_ranks(), until_s=2.0))
    forward, cut = (rectangle(box)["width"] for box in boxes)
    assert cut == pytest.approx(forward / 2, abs=0.02)


def test_tooltips_say_what_where_and_when() -> None:
    assert tooltips(drawn(draw(two_ranks())))[:3] == [
        "forward of microbatch 0: rank 0, stage 0, weights v0; 0 s + 1.0 s",
        "forward of microbatch 0: rank 1, stage 1, weights v0; 1.5 s + 1.0 s",
        "backward of microbatch 0: rank 1, stage 1, weights v0; 2.5 s + 2.0 s",
    ]


def test_versions_are_printed_where_they_differ() -> None:
    stream = Timeline(
        num_ranks=1,
        spans=tuple(
            made
            for k in range(3)
            for made in (
                span("forward", 4 * k, 4 * k + 1, microbatch=k, version=k),
                span("backward", 4 * k + 1, 4 * k + 3, microbatch=k, version=k),
                span("update", 4 * k + 3, 4 * k + 4, microbatch=k, version=k + 1),
            )
        ),
    )
    versions = [text for text in words(draw(stream)) if text.startswith("v") and text[1:].isdigit()]
    assert versions == ["v0", "v0", "v1", "v1", "v1", "v2", "v2", "v2", "v3"]
    assert not any(text.startswith("v") for text in words(draw(two_ranks())))


def test_numbers_are_left_out_where_there_is_no_room() -> None:
    def crowd(num_microbatches: int) -> str:
        spans = (span("forward", k, k + 1, microbatch=k) for k in range(num_microbatches))
        return draw(Timeline(num_ranks=1, spans=tuple(spans)))

    def numbers(svg: str) -> list[str]:
        return [text for box in drawn(svg) if (text := box.findtext(f"{SVG}text"))]

    assert numbers(crowd(12)) == [str(k) for k in range(12)]
    assert numbers(crowd(1000)) == []
    assert len(drawn(crowd(1000))) == 1000


def test_chunks_have_strips_of_their_own_shade() -> None:
    spans = tuple(span("forward", k, k + 1, stage=k, microbatch=0) for k in range(3))
    svg = draw(Timeline(num_ranks=1, spans=spans))
    strips = [box.find(f"{SVG}path") for box in drawn(svg)]
    assert [None if strip is None else strip.attrib["stroke-opacity"] for strip in strips] == [None, "0.5", "1"]
    assert {"chunk 1", "chunk 2"} <= set(words(svg))


@pytest.mark.parametrize(
    ("until_s", "unit_s", "last", "name"),
    [
        (7.0, None, "7", "time (s)"),
        (0.02, None, "20", "time (ms)"),
        (2e-5, None, "20", "time (µs)"),
        (6.0, 0.5, "12", "time (1 unit = 500.0 ms)"),
    ],
)
def test_the_axis(until_s: float, unit_s: float | None, last: str, name: str) -> None:
    found = words(draw(two_ranks(), until_s=until_s, unit_s=unit_s))
    assert found[found.index(name) - 1] == last


def test_titles_are_escaped_and_said_with_the_busy_share() -> None:
    title = """a <b> & "c" </svg>"""
    svg = draw(two_ranks(), title=title, unit_s=0.5)
    assert title in words(svg)
    assert ElementTree.fromstring(svg).attrib["aria-label"] == title
    assert "14 units, 43 % busy" in words(svg)


def test_side_by_side_shares_one_scale() -> None:
    short = Timeline(num_ranks=1, spans=(span("forward", 0, 1, microbatch=0),))
    svg = draw_all([("planned", two_ranks()), ("executed", short)])
    boxes = [rectangle(box) for box in drawn(svg)]
    assert boxes[0]["width"] == boxes[-1]["width"] and boxes[0]["x"] == boxes[-1]["x"]
    assert boxes[-1]["y"] > max(box["y"] for box in boxes[:-1])
    found = words(svg)
    assert found.index("planned") < found.index("executed") and found.count("time (s)") == 1


def test_what_cannot_be_drawn_is_refused_all_at_once() -> None:
    with pytest.raises(DataError) as refused:
        draw_all([("empty", Timeline(spans=(), num_ranks=2))], width_px=10, until_s=0.0, unit_s=-1.0)
    named = [problem.split(" ")[0] for problem in refused.value.problems]
    assert named == ["timeline", "until_s", "unit_s", "width_px"]
    assert '"empty" has 0 spans' in str(refused.value)
    with pytest.raises(DataError, match="0 timelines"):
        draw_all([])


def test_both_modes_tell_all_kinds_apart_and_have_readable_text() -> None:
    modes = colours.style_sheet().split("@media (prefers-color-scheme: dark)")
    for mode, scheme in zip(modes, (colours.LIGHT, colours.DARK), strict=True):
        fills = dict(re.findall(r"(\S+) rect { fill: (\S+) }", mode))
        assert len(fills) == len(set(fills.values())) == 4 * len(colours.HUES) + 1
        for selector, colour in re.findall(r"(\S+) text { fill: (\S+) }", mode):
            ground = re.sub(r"^\.weight-grad", ".ground", selector)
            behind = dict(re.findall(r"(\.ground\S+) { fill: (\S+) }", mode)) | fills
            assert colours.contrast(colour, behind[ground]) > 4.5, selector
        assert colours.contrast(scheme.ink, scheme.page) > 7
        assert colours.contrast(scheme.faint, scheme.page) > 4.5
    assert colours.contrast("#ffffff", "#000000") == pytest.approx(21)
