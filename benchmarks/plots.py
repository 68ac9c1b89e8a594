"""Pictures of studies: the JSON that a benchmark wrote becomes one SVG, readable in light and dark.

    python benchmarks/plots.py results.json -o docs/methods/NAME.svg
    python benchmarks/plots.py results.json -o docs/methods/NAME.svg --y-range 1.0 1.6    # of the first panel

The JSON is one picture, or several side by side under "panels", each of the same form:

    {"title": "…", "x_label": "…", "y_label": "…", "log_x": true, "log_y": false,
     "series": [{"name": "local, every = 8", "seed": 0, "x": [1, 2], "y": [0.9, 0.8], "dashed": false}]}

Series of one name are seeds of one method: if they have the same x, their median is drawn as a line and their range as
a band, else one thin line each. A y that is null is a gap, for all seeds of the name: a median of those that did not
diverge would not be the method's. A name has one colour in all panels.

The same JSON gives the same bytes: no date, no random ids, text as text. Colours are those of `weft.report.colours`;
the dark ones replace them by a style sheet, because matplotlib writes colours into every element.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from weft.report.colours import DARK, HUES, LIGHT

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Of the first, second and third round through the hues."""
PANEL_INCHES = (5.0, 3.6)
LETTERS_PER_INCH = 13
"""Of a legend, on average."""
LEGEND_LINE_LETTERS = 6
"""The width of the line beside a legend's text."""
MOST_TICKS = 10
NARROW = 200
"""Range of a logarithmic y below which powers of 2 are written out."""
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that sizes are the same everywhere
    "font.size": 9,
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.ink,
    "axes.edgecolor": LIGHT.faint,
    "axes.facecolor": LIGHT.page,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": LIGHT.page,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.color": LIGHT.faint,
    "ytick.color": LIGHT.faint,
}


def problems_of(picture: Any, where: str = "the picture") -> list[str]:
    """What keeps the JSON from being drawn."""
    if not isinstance(picture, dict):
        return [f"{where} is a {type(picture).__name__}, not an object"]
    if "panels" in picture:
        if not picture["panels"]:
            return [f"{where} has an empty list of panels"]
        return [text for k, one in enumerate(picture["panels"]) for text in problems_of(one, f"panel {k}")]
    found = [f'{where} has no "{key}"' for key in ("x_label", "y_label", "series") if not picture.get(key)]
    for number, series in enumerate(picture.get("series") or ()):
        missing = [key for key in ("name", "x", "y") if key not in series]
        if missing:
            found.append(f"series {number} of {where} has no {' and no '.join(missing)}")
        elif len(series["x"]) != len(series["y"]):
            found.append(
                f'"{series["name"]}" of {where} has {len(series["x"])} values of x and {len(series["y"])} of y'
            )
    return found


def panels_of(picture: dict[str, Any]) -> list[dict[str, Any]]:
    return picture.get("panels") or [picture]


