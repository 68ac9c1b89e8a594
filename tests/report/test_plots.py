"""Pictures of studies (`benchmarks/plots.py`): all series are drawn, seeds as median and band, in bytes that repeat."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import plots

from weft.report.colours import DARK, HUES, LIGHT


def study(**changes: Any) -> dict[str, Any]:
    every = [1, 2, 4, 8]
    series = [
        {"name": "local", "seed": seed, "x": every, "y": [1.0 + seed, 2.0 * (seed + 1), 3.0, 4.0]} for seed in range(3)
    ]
    ideal = {"name": "ideal <&>", "dashed": True, "x": every, "y": every}
    labels = {"title": "Speed against staleness", "x_label": "steps between exchanges", "y_label": "loss"}
    return {**labels, "log_x": True, "series": [*series, ideal], **changes}


def test_a_study_becomes_a_small_picture_that_repeats() -> None:
    svg = plots.draw(study())
    assert svg == plots.draw(study()) and len(svg) < 40_000
    texts = {"".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter()}
    assert {"Speed against staleness", "steps between exchanges", "loss", "local", "ideal <&>", "8"} <= texts
    assert f"stroke: {HUES[0]}" in svg and HUES[1] not in svg, "what is dashed takes no hue"
    assert svg.count(f"fill: {HUES[0]}; fill-opacity: 0.18") == 1, "the band of three seeds"
    rules = svg[svg.index("prefers-color-scheme: dark") :]
    assert f"fill: {LIGHT.page}" in svg and f"fill: {DARK.page} !important" in rules
    assert "dc:date" not in svg


def test_panels_share_their_colours_and_one_legend() -> None:
    second = study(title="time", series=[{"name": "other", "x": [1, 2], "y": [1, 2]}, study()["series"][0]])
    svg = plots.draw({"title": "Both", "panels": [study(), second, second]})
    texts = [
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")
    ]
    assert texts.count("local") == 1 and texts.count("Both") == 1 and texts.count("time") == 2
    assert plots.styles_of({"panels": [study(), second]})["local"]["color"] == HUES[0]


def test_the_median_has_a_gap_where_a_seed_has_no_number() -> None:
    middle, low, high = plots.middle_and_range([[1.0, 2.0, 3.0], [5.0, None, 4.0], [2.0, 1.0, math.inf]])
    assert (middle[0], low[0], high[0]) == (2.0, 1.0, 5.0)
    assert all(math.isnan(value[k]) for value in (middle, low, high) for k in (1, 2))


def test_seeds_with_other_points_are_drawn_one_by_one() -> None:
    svg = plots.draw(study(series=[{"name": "local", "x": [0, k], "y": [1, k]} for k in (1, 2, 3)], log_x=False))
    lines = [node.attrib.get("style", "") for node in ElementTree.fromstring(svg).iter()]
    assert sum(f"stroke: {HUES[0]}" in style and "stroke-width: 0.9" in style for style in lines) == 3


def test_a_range_shows_less() -> None:
    texts = [plots.draw(study(**given)) for given in ({}, {"y_range": [0.5, 1.5]})]
    assert ">7<" in texts[0] and ">7<" not in texts[1] and ">0.6<" in texts[1]


def test_all_that_is_wrong_with_a_file_is_told() -> None:
    bad = {"x_label": "steps", "series": [{"name": "a", "x": [1, 2], "y": [1]}, {"x": []}]}
    assert plots.problems_of({"panels": [study(), bad]}) == [
        'panel 1 has no "y_label"',
        '"a" of panel 1 has 2 values of x and 1 of y',
        "series 1 of panel 1 has no name and no y",
    ]


def test_machines_without_matplotlib_can_import_it() -> None:
    """The benchmarks that write the JSON run where only torch is."""
    found = "import sys, plots; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", found], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)
