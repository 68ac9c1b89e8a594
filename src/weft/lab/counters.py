"""Packets and bytes through the switch, by pair of hosts: counted in shared memory that any rank can read.

A rank calls `read_counters()` before and after an exchange; they are written to a file when the lab ends. Bytes are
those of IP packets, headers included. Traffic inside a host uses its loopback and is not counted.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from typing import NamedTuple

from weft.errors import LaunchError

VARIABLE = "WEFT_LAB_COUNTERS"
"""Environment variable with the place of the counters: a path, then the number of hosts."""
LATE_S = 1e-3


class PairCount(NamedTuple):
    """Traffic from one host to another."""

    packets: int
    """Packets that arrived."""
    bytes: int
    """Bytes of those packets."""
    lost: int
    """Packets lost at random."""
    dropped: int
    """Packets dropped at a full queue."""


class SwitchCount(NamedTuple):
    """Traffic and lateness of the switch itself."""

    packets: int
    """Packets delivered."""
    late_packets: int
    """Packets delivered more than a millisecond late, for lack of a processor."""
    late_ns: int
    """Largest lateness in nanoseconds."""
    unroutable: int
    """Packets to no host of the lab, such as multicast."""


class Counters:
    """The table of counts in shared memory, which the switch writes and all others read."""

    def __init__(self, fd: int, *, num_hosts: int, writable: bool = False) -> None:
        self.num_hosts = num_hosts
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.table = memoryview(mmap.mmap(fd, 0, access=access)).cast("Q")

    def place(self, source: int, destination: int) -> int:
        """Index of a pair's first count in the table; counts are in the order of PairCount's fields."""
        return (source * self.num_hosts + destination) * len(PairCount._fields)

    @property
    def switch_place(self) -> int:
        """Index of the switch's first count; counts are in the order of SwitchCount's fields."""
        return self.num_hosts**2 * len(PairCount._fields)

    def pairs(self) -> dict[tuple[int, int], PairCount]:
        """Counts by (source, destination)."""
        return {
            pair: PairCount._make(self.table[self.place(*pair) :][: len(PairCount._fields)])
            for pair in itertools.permutations(range(self.num_hosts), 2)
        }

    def switch(self) -> SwitchCount:
        return SwitchCount._make(self.table[self.switch_place :])

    def to_json(self) -> str:
        """Counts of all pairs with traffic, and of the switch."""
        pairs = [
            {"from": source, "to": destination, **count._asdict()}
            for (source, destination), count in self.pairs().items()
            if any(count)
        ]
        return json.dumps({"hosts": self.num_hosts, "pairs": pairs, "switch": self.switch()._asdict()}, indent=1) + "\n"


def make_table(num_hosts: int) -> int:
    """A file descriptor of a new table. It has no name, so no file is left behind."""
    fd = os.memfd_create("weft-lab-counters")
    os.truncate(fd, 8 * (num_hosts**2 * len(PairCount._fields) + len(SwitchCount._fields)))
    return fd


def read_counters() -> dict[tuple[int, int], PairCount]:
    """For a process inside the lab: traffic through the switch so far, by (source, destination)."""
    if VARIABLE not in os.environ:
        raise LaunchError("there are no counters here: this process was not started by `weft lab`")
    path, _, num_hosts = os.environ[VARIABLE].rpartition(" ")
    fd = os.open(path, os.O_RDONLY)
    try:
        return Counters(fd, num_hosts=int(num_hosts)).pairs()
    finally:
        os.close(fd)
