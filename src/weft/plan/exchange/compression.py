"""How much a run compresses what its replicas exchange: dense bytes in float32 over the bytes that a rank sends.

*Dense* is what the same ranks would send if they all-reduced every gradient in float32 after every step, so local steps
count too; workers of servers would send theirs once. *Sent* is everything that a rank sends to its counterparts in
other replicas, or to servers, whole run, warm-up included: messages, small tensors as they are, the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.plan.exchange.gradient_exchange import INSIDE
from weft.plan.partition.host_levels import BETWEEN_HOSTS, find_host_place
from weft.plan.partition.one_worker import is_served
from weft.plan.partition.replicas import state_axes
from weft.plan.partition.served_wire import SERVERS
from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import Plan

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Bytes of one rank over a whole run."""

    dense_bytes: int
    sent_bytes: int
    is_served: bool = False
    """Gradients were sent to servers, each once, and not to other replicas."""

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.sent_bytes


def exchanging_axes(plan: Plan) -> tuple[str, ...]:
    """The axes under which the bytes between replicas are counted; what stays inside a host is not."""
    if is_served(plan):
        return (SERVERS,)
    if plan.replica_axis is not None:
        return (plan.replica_axis,)
    if plan.data.shard != "nothing":
        return "replicate", f"replicate{BETWEEN_HOSTS}"
    return tuple(dict.fromkeys((state_axes(plan), "data", INSIDE, f"data{BETWEEN_HOSTS}")))


def num_exchanging(plan: Plan) -> int:
    """Ranks that exchange one copy of what they keep."""
    if plan.replica_axis is not None:
        return plan.num_replicas
    return plan.axes.replicate if plan.data.shard != "nothing" else plan.axes.state


def dense_bytes(numel: int, plan: Plan, *, num_steps: int, hosts: Sequence[int] = ()) -> int:
    """Bytes that a rank would send in so many steps without compression; `numel` elements are its part of gradients.
    Where codecs act between hosts, what leaves its host: it would exchange the slice that it compresses."""
    if is_served(plan):
        return num_steps * numel * _FLOAT32_BYTES
    place = find_host_place(plan, hosts, 0)
    size = num_exchanging(plan) if place is None else len(place.places)
    mine = numel if place is None else -(-numel // len(place.places[0]))
    return num_steps * sent_bytes("all-reduce", mine * _FLOAT32_BYTES, size)


def between_replicas(sent: Mapping[str, int], plan: Plan) -> int:
    """Of bytes by axis those between replicas."""
    return sum(sent.get(axis, 0) for axis in exchanging_axes(plan))


def bytes_of_steps(bytes_in: Callable[[int], int], num_steps: int, *, settled: int = 0, period: int = 1) -> int:
    """The sum over steps from 0 on. From the step `settled` on what is sent repeats itself after `period` steps."""
    first = sum(bytes_in(step) for step in range(min(num_steps, settled)))
    rounds, rest = divmod(max(num_steps - settled, 0), period)
    each = [bytes_in(settled + step) for step in range(period if rounds else rest)]
    return first + rounds * sum(each) + sum(each[:rest])
