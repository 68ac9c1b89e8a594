"""Slow links between hosts: each link is compared with the median of the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from weft.profiles.cluster import Link
from weft.units import format_bytes, format_seconds

MESSAGE_BYTES = 1 << 20
"""Size of the message by which links are compared: both rate and latency count in its time."""

SLOW = 1.5
"""A link that takes at least this many times the others' time is slow."""


class SlowLink(NamedTuple):
    """A link that is slower than the others."""

    link: Link
    times: float
    """Its time over the median of the other links'."""

    def __str__(self) -> str:
        first, second = self.link.hosts
        return (
            f"the link between hosts {first} and {second} is slow: {format_bytes(MESSAGE_BYTES)} take "
            f"{format_seconds(self.link.time_s(MESSAGE_BYTES))}, {self.times:.1f} times the median of the other links "
            f"(latency {format_seconds(self.link.alpha_s)}, {format_bytes(self.link.bytes_per_s)}/s)"
        )


def slow_links(links: Sequence[Link]) -> list[SlowLink]:
    """The slow ones among links between hosts, the slowest first; a single link is not slow.

    The median of an even number of others is the lower one, so that both links of one slow host among three are found.
    """
    network = [link for link in links if link.kind == "network"]
    found = []
    for place, link in enumerate(network):
        others = [other.time_s(MESSAGE_BYTES) for other in (*network[:place], *network[place + 1 :])]
        if others and (times := link.time_s(MESSAGE_BYTES) / statistics.median_low(others)) >= SLOW:
            found.append(SlowLink(link=link, times=times))
    return sorted(found, key=lambda slow: -slow.times)
