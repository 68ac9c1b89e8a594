"""A robust fit of latency and rate to times at several sizes.

A time disturbed by other load is far too long, and least squares would follow it. Here every line through two of the
points (and through one and the origin) is tried, and the one with the least sum of misses is taken. A miss is the
logarithm of predicted over measured: half and double weigh the same, small messages as much as large ones, and an
outlier hardly more than any other point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Point = tuple[float, float]
"""(bytes, seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """alpha_s + bytes / bytes_per_s."""

    alpha_s: float
    bytes_per_s: float
    miss: float = 0.0
    """Largest miss of a point, as a factor less one."""

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.bytes_per_s


def fit_line(points: Sequence[Point]) -> Line:
    """The line of the least sum of misses that has no negative part. Sizes and times are positive."""
    lines = list(_candidates(points))
    if not lines:
        raise ValueError("no line can be laid through no point")
    best = min(lines, key=lambda line: sum(_misses(line, points)))
    return replace(best, miss=math.expm1(max(_misses(best, points))))


def _candidates(points: Sequence[Point]) -> Iterator[Line]:
    for size, seconds in points:
        yield Line(alpha_s=0.0, bytes_per_s=size / seconds)
    for (size, seconds), (other_size, other_seconds) in itertools.combinations(points, 2):
        if (other_size - size) * (other_seconds - seconds) > 0:
            rate = (other_size - size) / (other_seconds - seconds)
            if (alpha_s := seconds - size / rate) >= 0:
                yield Line(alpha_s=alpha_s, bytes_per_s=rate)


def _misses(line: Line, points: Sequence[Point]) -> list[float]:
    return [abs(math.log(line.time_s(size) / seconds)) for size, seconds in points]
