"""Bytes, seconds and counts as people read them: one spelling of every unit weft prints."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """26214400 -> '25.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(num_bytes), 1) < 1024:  # as it will be printed: never 1024.0 of a unit
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """0.025 -> '25.0 ms'; 75 -> '1 min 15 s'."""
    if 0 < seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if 0 < seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_count(number: float) -> str:
    """12600000 -> '12.6 M'."""
    for unit in ("", " K", " M", " G"):
        if round(abs(number), 1) < 1000:
            return f"{number:.0f}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"
