"""The colours of a pipeline's picture, as one style sheet for light and dark mode.

The hue shows the microbatch, tone and hatch show the kind of pass: a forward pass is a tint, a whole backward pass
deep, its input-gradient half plain, and its weight-gradient half hatched. Every colour is a fixed class and not a CSS
variable, which many viewers of SVG do not support. Text is black or white, whichever contrasts more with its box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's colours, told apart by colour-blind readers too; without yellow, whose tint is lost on white."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Colours of light or dark mode besides the hues."""

    page: str
    ink: str
    faint: str
    idle: str
    grid: str
    deep: str
    """Colour that the hue of a whole backward pass is mixed with."""


LIGHT = Scheme(page="#ffffff", ink="#1f2328", faint="#59636e", idle="#eff1f4", grid="#d5dae0", deep="#000000")
DARK = Scheme(page="#0d1117", ink="#e6edf3", faint="#9198a1", idle="#1a2029", grid="#343b45", deep="#ffffff")

SHAPES = """
text { font: 12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif }
.title { font-size: 14px; font-weight: 600 } .number { font-size: 11px; text-anchor: middle }
.version { font-size: 8.5px; text-anchor: middle } .middle { text-anchor: middle } .end { text-anchor: end }
rect { stroke-width: 1 } .narrow { stroke-width: 0 }
.grid { stroke-width: 1; fill: none } .strip { stroke-width: 4; fill: none }
"""


def style_sheet() -> str:
    """The CSS rules of both modes; the viewer selects one."""
    light, dark = ("\n".join(_rules(scheme)) for scheme in (LIGHT, DARK))
    return f"{SHAPES}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def hatches() -> str:
    """The patterns with which weight gradients and reductions are filled."""
    patterns = [
        f'<pattern id="hatch-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path class="ground {name}" d="M0 0h6v6h-6z"/><path class="hatch" d="M-1 1l2-2M0 6l6-6M5 7l2-2"/></pattern>'
        for name in [*(f"m{hue}" for hue in range(len(HUES))), "plain"]
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def _rules(scheme: Scheme) -> Iterator[str]:
    yield f".page {{ fill: {scheme.page} }} .idle {{ fill: {scheme.idle} }} .grid {{ stroke: {scheme.grid} }}"
    yield f".title, .label {{ fill: {scheme.ink} }} .faint {{ fill: {scheme.faint} }}"
    yield f"rect {{ stroke: {scheme.page} }} .strip {{ stroke: {scheme.ink} }}"
    yield f".hatch {{ stroke: {scheme.page}; stroke-opacity: 0.55; stroke-width: 1.4 }}"
    yield from _filled(".update", scheme.faint)
    yield f".gather path, .ground.plain {{ fill: {scheme.faint} }} .reduce path {{ fill: url(#hatch-plain) }}"
    for number, hue in enumerate(HUES):
        name = f".m{number}"
        yield from _filled(f".forward{name}", _mix(hue, scheme.page, 0.42))
        yield from _filled(f".backward{name}", _mix(hue, scheme.deep, 0.82))
        yield from _filled(f".input-grad{name}", hue)
        weight = _mix(hue, scheme.page, 0.72)
        yield f".ground{name} {{ fill: {weight} }} .weight-grad{name} rect {{ fill: url(#hatch-m{number}) }}"
        yield f".weight-grad{name} text {{ fill: {_readable_on(weight)} }}"
        yield f".send{name} path {{ fill: {hue} }}"
        yield f".receive{name} path {{ fill: {_mix(hue, scheme.page, 0.6)} }}"


def _filled(selector: str, colour: str) -> Iterator[str]:
    yield f"{selector} rect {{ fill: {colour} }} {selector} text {{ fill: {_readable_on(colour)} }}"


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def _mix(colour: str, other: str, share: float) -> str:
    """`share` of the one colour and the rest of the other."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(share * one + (1 - share) * two):02x}" for one, two in pairs)


def _readable_on(colour: str) -> str:
    """Black or white, by the contrast that the accessibility guidelines (WCAG 2) define."""
    return "#000000" if contrast(colour, "#000000") >= contrast(colour, "#ffffff") else "#ffffff"


def contrast(one: str, other: str) -> float:
    """From 1 (the same colour) to 21 (black on white); text needs 4.5."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    shares = [channel / 255 for channel in _channels(colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
