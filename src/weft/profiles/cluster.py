"""A cluster as plain data: each rank's device, the links, collectives timed on them, and codecs.

An exchange of n bytes takes alpha + n / beta seconds: a latency and a rate, fitted to measured times. A collective that
was measured on as many ranks is read off its own line. Others are computed from the nearest that was measured, or from
the bare link, by the rounds and bytes of the usual algorithm:

    all-reduce       2 (p - 1) rounds, 2 n (p - 1) / p bytes     reduce-scatter, then all-gather, in a ring
    reduce-scatter   p - 1 rounds, n (p - 1) / p bytes           likewise all-gather, all-to-all, scatter, gather
    broadcast        log2 p rounds, n bytes                      likewise reduce
    send             1 round, n bytes

Figures come from `measure/cluster.py`, from a file (`cluster_text.py`) or from `presets.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from weft.errors import ClusterError, WeftError
from weft.plan.fields import Choice, Real, Section, Whole, declare, facts_of, one_of
from weft.plan.partition.wire import Collective, sent_bytes
from weft.plan.plan import CODECS, Codec

LINKS = ("shared-memory", "loopback", "device", "network")
TRANSPORTS = ("c10d", "shared")
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

_MISS = "The worst miss of this line at a size measured, as a factor less 1: 1 is double or half."
# Large enough that rounding up to whole bytes does not show in a share of it.
_UNIT_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Text:
    """Text of at least one character."""

    allowed: str = "text, in quotes"

    def accept(self, value: object) -> object:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be {self.allowed}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two hosts, the lower number first; the same twice for a link inside one."""

    allowed: str = "a list of two host numbers, the lower first"

    def accept(self, value: object) -> object:
        whole = isinstance(value, list | tuple) and all(type(host) is int and host >= 0 for host in value)
        if not whole or len(value) != 2 or value[0] > value[1]:  # type: ignore[arg-type, index]
            raise ValueError(f"must be {self.allowed}")
        return tuple(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection(Section):
    """A row of one of the cluster's lists."""

    error: ClassVar[type[WeftError]] = ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(ClusterSection):
    """One rank and the processor it computes on, whose speeds hold while all other ranks of its host compute, too."""

    rank: int = declare(0, Whole(minimum=0), "The rank, counted over all hosts.")
    host: int = declare(0, Whole(minimum=0), "The host it runs on, counted from 0.")
    kind: str = declare("", Choice(("cpu", "cuda")), "The kind of processor.")
    name: str = declare("", Text(), "The processor's name.")
    memory_bytes: int = declare(0, Whole(minimum=1), "Memory it may use: its share of the GPU's or the host's.")
    copy_bytes_per_s: float = declare(0.0, Real(above=0), "Bytes copied per second, from memory to memory.")
    fp32_flops_per_s: float = declare(0.0, Real(above=0), "Operations per second in a product of fp32 matrices.")
    bf16_flops_per_s: float = declare(0.0, Real(minimum=0), "The same in bf16; 0: not supported, or not measured.")
    fp16_flops_per_s: float = declare(0.0, Real(minimum=0), "The same in fp16; 0: not supported, or not measured.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(ClusterSection):
    """One message between two ranks: on one host, or on two."""

    kind: str = declare("", Choice(LINKS), "The path of the bytes; device: from GPU to GPU in a host.")
    transport: str = declare("c10d", Choice(TRANSPORTS), "The `[comm] transport` that moves them.")
    hosts: tuple[int, int] = declare((0, 0), Pair(), "The hosts of the two ranks.")
    alpha_s: float = declare(-1.0, Real(minimum=0), "Seconds an empty message takes, one way.")
    bytes_per_s: float = declare(0.0, Real(above=0), "Further bytes per second.")
    miss: float = declare(0.0, Real(minimum=0), _MISS)

    def time_s(self, num_bytes: float, collective: str = "send", num_ranks: int = 2) -> float:
        """Seconds of one message, or of a collective over equal links that nothing else uses."""
        share = wire_share(collective, num_ranks)
        return num_rounds(collective, num_ranks) * self.alpha_s + share * num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(ClusterSection):
    """One collective on a group of some size, while all groups of that size on these ranks do the same."""

    collective: str = declare("", Choice(COLLECTIVES), "The collective.")
    link: str = declare("", Choice(LINKS), "The slowest kind of link inside the group.")
    transport: str = declare("c10d", Choice(TRANSPORTS), "The `[comm] transport` of the group.")
    num_ranks: int = declare(0, Whole(minimum=2), "Ranks in the group.")
    alpha_s: float = declare(-1.0, Real(minimum=0), "Seconds the collective takes on an empty buffer.")
    bytes_per_s: float = declare(0.0, Real(above=0), "Further bytes of the whole buffer per second.")
    miss: float = declare(0.0, Real(minimum=0), _MISS)

    def time_s(self, num_bytes: float, num_ranks: int | None = None) -> float:
        """Seconds on a buffer of this size; on another number of ranks, by the algorithm's rounds and bytes."""
        count = num_ranks or self.num_ranks
        rounds = num_rounds(self.collective, count) / num_rounds(self.collective, self.num_ranks)
        share = wire_share(self.collective, count) / wire_share(self.collective, self.num_ranks)
        return rounds * self.alpha_s + share * num_bytes / self.bytes_per_s


def _as_in_plans(name: str) -> Any:
    """A field of `[codec]`, with its kind and sentence."""
    facts = facts_of(Codec)[name]
    return declare(facts.default, facts.kind, facts.doc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression(ClusterSection):
    """One codec on the slowest device, while all ranks compress: encoding and decoding, without the wire."""

    name: str = declare("", Choice(CODECS), "The `[codec] name`; the next four fields are as there.")
    density: float = _as_in_plans("density")
    bits: int = _as_in_plans("bits")
    rank: int = _as_in_plans("rank")
    levels: int = _as_in_plans("levels")
    alpha_s: float = declare(-1.0, Real(minimum=0), "Seconds that a bucket takes, whatever its size.")
    element_ns: float = declare(-1.0, Real(minimum=0), "Further nanoseconds per element.")
    replica_element_ns: float = declare(
        -1.0, Real(minimum=0), "Further nanoseconds per element and replica, where every replica's message is decoded."
    )

    @property
    def codec(self) -> Codec:
        """The section of a plan that asks for it."""
        return Codec(name=self.name, density=self.density, bits=self.bits, rank=self.rank, levels=self.levels)

    def time_s(self, numel: float, *, num_replicas: int, num_buckets: int = 1) -> float:
        """Seconds in which a rank encodes this many elements once and decodes what all replicas sent of them."""
        each_ns = self.element_ns + num_replicas * self.replica_element_ns
        return num_buckets * self.alpha_s + numel * each_ns * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in the order of rank, the links between them, collectives on these links, and codecs."""

    name: str = "cluster"
    measured: bool = False
    """The figures were measured on it; a preset's are typical ones."""
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    timings: tuple[Timing, ...] = ()
    compressions: tuple[Compression, ...] = ()

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ClusterError(problems)

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def num_hosts(self) -> int:
        return len({device.host for device in self.devices})

    def link_between(self, first: int, second: int) -> str:
        """The fastest kind of link between two ranks."""
        hosts = tuple(sorted((self.devices[first].host, self.devices[second].host)))
        found = [link for link in self.links if link.hosts == hosts]
        if not found:
            raise ClusterError(
                f"{self.name} describes no link between hosts {hosts[0]} and {hosts[1]}; profile it again"
            )
        return min(found, key=lambda link: link.time_s(1 << 20)).kind

    def time_s(self, collective: Collective, num_bytes: float, *, num_ranks: int, link: str) -> float:
        """Seconds a collective takes on a buffer, counted as `plan/partition/wire.py` counts it, over links of a kind.

        The faster of several transports counts, and between hosts the slowest pair: a group waits for its last rank.
        """
        if num_ranks < 2:
            return 0.0
        timings = [each for each in self.timings if (each.collective, each.link) == (collective, link)]
        if timings:
            nearest_size = min((abs(each.num_ranks - num_ranks), each.num_ranks) for each in timings)[1]
            return min(each.time_s(num_bytes, num_ranks) for each in timings if each.num_ranks == nearest_size)
        transports = {each.transport for each in self.links if each.kind == link}
        if not transports:
            known = tuple(dict.fromkeys(each.kind for each in self.links)) or ("none",)
            raise ClusterError(f'{self.name} has no link of kind "{link}"; it has {one_of(known)}')
        return min(
            max(
                each.time_s(num_bytes, collective, num_ranks)
                for each in self.links
                if (each.kind, each.transport) == (link, transport)
            )
            for transport in transports
        )

    def _problems(self) -> Iterator[str]:
        ranks = [device.rank for device in self.devices]
        if not ranks or ranks != list(range(len(ranks))):
            yield f"devices have the ranks {ranks}; list each rank from 0 up, once, in order"
        hosts = sorted({device.host for device in self.devices})
        if hosts != list(range(len(hosts))):
            yield f"devices are on the hosts {hosts}; count hosts from 0, without gaps"
        for link in self.links:
            if link.hosts[1] >= len(hosts):
                yield f"a link joins hosts {list(link.hosts)}, and there are {len(hosts)} hosts; count them from 0"
            if (link.kind == "network") != (link.hosts[0] != link.hosts[1]):
                yield f'a link of kind "{link.kind}" joins hosts {list(link.hosts)}; only network links join two'
        for timing in self.timings:
            if timing.num_ranks > len(ranks):
                yield f"{timing.collective} was timed on {timing.num_ranks} ranks, there are {len(ranks)}; add devices"


def num_rounds(collective: str, num_ranks: int) -> int:
    """Messages that follow each other, one waiting for the one before."""
    match collective:
        case "all-reduce":
            return 2 * (num_ranks - 1)
        case "broadcast" | "reduce":
            return (num_ranks - 1).bit_length()
        case "send":
            return 1
        case _:
            return num_ranks - 1


def wire_share(collective: str, num_ranks: int) -> float:
    """Bytes that the busiest rank sends, as a share of the buffer's."""
    name = COLLECTIVES[COLLECTIVES.index(collective)]
    return sent_bytes(name, _UNIT_BYTES, num_ranks) / _UNIT_BYTES