def by_name(panel: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The seeds of every method."""
    seeds: dict[str, list[dict[str, Any]]] = {}
    for series in panel["series"]:
        seeds.setdefault(series["name"], []).append(series)
    return seeds


def middle_and_range(seeds: Sequence[Sequence[float | None]]) -> tuple[list[float], list[float], list[float]]:
    """(median, lowest, highest) over seeds at every point; NaN where a seed has no number."""
    middle, low, high = [], [], []
    for values in zip(*seeds, strict=True):
        known = [value for value in values if value is not None and math.isfinite(value)]
        whole = len(known) == len(values)
        middle.append(statistics.median(known) if whole else math.nan)
        low.append(min(known) if whole else math.nan)
        high.append(max(known) if whole else math.nan)
    return middle, low, high


def styles_of(picture: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour and dashes by name. What is dashed is only for comparison, such as an ideal, and takes no hue."""
    styles: dict[str, dict[str, Any]] = {}
    num_hues = 0
    for panel in panels_of(picture):
        for name, seeds in by_name(panel).items():
            if name in styles:
                continue
            if seeds[0].get("dashed"):
                styles[name] = {"color": LIGHT.faint, "linestyle": (0, (4, 3))}
                continue
            dashes = DASHES[num_hues // len(HUES) % len(DASHES)]
            styles[name] = {"color": HUES[num_hues % len(HUES)], "linestyle": dashes}
            num_hues += 1
    return styles


def draw_method(axes: Any, name: str, seeds: list[dict[str, Any]], style: dict[str, Any]) -> None:
    xs = [series["x"] for series in seeds]
    marker = {"marker": "o", "markersize": 3} if len(xs[0]) <= 2 * MOST_TICKS and not seeds[0].get("dashed") else {}
    if any(one != xs[0] for one in xs):
        for number, series in enumerate(seeds):
            ys = [math.nan if y is None or not math.isfinite(y) else y for y in series["y"]]
            axes.plot(series["x"], ys, linewidth=0.9, label=name if number == 0 else None, **style, **marker)
        return
    middle, low, high = middle_and_range([series["y"] for series in seeds])
    if len(seeds) > 1:
        axes.fill_between(xs[0], low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(xs[0], middle, linewidth=1.5, label=name, **style, **marker)


def draw_panel(axes: Any, panel: dict[str, Any], styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import FormatStrFormatter, NullLocator

    for name, seeds in by_name(panel).items():
        draw_method(axes, name, seeds, styles[name])
    axes.set_title(panel.get("title", ""))
    axes.set_xlabel(panel["x_label"])
    axes.set_ylabel(panel["y_label"])
    if panel.get("log_y"):
        shown = [y for series in panel["series"] for y in series["y"] if y is not None and 0 < y < math.inf]
        is_narrow = bool(shown) and max(shown) < NARROW * min(shown)
        axes.set_yscale("log", base=2 if is_narrow else 10)
        if is_narrow:
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.yaxis.set_minor_locator(NullLocator())
    if panel.get("y_range"):
        axes.set_ylim(*panel["y_range"])
    if panel.get("log_x"):
        axes.set_xscale("log", base=2)
        measured = sorted({x for series in panel["series"] for x in series["x"]})
        if len(measured) <= MOST_TICKS:
            axes.set_xticks(measured, [f"{x:g}" for x in measured])
            axes.xaxis.set_minor_locator(NullLocator())


def dark_rules() -> str:
    """The style sheet that gives every colour of the light picture its dark counterpart."""
    pairs = [(getattr(LIGHT, name), getattr(DARK, name)) for name in ("page", "ink", "faint", "grid")]
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in pairs
        for what in ("fill", "stroke")
    ]
    return "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>\n"


def settings() -> Any:
    """Context of all drawing: the same bytes everywhere."""
    import matplotlib

    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS, "backend": "svg"})


def svg_of(figure: Any, title: str) -> str:
    """The SVG of a figure that was made under `settings`, for light and dark."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    start = text.index("<svg")
    inside = text.index(">", start) + 1
    return text[start:inside] + f"\n<title>{escape(title)}</title>\n" + dark_rules() + text[inside:].lstrip("\n")


def draw(picture: dict[str, Any]) -> str:
    """The SVG of a picture."""
    from matplotlib.figure import Figure

    panels, styles = panels_of(picture), styles_of(picture)
    with settings():
        num_columns = min(len(panels), 2)
        num_rows = math.ceil(len(panels) / num_columns)
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * num_columns, height * num_rows + 0.5), layout="constrained")
        grid = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            draw_panel(axes, panel, styles)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if "panels" in picture and picture.get("title"):
            figure.suptitle(picture["title"])
        labelled = [axes.get_legend_handles_labels() for axes in grid]
        entries = {text: line for lines, texts in labelled for line, text in zip(lines, texts, strict=True)}
        if len(entries) > 1:
            letters = max(map(len, entries)) + LEGEND_LINE_LETTERS
            per_row = max(1, min(len(entries), int(width * num_columns * LETTERS_PER_INCH / letters)))
            figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=per_row)
        return svg_of(figure, picture.get("title") or panels[0].get("title") or "A study")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON of a study")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the SVG to write")
    parser.add_argument("--y-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="of the first panel")
    args = parser.parse_args()
    picture = json.loads(args.results.read_text())
    if problems := problems_of(picture):
        sys.exit(f"{args.results} cannot be drawn: {'; '.join(problems)}")
    if args.y_range:
        panels_of(picture)[0]["y_range"] = args.y_range
    args.output.write_text(draw(picture))
    print(f"{args.output}: {args.output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
