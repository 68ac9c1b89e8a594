"""Loss spikes: a loss far above those of the last steps, by their median and their median deviation from it.

Both ignore single outliers, so that one spike does not hide the next. A spike is reported at its first step, and is
over when a loss is ordinary again; a level that stays is ordinary once it fills half of the window.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_WINDOW = 100
_FEWEST = 20
"""Losses that must be there before one is compared with them."""
_DEVIATIONS = 8.0
"""A loss is a spike from this many standard deviations on, estimated from the median deviation."""
_STANDARD = 1.4826
"""The standard deviation of normal noise over its median deviation."""
_SMALLEST = 0.01
"""A deviation is counted as at least this fraction of the median, for losses that hardly vary."""


class SpikeRule:
    """Decides which losses of a run are spikes."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_inside = False

    def add(self, loss: float) -> float | None:
        """The usual loss, if a spike begins with this one; else None."""
        if not math.isfinite(loss):  # reported as such
            return None
        usual = None
        if len(self._losses) >= _FEWEST:
            usual = statistics.median(self._losses)
            deviation = statistics.median(abs(one - usual) for one in self._losses)
            is_above = loss > usual + _DEVIATIONS * max(_STANDARD * deviation, _SMALLEST * abs(usual))
            begins, self._is_inside = is_above and not self._is_inside, is_above
            usual = usual if begins else None
        self._losses.append(loss)
        return usual
