"""How long messages between replicas take: a latency for each kind of exchange, and the rate of a replica's link.

weft exchanges in two ways, which differ in how many messages follow each other:

    ring      an all-reduce: 2 (W - 1) rounds between W replicas
    direct    every replica to every other at once (`comm/gloo.py`): one round, whatever W is

A round takes two latencies over gloo, because a message leaves when its receiver has told that it is ready. In the lab,
4 hosts with links of 25.2 ms: all-reduce 303 ms = 6 rounds, gather 50 ms = 1 round (docs/profile.md). Where a cluster's
collectives were measured, their own latency and rate count, and a round is what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.errors import ClusterError
from weft.plan.exchange.messages import Message
from weft.plan.exchange.weight_exchange import MAX_BUCKETS_IN_FLIGHT
from weft.planning.compression import Links, links_of
from weft.profiles.cluster import Cluster, Timing, num_rounds, wire_share

LATENCIES_PER_ROUND = 2
"""The receiver's word that it is ready, and the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What an exchange in one of the two ways takes."""

    latency_s: float
    """Seconds that an exchange of nothing takes."""
    bytes_per_s: float
    """Bytes that a replica sends per second; infinite: they take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What is between the replicas."""

    num_replicas: int
    ranks_per_link: int = 1
    """Ranks of a replica's host, which share its link."""
    latency_s: float
    """Latency of the slowest link."""
    bytes_per_s: float
    """Rate of the slowest link."""
    ring: CollectiveCost
    direct: CollectiveCost

    def cost_of(self, message: Message) -> CollectiveCost:
        """The cost of a message that is exchanged at once."""
        return self.ring if message.adds_up else self.direct

    def with_links(self, *, bytes_per_s: float | None = None, latency_s: float | None = None) -> Network:
        """The same replicas with links of another rate, or latency; what is not given stays as it is."""
        assumed = uniform_network(
            num_replicas=self.num_replicas,
            ranks_per_link=self.ranks_per_link,
            bytes_per_s=self.bytes_per_s if bytes_per_s is None else bytes_per_s,
            latency_s=self.latency_s if latency_s is None else latency_s,
        )

        def mixed(new: CollectiveCost, old: CollectiveCost) -> CollectiveCost:
            return CollectiveCost(
                latency_s=old.latency_s if latency_s is None else new.latency_s,
                bytes_per_s=old.bytes_per_s if bytes_per_s is None else new.bytes_per_s,
            )

        return replace(assumed, ring=mixed(assumed.ring, self.ring), direct=mixed(assumed.direct, self.direct))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatePart:
    """Buckets of an exchange that take so many phases, one after the other."""

    num_phases: int
    latency_s: float
    bandwidth_s: float
    """Seconds in which their bytes leave, and those of buckets with more phases, which leave first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of the whole model between replicas."""

    messages: tuple[Message, ...]
    codec_s: float = 0.0
    buckets: tuple[tuple[Message, ...], ...] = ()
    """The same messages by bucket, if the exchange can be merged later."""

    def bandwidth_s(self, network: Network, *, in_rings: bool) -> float:
        """Seconds in which all bytes leave."""
        costs = [(one, network.cost_of(one) if in_rings else network.direct) for one in self.messages]
        return sum(one.sent_bytes(network.num_replicas) / cost.bytes_per_s for one, cost in costs)

    def ring_latency_s(self, network: Network) -> float:
        """Seconds of latency of an exchange that is waited for, with two buckets under way at once."""
        adding = sum(one.adds_up for one in self.messages)
        pairs = [-(-number // MAX_BUCKETS_IN_FLIGHT) for number in (adding, len(self.messages) - adding)]
        return pairs[0] * network.ring.latency_s + pairs[1] * network.direct.latency_s

    def late_parts(self, network: Network) -> Iterator[LatePart]:
        """The parts, of an exchange that is merged later, whose phases begin in the same steps."""
        for num_phases in sorted({_num_phases(bucket) for bucket in self.buckets}):
            messages = tuple(one for bucket in self.buckets if _num_phases(bucket) >= num_phases for one in bucket)
            yield LatePart(
                num_phases=num_phases,
                latency_s=num_phases * network.direct.latency_s,
                bandwidth_s=Exchange(messages=messages).bandwidth_s(network, in_rings=False),
            )


def _num_phases(bucket: Sequence[Message]) -> int:
    """Phases that a bucket takes in an exchange that is merged later: two per message that adds up."""
    return sum(2 if one.adds_up else 1 for one in bucket)


def uniform_network(*, num_replicas: int, bytes_per_s: float, latency_s: float, ranks_per_link: int = 1) -> Network:
    """Replicas with equal links, of which no collective was measured."""
    round_s = LATENCIES_PER_ROUND * latency_s
    ring_s = num_rounds("all-reduce", num_replicas) * round_s
    return Network(
        num_replicas=num_replicas,
        ranks_per_link=ranks_per_link,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        ring=CollectiveCost(latency_s=ring_s, bytes_per_s=bytes_per_s),
        direct=CollectiveCost(latency_s=round_s, bytes_per_s=bytes_per_s),
    )


def network_of(cluster: Cluster, num_replicas: int | None = None) -> Network:
    """One replica per host, or per rank where there is one host; another number is taken to have equal links."""
    if cluster.num_ranks < 2:
        raise ClusterError(f"{cluster.name} has {cluster.num_ranks} rank and so no link; profile 2 or more")
    counts = Counter(device.host for device in cluster.devices)
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{number} on host {host}" for host, number in sorted(counts.items()))
        raise ClusterError(
            f"{cluster.name} has ranks {told}, so replicas of equal size would span hosts; profile as many on each host"
        )
    replicas = links_of(cluster, num_replicas)
    kind = "network" if cluster.num_hosts > 1 else cluster.link_between(0, 1)
    links = [link for link in cluster.links if link.kind == kind]
    if not links:
        raise ClusterError(f"{cluster.name} has {cluster.num_hosts} hosts and no link between them; profile it again")
    bare = uniform_network(
        num_replicas=replicas.num_replicas,
        ranks_per_link=replicas.ranks_per_link,
        latency_s=max(link.alpha_s for link in links),
        bytes_per_s=min(link.bytes_per_s for link in links),
    )
    ring = _timings(cluster, "all-reduce", kind, replicas)
    direct = [one for name in ("reduce-scatter", "all-gather") for one in _timings(cluster, name, kind, replicas)]
    return replace(bare, ring=_measured(bare.ring, ring, replicas), direct=_measured(bare.direct, direct, replicas))


def _timings(cluster: Cluster, collective: str, kind: str, replicas: Links) -> list[Timing]:
    """The fastest transport's, on the number of ranks that is nearest to that of replicas."""
    found = [one for one in cluster.timings if (one.collective, one.link) == (collective, kind)]
    nearest = min((abs(one.num_ranks - replicas.num_replicas), one.num_ranks) for one in found)[1] if found else 0
    equal = [one for one in found if one.num_ranks == nearest]
    return [min(equal, key=lambda one: one.time_s(1 << 20))] if equal else []


def _measured(bare: CollectiveCost, timings: Sequence[Timing], replicas: Links) -> CollectiveCost:
    """The mean of the collectives of a kind, in their own latency and in seconds per byte sent."""
    if not timings:
        return bare
    is_ring = timings[0].collective == "all-reduce"
    latencies = [one.time_s(0, replicas.num_replicas) if is_ring else one.alpha_s for one in timings]
    byte_s = [1 / (one.bytes_per_s * wire_share(one.collective, one.num_ranks)) for one in timings]
    return CollectiveCost(latency_s=sum(latencies) / len(timings), bytes_per_s=len(timings) / sum(byte_s))
