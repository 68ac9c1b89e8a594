"""Bytes, seconds, bandwidths, counts and ranks as people read them: one spelling of everything weft prints."""

from __future__ import annotations

from collections.abc import Sequence


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


def format_bandwidth(bytes_per_s: float) -> str:
    """12500000 -> '100 Mbit/s': lines are sold by bits, in powers of ten."""
    mbit = bytes_per_s * 8e-6
    if mbit < 999.5:
        return f"{mbit:.0f} Mbit/s" if mbit >= 9.95 else f"{mbit:.1f} Mbit/s"
    return f"{mbit / 1e3:.1f} Gbit/s" if mbit < 99950 else f"{mbit / 1e3:.0f} Gbit/s"


def format_count(number: float) -> str:
    """12600000 -> '12.6 M'."""
    for unit in ("", " K", " M", " G"):
        if round(abs(number), 1) < 1000:
            return f"{number:.0f}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"


def name_ranks(ranks: Sequence[int]) -> str:
    """(3,) -> 'rank 3'; (7, 0, 1, 4, 5, 6) -> 'ranks 0, 1, 4 to 7'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
