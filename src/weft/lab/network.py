"""An emulated network: hosts with a line each, routes between them, and trunks that several routes share.

A *line* sends one packet after the other, at its rate, and has a queue. A packet leaves through its host's upload line,
is delayed by its route, crosses the route's trunk, if any, and arrives through the other host's download line. Plain
data: `fabric.py` moves packets by it, `topology.py` reads it from text.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from weft.lab.quantities import format_rate

QUEUE_BYTES = 1_500_000
"""Smallest size of a line's queue: a thousand Ethernet packets, the traditional default of Linux."""
_PAUSE_S = 0.005
"""Longest pause of a sender on a busy machine during which its line must stay busy."""
_LEAST_TCP_BUFFER_BYTES = 16 << 20
_USABLE_CORES = 0.9
_FIRST_ADDRESS = 10 << 24 | 83 << 16
NETMASK = "255.255.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """An emulated machine."""

    ranks: int
    """Ranks that run on it."""
    upload_bits_per_s: float
    """Rate of its line to the others; infinity: no limit."""
    download_bits_per_s: float
    """Rate of its line from the others."""
    compute: float
    """Cores of this machine that its processes may use together; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The path of packets from one host to another."""

    delay_s: float
    """Time from end to end, one way, without queues."""
    jitter_s: float
    """A packet's delay is drawn evenly from delay - jitter to delay + jitter; order is kept."""
    loss: float
    """Share of packets lost."""
    trunk: int | None = None
    """Number of the trunk it crosses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hosts, routes and trunks."""

    hosts: tuple[Host, ...]
    routes: dict[tuple[int, int], Route]
    """By (from, to); every pair of different hosts."""
    trunks: tuple[float, ...]
    """Bits per second of lines that several routes share."""
    mtu_bytes: int
    """Largest packet. Large packets keep the switch fast; Ethernet's are 1500."""

    @property
    def num_ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    def rate(self, source: int, destination: int) -> float:
        """Bits per second that one host can send another on an idle network."""
        trunk = self.routes[source, destination].trunk
        return min(
            self.hosts[source].upload_bits_per_s,
            self.hosts[destination].download_bits_per_s,
            math.inf if trunk is None else self.trunks[trunk],
        )

    def load(self) -> float:
        """Bits per second when all hosts send at full rate, without unlimited lines: what the switch must carry."""
        if len(self.hosts) == 1:
            return 0.0
        uploads = sum(host.upload_bits_per_s for host in self.hosts if host.upload_bits_per_s < math.inf)
        downloads = sum(host.download_bits_per_s for host in self.hosts if host.download_bits_per_s < math.inf)
        load = min(uploads or downloads, downloads or uploads)
        if all(route.trunk is not None for route in self.routes.values()):
            load = min(load or math.inf, sum(self.trunks))
        return 0.0 if math.isinf(load) else load

    def round_trip_s(self) -> float:
        """The longest round trip."""
        return 2 * max((route.delay_s + route.jitter_s for route in self.routes.values()), default=0.0)

    def queue_bytes(self, bits_per_s: float) -> int:
        """Size of a limited line's queue: a round trip at its full rate, so that one TCP stream can keep it busy."""
        return max(QUEUE_BYTES, int(bits_per_s / 8 * (self.round_trip_s() + _PAUSE_S)))

    def tcp_buffer_bytes(self) -> int:
        """TCP buffer that never limits a stream: four times the content of the fastest line and its queue."""
        rates = [rate for pair in self.routes if (rate := self.rate(*pair)) < math.inf]
        held = max((rate / 8 * self.round_trip_s() + self.queue_bytes(rate) for rate in rates), default=0.0)
        return min(max(_LEAST_TCP_BUFFER_BYTES, int(4 * held)), 1 << 30)


def unlimited(num_hosts: int, *, delay_s: float, mtu_bytes: int) -> Network:
    """Hosts with unlimited lines and one delay between all of them."""
    host = Host(ranks=1, upload_bits_per_s=math.inf, download_bits_per_s=math.inf, compute=0.0)
    route = Route(delay_s=delay_s, jitter_s=0.0, loss=0.0)
    pairs = itertools.permutations(range(num_hosts), 2)
    return Network(hosts=(host,) * num_hosts, routes=dict.fromkeys(pairs, route), trunks=(), mtu_bytes=mtu_bytes)


def host_name(number: int) -> str:
    return f"host{number}"


def host_address(number: int) -> str:
    return ".".join(str(byte) for byte in (_FIRST_ADDRESS + number + 1).to_bytes(4, "big"))


def host_number(address: bytes) -> int:
    """The host with these four bytes of address; an address outside the lab gives a number that no host has."""
    return int.from_bytes(address, "big") - _FIRST_ADDRESS - 1


def problems_of_machine(network: Network, *, num_cores: int, bits_per_s: float, latency_s: float) -> list[str]:
    """Reasons why this machine cannot emulate the network: its cores, and the rate and latency of its switch."""
    problems = []
    compute = sum(host.compute for host in network.hosts)
    if compute > num_cores * _USABLE_CORES:
        problems.append(
            f"{len(network.hosts)} hosts with {compute:g} cores in all need more than {_USABLE_CORES:.0%} of this "
            f"machine's {num_cores}; lower compute to {math.floor(90 * num_cores / len(network.hosts)) / 100:g}, or "
            f"take fewer hosts"
        )
    if network.load() > bits_per_s:
        problems.append(
            f"{len(network.hosts)} hosts sending at once make {format_rate(network.load())}; the switch moves "
            f"{format_rate(bits_per_s)} on this machine: take at most "
            f"{format_rate(bits_per_s / len(network.hosts))} per host, or fewer hosts"
        )
    least_s = min((route.delay_s for route in network.routes.values() if route.delay_s > 0), default=math.inf)
    if least_s < latency_s:
        problems.append(
            f"a delay of {least_s * 1e6:.0f} µs is less than the {latency_s * 1e6:.0f} µs a packet takes through the "
            f"switch on this machine; take a longer one, or 0 for as little as possible"
        )
    return problems
