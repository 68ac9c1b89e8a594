"""The bytes that pass between a rank of a worker and each of its servers, headers included: in one step, and of what is
not trained, once.

    sent        a message per bucket of gradients that this rank speaks for, and a commit to every server
    received    a message per bucket of weights that it holds, and one from every server that says the clock begins

Messages are longer than exchanges between ranks, whose headers nobody counts: they are the whole of what a worker says,
so `server/protocol/connection.py` counts every byte that it hands to ZeroMQ, and tests require the two to be equal.
What ZeroMQ adds (a few bytes per frame, CURVE's 33), heartbeats, and what a worker says when it joins is not in it, but
what is not trained (frozen parameters and buffers), which it takes then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft.plan.partition.server_shards import ServedTensor, assign_buckets, assign_parts

SERVERS = "servers"
"""The axis under which bytes sent to servers are counted."""
HEADER_BYTES = 56
COMMIT_BYTES = 64
BEGIN_BYTES = 144
"""As `server/protocol/message.py` packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTraffic:
    """Between one rank of a worker and one server."""

    sent: int
    received: int


def served_step_bytes(
    tensors: Sequence[ServedTensor],
    *,
    num_servers: int,
    bucket_bytes: int,
    splits: bool = True,
    place: int = 0,
    pull_item_bytes: int | None = None,
    unused: Collection[str] = (),
) -> tuple[ServedTraffic, ...]:
    """By server: the bytes of one step of the rank `place` of a worker that has these tensors.

    `splits`: large tensors are cut over servers, which LARS and LAMB do not allow. `pull_item_bytes`: of an element of
    the weights that servers send, unless it is that of the tensor. `unused`: tensors that get no gradient in this step.
    """
    found = []
    for parts in assign_parts(tensors, num_servers, splits=splits, most_bytes=bucket_bytes):
        sent, received = HEADER_BYTES + COMMIT_BYTES, HEADER_BYTES + BEGIN_BYTES
        for bucket in assign_buckets(tensors, parts, bucket_bytes=bucket_bytes):
            inside = [(tensors[parts[number].tensor], parts[number].numel) for number in bucket]
            used = [(one, numel) for one, numel in inside if one.name not in unused]
            holders = inside[0][0].holders
            if holders[0] == place and used:
                sent += HEADER_BYTES + sum(numel * one.item_bytes for one, numel in used)
            if place in holders:
                received += HEADER_BYTES + sum(numel * (pull_item_bytes or one.item_bytes) for one, numel in inside)
        found.append(ServedTraffic(sent=sent, received=received))
    return tuple(found)


def served_fixed_bytes(
    fixed: Sequence[ServedTensor], *, num_servers: int, bucket_bytes: int, place: int = 0, gives_first: bool = False
) -> tuple[ServedTraffic, ...]:
    """By server: the bytes of what is not trained, as the rank `place` of a worker takes it once, when its first clock
    begins. `gives_first`: it gives the first values, too."""
    found = []
    for parts in assign_parts(fixed, num_servers, most_bytes=bucket_bytes):
        sent, received = 0, 0
        for bucket in assign_buckets(fixed, parts, bucket_bytes=bucket_bytes):
            num_bytes = HEADER_BYTES + sum(parts[one].numel * fixed[parts[one].tensor].item_bytes for one in bucket)
            holders = fixed[parts[bucket[0]].tensor].holders
            sent += num_bytes * (gives_first and holders[0] == place)
            received += num_bytes * (place in holders)
        asks = HEADER_BYTES if received else 0
        found.append(ServedTraffic(sent=sent + asks, received=received))
    return tuple(found)
