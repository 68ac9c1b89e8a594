"""The pipeline as a picture: an SVG with ranks down, time across, and every microbatch in its own colour.

    rank 0   F0 F1 F2 F3 .. .. .. B0 B1 B2 B3     hue: the microbatch    tone and hatch: what is done to it
    rank 1   .. F0 F1 F2 F3 .. B0 B1 B2 B3 ..     a dot (background): the rank waits

Planned and executed timelines are the same records, so one function draws both, and `side_by_side` puts one above the
other on one time scale. The SVG is written by hand: it needs no library, its boxes carry tooltips, and it follows the
reader's light or dark mode (`colours.py`).

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
"""What is drawn, in the legend's order and words."""

OUTGOING, INCOMING = ("send", "reduce"), ("receive", "gather")

MARGIN_PX, LABEL_PX, TITLE_PX, AXIS_PX, LEGEND_PX = 16, 52, 26, 40, 22
ROW_PX, VERSION_PX, EXCHANGE_PX, GAP_PX = 26, 9, 10, 6
DIGIT_PX, SMALL_DIGIT_PX, LETTER_PX = 6.6, 5.0, 6.9
SHORTEST_PX, OUTLINED_PX = 2.0, 5.0
"""What takes no time is still seen; a narrow box has no outline, which would leave nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What all panels of a picture share: the scale, and which details are worth their room."""

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
    timeline: Timeline,
    *,
    title: str = "",
    width_px: int = 960,
    until_s: float | None = None,
    unit_s: float | None = None,
    exchanges: bool = False,
) -> str:
    """One timeline as the text of an SVG, up to `until_s` after its first span; the axis in units if one is given."""
    return side_by_side([(title, timeline)], width_px=width_px, until_s=until_s, unit_s=unit_s, exchanges=exchanges)


