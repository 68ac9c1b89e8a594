"""The pipeline as a picture: an SVG with ranks down, time across, and every microbatch in its own colour.

Planned and executed timelines are the same records, and are drawn one above the other on one time scale. The SVG is
written by hand: it needs no library, its boxes have tooltips, and it follows the reader's light or dark mode
(`colours.py`).

Not drawn: `release`, which takes no time, and the arrows of messages; `trace.py` has every span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from weft.errors import DataError
from weft.plan.pipeline.actions import EVERY, Kind
from weft.plan.pipeline.timeline import Span, Timeline
from weft.report.colours import HUES, hatches, style_sheet
from weft.units import format_seconds

NAMES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input-grad": "backward, input gradient",
    "weight-grad": "backward, weight gradient",
    "update": "update",
    "send": "send",
    "reduce": "reduce",
    "receive": "receive",
    "gather": "gather",
}
"""Kinds of actions that are drawn, in the order and words of the legend."""

OUTGOING, INCOMING = ("send", "reduce"), ("receive", "gather")

MARGIN_PX, LABEL_PX, TITLE_PX, AXIS_PX, LEGEND_PX = 16, 52, 26, 40, 22
ROW_PX, VERSION_PX, EXCHANGE_PX, GAP_PX = 26, 9, 10, 6
DIGIT_PX, SMALL_DIGIT_PX, LETTER_PX = 6.6, 5.0, 6.9
SHORTEST_PX, OUTLINED_PX = 2.0, 5.0
"""Actions of no duration stay visible; a narrow box has no outline, which would cover all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """The scale that all panels of a picture share, and the details that are drawn."""

    width_px: float
    until_s: float
    exchanges: bool
    versions: bool
    num_chunks: int

    @property
    def px_per_s(self) -> float:
        return (self.width_px - 2 * MARGIN_PX - LABEL_PX) / self.until_s

    @property
    def box_px(self) -> float:
        return ROW_PX + VERSION_PX * self.versions

    @property
    def row_px(self) -> float:
        return self.box_px + EXCHANGE_PX * self.exchanges + GAP_PX

    def x(self, since_s: float) -> float:
        return MARGIN_PX + LABEL_PX + since_s * self.px_per_s


def draw(
    panels: Sequence[tuple[str, Timeline]],
    *,
    width_px: int = 960,
    until_s: float | None = None,
    unit_s: float | None = None,
    exchanges: bool = False,
) -> str:
    """Titled timelines as the text of an SVG, one below the other on one time scale.

    They are drawn up to `until_s` after their first spans; the axis counts in units if `unit_s` is given.
    """
    _refuse(panels, width_px=width_px, until_s=until_s, unit_s=unit_s)
    drawn = [span for _, timeline in panels for span in timeline.spans if span.action.kind in NAMES]
    canvas = Canvas(
        width_px=width_px,
        until_s=until_s or max(timeline.makespan_s for _, timeline in panels),
        exchanges=exchanges and any(not span.action.is_compute for span in drawn),
        versions=len({span.action.version for span in drawn if span.action.kind == "forward"}) > 1,
        num_chunks=max(
            span.action.stage // timeline.num_ranks + 1 for _, timeline in panels for span in timeline.spans
        ),
    )
    parts, y = [], float(MARGIN_PX)
    for title, timeline in panels:
        panel, y = _panel(canvas, title, timeline, y, unit_s)
        parts += panel
    parts += _axis(canvas, y, unit_s)
    legend, y = _legend(
        canvas, [kind for kind in NAMES if any(span.action.kind == kind for span in drawn)], y + AXIS_PX
    )
    name = escape("; ".join(title for title, _ in panels if title) or "timeline of a pipeline")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {y:g}" width="{width_px}" height="{y:g}"'
    opening = [f'{head} role="img" aria-label="{name}">', f"<title>{name}</title>", f"<style>{style_sheet()}</style>"]
    page = f'<path class="page" d="M0 0h{width_px}v{y:g}h-{width_px}z"/>'
    return "\n".join([*opening, hatches(), page, *parts, *legend, "</svg>\n"])


