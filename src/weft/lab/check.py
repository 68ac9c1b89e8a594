"""Measured against requested: `weft lab --check`, and the calibration before every lab."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.lab.measure import measure_compute, measure_delays, measure_rates
from weft.lab.namespaces import EmulatedHost
from weft.lab.network import Network, Route

TOLERANCE = 0.05
_MARGIN = 0.5
"""The usable part of the switch's measured rate: ranks need the processor too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A requested quantity and its measurement."""

    what: str
    """rate | delay | compute"""
    where: str
    asked: float
    """Bits per second, seconds or cores."""
    measured: float

    @property
    def error(self) -> float:
        """Relative error; 0 where no delay was requested."""
        return self.measured / self.asked - 1 if self.asked else 0.0

    @property
    def ok(self) -> bool:
        return abs(self.error) <= TOLERANCE


def measure_capacity(hosts: Sequence[EmulatedHost]) -> float:
    """Bits per second that the switch carries between unlimited lines, less a margin; takes a quarter of a second."""
    first, second = hosts[:2]
    both = [(first, second), (second, first)]
    return _MARGIN * sum(measure_rates(both, warm_up_s=0.05, window_s=0.2))


def measure_latency(hosts: Sequence[EmulatedHost], delay_s: float) -> float:
    """Latency that switch and kernel add to a delay on an idle network: the lower third of the probes."""
    delays = measure_delays(*hosts[:2], num_probes=40, spacing_s=0.003, timeout_s=1.0)
    return delays[len(delays) // 3] - delay_s if delays else math.inf


def check_network(hosts: Sequence[EmulatedHost], network: Network) -> list[Finding]:
    """Measure every kind of route, all lines together, and slow hosts."""
    pairs: dict[tuple[float, Route], list[tuple[int, int]]] = {}
    for pair, route in network.routes.items():
        pairs.setdefault((network.rate(*pair), route), []).append(pair)
    kinds = [
        (rate, route, a, b, f"host {a} to host {b}" + (f" and {len(others)} more" if others else ""))
        for (rate, route), ((a, b), *others) in pairs.items()
    ]
    findings = []
    for _, route, source, destination, where in kinds:  # all of them before any stream fills a queue
        delays = measure_delays(
            hosts[source],
            hosts[destination],
            num_probes=400 if route.jitter_s else 100,
            spacing_s=max(0.004, 2 * route.jitter_s),
            timeout_s=1 + 2 * route.delay_s,
        )
        findings.append(Finding(what="delay", where=where, asked=route.delay_s, measured=_middle(delays)))
    for rate, _, source, destination, where in kinds:
        if rate < math.inf:
            (measured,) = _rates([(hosts[source], hosts[destination])], network, rate)
            findings.append(Finding(what="rate", where=where, asked=rate, measured=measured))
    findings += _check_all_at_once(hosts, network)
    return findings + _check_compute(hosts, network)


def _check_all_at_once(hosts: Sequence[EmulatedHost], network: Network) -> list[Finding]:
    """All hosts send to the next one, as a ring of ranks does: the largest load of the switch."""
    pairs = [(number, (number + 1) % len(hosts)) for number in range(len(hosts))]
    rates = [network.rate(*pair) for pair in pairs]
    if len(hosts) < 2 or math.inf in rates:
        return []
    over: dict[int | None, float] = {}  # bits per second over each trunk, and over none
    for pair, rate in zip(pairs, rates, strict=True):
        over[network.routes[pair].trunk] = over.get(network.routes[pair].trunk, 0.0) + rate
    free = sum(rate if trunk is None else min(rate, network.trunks[trunk]) for trunk, rate in over.items())
    measured = sum(_rates([(hosts[a], hosts[b]) for a, b in pairs], network, min(rates)))
    return [Finding(what="rate", where="all hosts at once, in a ring", asked=free, measured=measured)]


def _check_compute(hosts: Sequence[EmulatedHost], network: Network) -> list[Finding]:
    """One busy process on every slow host together; for hosts with the same share, the largest error."""
    slow = [number for number, host in enumerate(network.hosts) if host.compute]
    found: dict[float, list[float]] = {}
    for number, share in zip(slow, measure_compute([hosts[number] for number in slow], window_s=2.0), strict=True):
        found.setdefault(network.hosts[number].compute, []).append(share)
    return [
        Finding(
            what="compute",
            where="one busy host" if len(shares) == 1 else f"{len(shares)} busy hosts, the farthest off",
            asked=asked,
            measured=max(shares, key=lambda share: abs(share - asked)),
        )
        for asked, shares in found.items()
    ]


def _middle(values: Sequence[float]) -> float:
    """Mean of the middle half, without outliers of a busy machine; infinity if there are no values."""
    quarter = len(values) // 4
    return statistics.fmean(values[quarter : len(values) - quarter]) if values else math.inf


def _rates(pairs: Sequence[tuple[EmulatedHost, EmulatedHost]], network: Network, bits_per_s: float) -> list[float]:
    """Rates of streams after the warm-up that TCP needs on long routes, over a window of at least sixty packets."""
    round_trip_s = network.round_trip_s()
    window_s = max(2.0, 4 * round_trip_s, 60 * network.mtu_bytes * 8 / bits_per_s)
    return measure_rates(pairs, warm_up_s=1 + 12 * round_trip_s, window_s=window_s)
