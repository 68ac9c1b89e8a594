"""The arithmetic of the switch: the times at which each packet leaves each line and arrives.

    sent ──> [upload line] ──> delay, jitter, loss ──> [trunk, if any] ──> [download line] ──> delivered

A line serves one packet after the other; a packet that finds more queued than the line's queue holds is dropped. An
*urgent* packet (an empty acknowledgement) overtakes the queue, as under fair queueing in real hosts: behind a full
queue it would stall the stream in the other direction.

Switching is cut-through: a packet on empty lines takes its size over the slowest rate *once*, as a train of small
packets would, though here one packet may be as large as forty of those.

Times are those of the model, not of the clock: a packet handled late still leaves at its own time, so lateness does not
accumulate and a busy line keeps its rate. Only `switch.py` reads clocks and devices.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from weft.lab.network import Network

_AT_TRUNK, _AT_DOWNLOAD, _THERE = 0, 1, 2


class Line:
    """Serialised departures at a rate, and a queue with tail drop."""

    __slots__ = ("_free_at_s", "_limit_s", "_s_per_byte")

    def __init__(self, *, bits_per_s: float, queue_bytes: int) -> None:
        self._s_per_byte = 8 / bits_per_s
        self._limit_s = queue_bytes * self._s_per_byte
        self._free_at_s = -math.inf

    def take(self, now_s: float, num_bytes: int, *, urgent: bool) -> tuple[float, float] | None:
        """Departure times of the packet's first and last bit; None if the queue is full."""
        start_s = max(now_s, self._free_at_s)
        if urgent:
            self._free_at_s = start_s + num_bytes * self._s_per_byte
            return now_s, now_s + num_bytes * self._s_per_byte
        if start_s - now_s > self._limit_s:
            return None
        self._free_at_s = start_s + num_bytes * self._s_per_byte
        return start_s, self._free_at_s


@dataclass(slots=True)
class Delivery:
    """A packet that has arrived."""

    due_s: float
    source: int
    destination: int
    packet: bytes


@dataclass(slots=True)
class Drop:
    """A packet that was lost or dropped."""

    source: int
    destination: int
    by_chance: bool
    """Lost at random; otherwise dropped at a full queue."""


class Fabric:
    """The network as a state machine: packets enter by `send` and leave by `advance` at their time."""

    def __init__(self, network: Network, *, latency_s: float = 0.0, seed: int = 0) -> None:
        """`latency_s` is the real switch's own latency; it is subtracted from every delay."""

        def line(bits_per_s: float) -> Line | None:
            if math.isinf(bits_per_s):
                return None
            return Line(bits_per_s=bits_per_s, queue_bytes=network.queue_bytes(bits_per_s))

        self._uploads = [line(host.upload_bits_per_s) for host in network.hosts]
        self._downloads = [line(host.download_bits_per_s) for host in network.hosts]
        trunks = [line(rate) for rate in network.trunks]
        self._routes = {
            pair: (
                max(0.0, route.delay_s - latency_s),
                route.jitter_s,
                route.loss,
                None if route.trunk is None else trunks[route.trunk],
            )
            for pair, route in network.routes.items()
        }
        self._arrived_s: dict[tuple[int, int], float] = {}
        self._random = random.Random(seed)
        # (time, order of entry, stage, time the last bit is here, source, destination, packet, whether urgent)
        self._events: list[tuple[float, int, int, float, int, int, bytes, bool]] = []
        self._entries = 0
        self.drops: list[Drop] = []
        """Packets dropped since the caller last cleared this list."""

    def send(self, now_s: float, source: int, destination: int, packet: bytes, *, urgent: bool = False) -> None:
        """A host sends a packet. There must be a route to its destination."""
        upload = self._uploads[source]
        taken = (now_s, now_s) if upload is None else upload.take(now_s, len(packet), urgent=urgent)
        if taken is None:
            self.drops.append(Drop(source, destination, by_chance=False))
            return
        first_s, last_s = taken
        delay_s, jitter_s, loss, trunk = self._routes[source, destination]
        if loss and self._random.random() < loss:
            self.drops.append(Drop(source, destination, by_chance=True))
            return
        if jitter_s:
            delay_s = max(0.0, delay_s + self._random.uniform(-jitter_s, jitter_s))
            if not urgent:
                # Order is kept: delays on real paths vary mostly by queueing, and queues keep order.
                delay_s = max(delay_s, self._arrived_s.get((source, destination), 0.0) - first_s)
                self._arrived_s[source, destination] = first_s + delay_s
        stage = _AT_DOWNLOAD if trunk is None else _AT_TRUNK
        self._enter(first_s + delay_s, stage, last_s + delay_s, source, destination, packet, urgent)

    def advance(self, now_s: float) -> list[Delivery]:
        """Process all events until now; returns the packets that arrive, in order."""
        arrived = []
        events = self._events
        while events and events[0][0] <= now_s:
            time_s, _, stage, last_s, source, destination, packet, urgent = heapq.heappop(events)
            if stage == _THERE:
                arrived.append(Delivery(time_s, source, destination, packet))
                continue
            line = self._routes[source, destination][3] if stage == _AT_TRUNK else self._downloads[destination]
            first_s = time_s
            if line is not None:
                taken = line.take(time_s, len(packet), urgent=urgent)
                if taken is None:
                    self.drops.append(Drop(source, destination, by_chance=False))
                    continue
                first_s, last_s = taken[0], max(last_s, taken[1])
            if stage == _AT_TRUNK:
                self._enter(first_s, _AT_DOWNLOAD, last_s, source, destination, packet, urgent)
            else:
                self._enter(last_s, _THERE, last_s, source, destination, packet, urgent)
        return arrived

    def next_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._events[0][0] if self._events else math.inf

    def _enter(
        self, time_s: float, stage: int, last_s: float, source: int, destination: int, packet: bytes, urgent: bool
    ) -> None:
        self._entries += 1
        heapq.heappush(self._events, (time_s, self._entries, stage, last_s, source, destination, packet, urgent))
