"""The map of `slow_networks.py`: the best method by bandwidth and latency, and how many times as fast as DDP it is."""

from __future__ import annotations

import textwrap
from typing import Any

from plots import settings, svg_of

from weft.lab.quantities import format_rate, parse_rate, parse_time
from weft.report.colours import HUES, LIGHT

CELL_INCHES = (1.45, 0.95)
TITLE = "Fewest seconds to a loss, and how many times as fast as DDP"
DARK_HUES = ("#0072b2",)
"""Hues on which text is white."""
WHITE, BLACK = "#fffffe", "#000001"
"""Text on a hue: nearly the colours that dark mode replaces, which must not be these."""
ALPHAS = (1.0, 0.6)
"""Of the first and second round through the hues."""


def rate_bits(condition: str) -> float:
    """Bits per second of every line."""
    return parse_rate("unlimited" if condition == "unshaped" else condition.partition(":")[0])


def delay_ms(condition: str) -> float:
    """One way."""
    return 0.0 if condition == "unshaped" else 1e3 * parse_time(condition.partition(":")[2])


def draw_map(best: list[dict[str, Any]]) -> str:
    """The SVG; `best` has the fastest method of every condition."""
    from matplotlib.figure import Figure

    rates = sorted({rate_bits(one["condition"]) for one in best}, reverse=True)
    delays = sorted({delay_ms(one["condition"]) for one in best})
    methods = list(dict.fromkeys(one["title"] for one in best))
    width, height = CELL_INCHES
    with settings():
        figure = Figure(figsize=(width * len(delays) + 1.4, height * len(rates) + 1.1), layout="constrained")
        axes = figure.subplots()
        for one in best:
            x, y = delays.index(delay_ms(one["condition"])), rates.index(rate_bits(one["condition"]))
            place = methods.index(one["title"])
            hue, alpha = HUES[place % len(HUES)], ALPHAS[place // len(HUES) % len(ALPHAS)]
            axes.bar(x, 1, 1, y - 0.5, color=hue, alpha=alpha, edgecolor=LIGHT.page, linewidth=2)
            ink = WHITE if hue in DARK_HUES and alpha == 1 else BLACK
            ratio = one["times_as_fast_as_ddp"]
            name = textwrap.fill(one["title"], 18)
            axes.text(x, y - 0.16, name, ha="center", va="center", color=ink, fontsize=8)
            if ratio:
                axes.text(x, y + 0.3, f"{ratio:.1f}×", ha="center", va="center", color=ink, weight="bold")
        axes.set_xlim(-0.5, len(delays) - 0.5)
        axes.set_ylim(len(rates) - 0.5, -0.5)
        axes.set_xticks(range(len(delays)), [f"{one:g} ms" for one in delays])
        axes.set_yticks(range(len(rates)), [format_rate(one) for one in rates])
        axes.grid(visible=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xlabel("latency, one way")
        axes.set_title(TITLE)
        return svg_of(figure, TITLE)