def _refuse(
    panels: Sequence[tuple[str, Timeline]], *, width_px: int, until_s: float | None, unit_s: float | None
) -> None:
    problems = [] if panels else ["0 timelines given, at least 1 is needed"]
    for number, (title, timeline) in enumerate(panels):
        if timeline.makespan_s <= 0:
            name = f'"{title}"' if title else f"number {number}"
            what = f"timeline {name} has {len(timeline.spans)} spans that last 0 s together"
            problems.append(f"{what}: there is nothing to draw; record or simulate at least one step")
    for what, value in (("until_s", until_s), ("unit_s", unit_s)):
        if value is not None and value <= 0:
            problems.append(f"{what} is {value:g}, and must be more than 0 (None: chosen from the timeline)")
    least_px = 2 * MARGIN_PX + 4 * LABEL_PX
    if width_px < least_px:
        problems.append(f"width_px is {width_px}, and a picture needs {least_px} at least")
    if problems:
        raise DataError(problems)


def _panel(canvas: Canvas, title: str, timeline: Timeline, y: float, unit_s: float | None) -> tuple[list[str], float]:
    """The panel's elements, and the top of the next one."""
    length_s, right = timeline.makespan_s, canvas.x(canvas.until_s)
    origin_s = min(span.start_s for span in timeline.spans)  # recorded times count from an arbitrary zero
    lasts = f"{length_s / unit_s:.4g} units" if unit_s else format_seconds(length_s)
    busy = f"{lasts}, {100 * timeline.utilisation:.0f} % busy"
    parts = [_text(MARGIN_PX, y + 13, title, "title")] if title else []
    parts.append(_text(right, y + 13, busy, "faint end"))
    y += TITLE_PX
    idle_px = canvas.px_per_s * min(length_s, canvas.until_s)
    for rank in range(timeline.num_ranks):
        top = y + rank * canvas.row_px
        parts.append(_text(canvas.x(0) - 10, top + canvas.box_px / 2 + 4, f"rank {rank}", "label end"))
        parts.append(
            f'<path class="idle" d="M{canvas.x(0):g} {top:g}h{idle_px:.2f}v{canvas.box_px:g}h-{idle_px:.2f}z"/>'
        )
    bottom = y + timeline.num_ranks * canvas.row_px
    lines = "".join(f"M{canvas.x(at_s):.2f} {y - 3:g}V{bottom:g}" for at_s, _ in _ticks(canvas, unit_s)[0])
    parts.append(f'<path class="grid" d="{lines}"/>')
    # A box of no length is drawn last, or its longer neighbour would hide it.
    for span in sorted(timeline.spans, key=lambda span: span.duration_s == 0):
        start_s, stop_s = span.start_s - origin_s, min(span.stop_s - origin_s, canvas.until_s)
        is_past = start_s > canvas.until_s or (start_s == canvas.until_s and span.duration_s > 0)
        if is_past or span.action.kind not in NAMES or not (span.action.is_compute or canvas.exchanges):
            continue
        x, px = canvas.x(start_s), max((stop_s - start_s) * canvas.px_per_s, SHORTEST_PX)
        top = y + span.rank * canvas.row_px
        inside = _tooltip(span, origin_s)
        if span.action.is_compute:
            inside += _box(canvas, span, x, top, px, chunk=span.action.stage // timeline.num_ranks)
        else:
            # A message: a thin bar below the boxes, outgoing above incoming.
            line = top + canvas.box_px + 1 + (0 if span.action.kind in OUTGOING else EXCHANGE_PX / 2)
            inside += f'<path d="M{x:.2f} {line:g}h{px:.2f}v3.5h-{px:.2f}z"/>'
        hue = "" if span.action.microbatch == EVERY else f" m{span.action.microbatch % len(HUES)}"
        role = "box" if span.action.is_compute else "mark"
        parts.append(f'<g class="{role} {span.action.kind}{hue}">{inside}</g>')
    return parts, bottom + (GAP_PX if title else 0)


def _tooltip(span: Span, origin_s: float) -> str:
    action = span.action
    of = "" if action.microbatch == EVERY else f" of microbatch {action.microbatch}"
    where = f"rank {span.rank}, stage {action.stage}"
    if not action.is_compute:
        weights = "" if action.peer < 0 else f", peer stage {action.peer}"
    else:
        weights = f", makes v{action.version}" if action.kind == "update" else f", weights v{action.version}"
    when = f"{format_seconds(span.start_s - origin_s)} + {format_seconds(span.duration_s)}"
    return f"<title>{escape(f'{NAMES[action.kind]}{of}: {where}{weights}; {when}')}</title>"


def _box(canvas: Canvas, span: Span, x: float, top: float, px: float, *, chunk: int) -> str:
    """A compute span: its rectangle, its chunk's strip, and as much of its numbers as there is room for."""
    action, middle = span.action, x + px / 2
    outline = "" if px >= OUTLINED_PX else ' class="narrow"'
    parts = [f'<rect{outline} x="{x:.2f}" y="{top:g}" width="{px:.2f}" height="{canvas.box_px:g}"/>']
    if chunk:
        shade = chunk / (canvas.num_chunks - 1)
        parts.append(f'<path class="strip" stroke-opacity="{shade:.2g}" d="M{x:.2f} {top + 2:g}h{px:.2f}"/>')
    number = "" if action.microbatch == EVERY or action.kind == "update" else str(action.microbatch)
    version = f"v{action.version}" if canvas.versions else ""
    line = top + canvas.box_px / 2 + (4 if not (number and version) else -1)
    if number and px > DIGIT_PX * len(number) + 2:
        parts.append(_text(middle, line, number, "number"))
    if version and px > SMALL_DIGIT_PX * len(version) + 1:
        parts.append(_text(middle, line + (11 if number else 0), version, "version"))
    return "".join(parts)


def _ticks(canvas: Canvas, unit_s: float | None) -> tuple[list[tuple[float, str]], str]:
    """(seconds, text) of every tick, and the name of the axis."""
    if unit_s:
        counts_s, name = unit_s, f"time (1 unit = {format_seconds(unit_s)})"
    else:
        counts_s, name = next(
            (s, n) for s, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if canvas.until_s > s or n == "µs"
        )
        name = f"time ({name})"
    most = (canvas.width_px - 2 * MARGIN_PX - LABEL_PX) / 60
    rough = canvas.until_s / counts_s / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    num_ticks = math.floor(canvas.until_s / counts_s / step * (1 + 1e-9)) + 1
    return [(tick * step * counts_s, f"{tick * step:.6g}") for tick in range(num_ticks)], name


def _axis(canvas: Canvas, y: float, unit_s: float | None) -> Iterator[str]:
    ticks, name = _ticks(canvas, unit_s)
    yield from (_text(canvas.x(at_s), y + 10, text, "faint middle") for at_s, text in ticks)
    yield _text(canvas.x(canvas.until_s), y + 26, name, "faint end")


def _legend(canvas: Canvas, kinds: Sequence[Kind], y: float) -> tuple[list[str], float]:
    """The legend, in lines as wide as the picture, and the bottom of the picture."""
    entries = [
        (f"{kind} m0", NAMES[kind], 0.0) for kind in kinds if canvas.exchanges or kind not in OUTGOING + INCOMING
    ]
    entries += [("forward m0", f"chunk {c}", c / (canvas.num_chunks - 1)) for c in range(canvas.num_chunks) if c]
    notes = ["number, hue: microbatch"] + (
        ["v: weights' version used, or made by an update"] if canvas.versions else []
    )
    parts, x = [], float(MARGIN_PX)
    for classes, text, shade in [*entries, *(("", note, 0.0) for note in notes)]:
        sample_px = 24 if classes else 0
        if x + sample_px + LETTER_PX * len(text) > canvas.width_px - MARGIN_PX:
            x, y = float(MARGIN_PX), y + LEGEND_PX
        if classes:
            thin = classes.split()[0] in OUTGOING + INCOMING
            strip = f'<path class="strip" stroke-opacity="{shade:.2g}" d="M{x:g} {y + 2:g}h18"/>' if shade else ""
            sample = (
                f'<path d="M{x:g} {y + 5:g}h18v3.5h-18z"/>'
                if thin
                else f'<rect x="{x:g}" y="{y:g}" width="18" height="13"/>'
            )
            parts.append(f'<g class="{"mark" if thin else "sample"} {classes}">{sample}{strip}</g>')
        parts.append(_text(x + sample_px, y + 10.5, text, "faint"))
        x += sample_px + LETTER_PX * len(text) + 16
    return parts, y + LEGEND_PX + MARGIN_PX / 2


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>'
