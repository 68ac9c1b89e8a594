"""Rates, times and shares as people write them in a network's description: "100Mbit", "25ms", "0.1%"."""

from __future__ import annotations

import math
import re

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_rate(value: object) -> float:
    """'100Mbit' -> 100e6 bits per second; 'unlimited' -> infinity. A ValueError says what is wrong."""
    if value == "unlimited":
        return math.inf
    number, unit = _split(value)
    size = _RATES.get(re.sub(r"bps$", "bit", unit.lower().removesuffix("/s")))
    if size is None or not number > 0:
        raise ValueError('must be a rate above 0, like "100Mbit", "1.5Gbit" or "unlimited"')
    return number * size


def parse_time(value: object) -> float:
    """'25ms' -> 0.025 seconds."""
    number, unit = _split(value)
    if unit not in _TIMES:
        raise ValueError('must be a time with its unit, like "25ms", "50us" or "0.3s"')
    return number * _TIMES[unit]


def parse_share(value: object) -> float:
    """'0.1%' -> 0.001; a plain number from 0 to 1 stands for itself."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    number, unit = (float(value), "") if is_plain else _split(value)  # type: ignore[arg-type]
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= share < 1:
        raise ValueError('must be a share from 0 to below 1, like "0.1%" or 0.001')
    return share


def format_rate(bits_per_s: float) -> str:
    """100e6 -> '100 Mbit/s'."""
    if math.isinf(bits_per_s):
        return "unlimited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size * 0.99995:
            return f"{bits_per_s / size:.4g} {unit}"
    return f"{bits_per_s:.4g} bit/s"


def _split(value: object) -> tuple[float, str]:
    """The number and the unit of a text; not a number, and "?", if it has another form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([^\d\s]*)\s*", value) if isinstance(value, str) else None
    return (float(match.group(1)), match.group(2)) if match else (math.nan, "?")
