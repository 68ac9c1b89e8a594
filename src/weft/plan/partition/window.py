"""The blocks of attention that a ring rank computes where a query sees only keys near itself: a band of the whole mask.

Blocks outside of the band are left out, and blocks that it crosses are cut down to the keys that are seen. Long ones
are cut into strips of queries, so that work and memory grow with the length of the sequence, not with its square.

    keys ->  0 1 2 3 4 5 6 7          a window of 3 and two ranks in the zigzag layout: rank 0 has the chunks a and d,
    a 0      #                        rank 1 b and c; of the 16 blocks of two chunks 7 hold any work
      1      # #
    b 2      # # #
      3        # # #
    c 4          # # #
      5            # # #
    d 6              # # #
      7                # # #
"""

from __future__ import annotations

import functools

from weft.plan.partition.sequence import Band, Places, Rectangle
from weft.plan.partition.tensor import Range

_STRIP = 512
"""Most queries of a block that the band crosses. Fewer would leave out more, and make more and smaller blocks."""


@functools.lru_cache(maxsize=4096)  # asked for every block of every layer
def window_rectangles(
    places: Places, queries: int, keys: int, band: Band, *, longest: int = _STRIP
) -> tuple[Rectangle, ...]:
    """The work of ring rank `queries` with the keys of ring rank `keys`; empty if it may attend to none of them.

    Every query of a rectangle sees at least one of its keys. Padding is seen by padding only.
    """
    found: list[Rectangle] = []
    q_first = 0
    for q_start, q_stop in places.chunks(queries):
        k_first = 0
        for k_start, k_stop in places.chunks(keys):
            # Padding ends the sequence, and looks only back if the band is causal; otherwise nobody may see it.
            seen_stop = k_stop if band.after == 0 else min(k_stop, places.num_tokens)
            shifts = q_first - q_start, k_first - k_start
            found += _strips((q_start, q_stop), (k_start, seen_stop), shifts, band, longest)
            k_first += k_stop - k_start
        q_first += q_stop - q_start
    return tuple(found)


def _strips(q: Range, k: Range, shifts: tuple[int, int], band: Band, longest: int) -> list[Rectangle]:
    """The rectangles of two chunks, given in global numbers; the shifts make numbers within a rank of them."""
    (q_shift, k_shift), found = shifts, []
    start, stop = max(q[0], k[0] - band.after), min(q[1], k[1] + band.before)
    while start < stop:
        last = min(start + longest, stop)
        seen = max(k[0], start - band.before), min(k[1], last + band.after)
        if seen[0] < seen[1]:
            hides = last - 1 - band.before > seen[0] or seen[1] - 1 > start + band.after
            found.append(
                Rectangle(
                    q=(start + q_shift, last + q_shift),
                    k=(seen[0] + k_shift, seen[1] + k_shift),
                    is_causal=False,
                    band=band if hides else None,
                    distance=start - seen[0] if hides else 0,
                )
            )
        start = last
    return found
