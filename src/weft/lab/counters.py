"""What crossed the switch, by pair of hosts: counted in shared memory, readable by any rank at any moment.

A rank asks `read_counters()` before and after an exchange; a file of them is written when the lab ends. Bytes are those
of IP packets, headers included. What a host sends to itself goes over its loopback and is never here.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from weft.errors import LaunchError

VARIABLE = "WEFT_LAB_COUNTERS"
"""The environment variable that tells a rank where the counters are: a path, then the number of hosts."""
_PAIR_FIELDS = ("packets", "bytes", "lost", "dropped")
_SWITCH_FIELDS = ("packets", "late_packets", "late_ns", "unroutable")
LATE_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCount:
    """What one host sent another."""

    packets: int
    """Packets that arrived."""
    bytes: int
    """Their bytes."""
    lost: int
    """Packets that the emulated loss took."""
    dropped: int
    """Packets that found a queue full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCount:
    """How the switch itself did."""

    packets: int
    """Packets it delivered."""
    late_packets: int
    """Those it delivered more than a millisecond after their time: it had no processor."""
    late_ns: int
    """The latest, in nanoseconds."""
    unroutable: int
    """Packets to no host of the lab, such as multicast."""


class Counters:
    """The table of counts in shared memory; the switch writes, all read."""

    def __init__(self, fd: int, *, num_hosts: int, writable: bool = False) -> None:
        self.num_hosts = num_hosts
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.table = memoryview(mmap.mmap(fd, table_bytes(num_hosts), access=access)).cast("Q")

    def place(self, source: int, destination: int) -> int:
        """Where the four counts of a pair begin in the table, in the order of PairCount's fields."""
        return (source * self.num_hosts + destination) * len(_PAIR_FIELDS)

    @property
    def switch_place(self) -> int:
        """Where the switch's own counts begin, in the order of SwitchCount's fields."""
        return self.num_hosts**2 * len(_PAIR_FIELDS)

    def pairs(self) -> dict[tuple[int, int], PairCount]:
        """All counts, by (from, to)."""
        return {
            (source, destination): PairCount(**self._fields(self.place(source, destination), _PAIR_FIELDS))
            for source, destination in self._all_pairs()
        }

    def switch(self) -> SwitchCount:
        return SwitchCount(**self._fields(self.switch_place, _SWITCH_FIELDS))

    def to_json(self) -> str:
        """The counts as text: a list of pairs that sent anything, and the switch's own."""
        pairs = [
            {"from": source, "to": destination, **asdict(count)}
            for (source, destination), count in self.pairs().items()
            if any(asdict(count).values())
        ]
        return json.dumps({"hosts": self.num_hosts, "pairs": pairs, "switch": asdict(self.switch())}, indent=1) + "\n"

    def _all_pairs(self) -> Iterator[tuple[int, int]]:
        return ((a, b) for a in range(self.num_hosts) for b in range(self.num_hosts) if a != b)

    def _fields(self, place: int, names: tuple[str, ...]) -> dict[str, int]:
        return dict(zip(names, self.table[place : place + len(names)].tolist(), strict=True))


def table_bytes(num_hosts: int) -> int:
    """Size of the table."""
    return 8 * (num_hosts**2 * len(_PAIR_FIELDS) + len(_SWITCH_FIELDS))


def make_table(num_hosts: int) -> int:
    """A file descriptor of a new, empty table. It has no name, so nothing stays behind."""
    fd = os.memfd_create("weft-lab-counters")
    os.truncate(fd, table_bytes(num_hosts))
    return fd


def read_counters() -> dict[tuple[int, int], PairCount]:
    """For a process inside the lab: what crossed the switch until now, by (from, to)."""
    if VARIABLE not in os.environ:
        raise LaunchError("there are no counters here: this process was not started by `weft lab`")
    path, _, num_hosts = os.environ[VARIABLE].rpartition(" ")
    fd = os.open(path, os.O_RDONLY)
    try:
        return Counters(fd, num_hosts=int(num_hosts)).pairs()
    finally:
        os.close(fd)