def side_by_side(
    panels: Sequence[tuple[str, Timeline]],
    *,
    width_px: int = 960,
    until_s: float | None = None,
    unit_s: float | None = None,
    exchanges: bool = False,
) -> str:
    """Several titled timelines, one below the other on one time scale: planned above executed, say."""
    _refuse(panels, width_px=width_px, until_s=until_s, unit_s=unit_s)
    drawn = [span for _, timeline in panels for span in timeline.spans if span.action.kind in NAMES]
    look = Look(
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
        panel, y = _panel(look, title, timeline, y, unit_s)
        parts += panel
    parts += _axis(look, y, unit_s)
    legend, y = _legend(look, [kind for kind in NAMES if any(span.action.kind == kind for span in drawn)], y + AXIS_PX)
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


def _origin_s(timeline: Timeline) -> float:
    """Recorded times count from any clock's zero; a picture begins at its first span."""
    return min(span.start_s for span in timeline.spans)


def _panel(look: Look, title: str, timeline: Timeline, y: float, unit_s: float | None) -> tuple[list[str], float]:
    """The panel's elements, and where the next one begins."""
    length_s, origin_s, right = timeline.makespan_s, _origin_s(timeline), look.x(look.until_s)
    lasts = f"{length_s / unit_s:.4g} units" if unit_s else format_seconds(length_s)
    busy = f"{lasts}, {100 * timeline.utilisation:.0f} % busy"
    parts = [_text(MARGIN_PX, y + 13, title, "title")] if title else []
    parts.append(_text(right, y + 13, busy, "faint end"))
    y += TITLE_PX
    idle_px = look.px_per_s * min(length_s, look.until_s)
    for rank in range(timeline.num_ranks):
        top = y + rank * look.row_px
        parts.append(_text(look.x(0) - 10, top + look.box_px / 2 + 4, f"rank {rank}", "label end"))
        parts.append(f'<path class="idle" d="M{look.x(0):g} {top:g}h{idle_px:.2f}v{look.box_px:g}h-{idle_px:.2f}z"/>')
    bottom = y + timeline.num_ranks * look.row_px
    lines = "".join(f"M{look.x(at_s):.2f} {y - 3:g}V{bottom:g}" for at_s, _ in _ticks(look, unit_s)[0])
    parts.append(f'<path class="grid" d="{lines}"/>')
    # A box of no length is drawn last, or its longer neighbour would hide it.
    for span in sorted(timeline.spans, key=lambda span: span.duration_s == 0):
        start_s, stop_s = span.start_s - origin_s, min(span.stop_s - origin_s, look.until_s)
        is_past = start_s > look.until_s or (start_s == look.until_s and span.duration_s > 0)
        if is_past or span.action.kind not in NAMES or not (span.action.is_compute or look.exchanges):
            continue
        x, px = look.x(start_s), max((stop_s - start_s) * look.px_per_s, SHORTEST_PX)
        top = y + span.rank * look.row_px
        inside = _tooltip(span, origin_s)
        if span.action.is_compute:
            inside += _box(look, span, x, top, px, chunk=span.action.stage // timeline.num_ranks)
        else:
            inside += _mark(span.action.kind, x, top + look.box_px + 1, px)
        parts.append(f'<g class="{_classes(span)}">{inside}</g>')
    return parts, bottom + (GAP_PX if title else 0)


def _classes(span: Span) -> str:
    """The element's role, its kind, and (of what belongs to a microbatch) its hue."""
    action = span.action
    role = "box" if action.is_compute else "mark"
    return f"{role} {action.kind}" + ("" if action.microbatch == EVERY else f" m{action.microbatch % len(HUES)}")


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


def _box(look: Look, span: Span, x: float, top: float, px: float, *, chunk: int) -> str:
    """A compute span: its rectangle, its chunk's strip, and as much of its numbers as there is room for."""
    action, middle = span.action, x + px / 2
    outline = "" if px >= OUTLINED_PX else ' class="narrow"'
    parts = [f'<rect{outline} x="{x:.2f}" y="{top:g}" width="{px:.2f}" height="{look.box_px:g}"/>']
    if chunk:
        shade = chunk / (look.num_chunks - 1)
        parts.append(f'<path class="strip" stroke-opacity="{shade:.2g}" d="M{x:.2f} {top + 2:g}h{px:.2f}"/>')
    number = "" if action.microbatch == EVERY or action.kind == "update" else str(action.microbatch)
    version = f"v{action.version}" if look.versions else ""
    line = top + look.box_px / 2 + (4 if not (number and version) else -1)
    if number and px > DIGIT_PX * len(number) + 2:
        parts.append(_text(middle, line, number, "number"))
    if version and px > SMALL_DIGIT_PX * len(version) + 1:
        parts.append(_text(middle, line + (11 if number else 0), version, "version"))
    return "".join(parts)


def _mark(kind: Kind, x: float, top: float, px: float) -> str:
    """An exchange: a thin bar below the boxes, what goes out above what comes in."""
    y = top + (0 if kind in OUTGOING else EXCHANGE_PX / 2)
    return f'<path d="M{x:.2f} {y:g}h{px:.2f}v3.5h-{px:.2f}z"/>'


def _ticks(look: Look, unit_s: float | None) -> tuple[list[tuple[float, str]], str]:
    """(seconds, text) of every tick, and what the axis counts."""
    if unit_s:
        counts_s, name = unit_s, f"time (1 unit = {format_seconds(unit_s)})"
    else:
        counts_s, name = next(
            (s, n) for s, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if look.until_s > s or n == "µs"
        )
        name = f"time ({name})"
    most = (look.width_px - 2 * MARGIN_PX - LABEL_PX) / 60
    rough = look.until_s / counts_s / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    num_ticks = math.floor(look.until_s / counts_s / step * (1 + 1e-9)) + 1
    return [(tick * step * counts_s, f"{tick * step:.6g}") for tick in range(num_ticks)], name


def _axis(look: Look, y: float, unit_s: float | None) -> Iterator[str]:
    ticks, name = _ticks(look, unit_s)
    yield from (_text(look.x(at_s), y + 10, text, "faint middle") for at_s, text in ticks)
    yield _text(look.x(look.until_s), y + 26, name, "faint end")


def _legend(look: Look, kinds: Sequence[Kind], y: float) -> tuple[list[str], float]:
    """A sample of everything that is drawn, in lines as wide as the picture, and where the picture ends."""
    entries = [(f"{kind} m0", NAMES[kind], 0.0) for kind in kinds if look.exchanges or kind not in OUTGOING + INCOMING]
    entries += [("forward m0", f"chunk {c}", c / (look.num_chunks - 1)) for c in range(look.num_chunks) if c]
    notes = ["number, hue: microbatch"] + (["v: weights' version used, or made by an update"] if look.versions else [])
    parts, x = [], float(MARGIN_PX)
    for classes, text, shade in [*entries, *(("", note, 0.0) for note in notes)]:
        sample_px = 24 if classes else 0
        if x + sample_px + LETTER_PX * len(text) > look.width_px - MARGIN_PX:
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
