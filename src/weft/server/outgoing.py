"""What a server sends to a worker: its next clock and the weights for it, the optimizer's state, what is not trained.

Frames of weights are the weights themselves: nothing is copied. Ranks of this host are told where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.server.protocol.frames import frame_of
from weft.server.protocol.message import NO_AGES, Begin, Buffer, Kind, Malformed, Message, pack_begin
from weft.server.protocol.optimizer_state import pack_states
from weft.server.protocol.settings import MASTER

if TYPE_CHECKING:
    from weft.server.server import ParameterServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message to a connection."""

    peer: bytes
    message: Message
    lends: bool = field(default=False, compare=False)
    """Its frames are the weights themselves: who sends them tells the server until when they are read."""


def send_clock(server: ParameterServer, worker: int) -> Iterator[Reply]:
    """What a worker needs for its next clock: its share of the data, then the weights, layer by layer."""
    assert server.store is not None and server.layout is not None and server.mode is not None
    assert server.settings is not None and server.updates is not None
    clock = server.arrivals[worker].next_clock
    weights = server.store.take(worker)
    told, sharing = server.mode.told(worker), server.mode.sharing
    begin = Begin(
        index=sharing.index(worker),
        num_workers=len(sharing),
        ticket=server.num_tickets,
        loss_sum=told.loss_sum,
        count=told.count,
        age=told.age,
        step=server.updates.step,
        position=server.updates.position,
        saved=server.recovery.saved_of(worker, clock),
        is_skipped=told.is_skipped,
        used=server.mode.used(worker),
        num_dropped=server.mode.num_dropped,
        ages=server.store.count_ages(len(NO_AGES)),
        num_lost=server.mode.num_lost,
    )
    server.num_tickets += 1
    peers = server.members.peers_of(worker)
    for place, peer in sorted(peers.items()):
        begins = server.message(Kind.BEGIN, worker, clock=clock, place=place, frames=(pack_begin(begin),))
        yield Reply(peer=peer, message=begins)
    sharing_memory = _show(server, worker, clock)
    for bucket, parts in enumerate(server.layout.buckets):
        for place in server.layout.holders(bucket):
            if place in sharing_memory and server.shares.has_weights(server.layout, bucket):
                sent = server.message(Kind.WEIGHTS_SHARED, worker, clock=clock, place=place, bucket=bucket)
                yield Reply(peer=peers[place], message=sent)
                continue
            frames = tuple(frame_of(weights[part]) for part in parts)
            sent = server.message(Kind.WEIGHTS, worker, clock=clock, place=place, bucket=bucket, frames=frames)
            yield Reply(peer=peers[place], message=sent, lends=server.settings.pull == MASTER)


def _show(server: ParameterServer, worker: int, clock: int) -> set[int]:
    """Tell a worker's ranks that share memory with this server, and hold some of its weights, where those of this
    version are; returns which ranks these are. Another rank would never say that it has taken them."""
    assert server.store is not None and server.layout is not None
    layout, shares_of = server.layout, server.shares
    reading = {
        place
        for bucket in range(len(layout.buckets))
        if shares_of.has_weights(layout, bucket)
        for place in layout.holders(bucket)
    }
    shares = {place: shares_of.of(worker, place) for place in server.members.peers_of(worker) if place in reading}
    found = {place: share for place, share in shares.items() if share is not None}
    if not found or (memory := server.store.share(shares_of.weight_places(layout))) is None:
        return set()
    for share in found.values():
        share.show(clock, memory)
        server.store.lend_shared(functools.partial(share.has_taken, clock))
    return set(found)


def send_state(server: ParameterServer, peer: bytes, message: Message) -> Iterator[Reply]:
    """The optimizer's state of what a rank holds, with the weights of the same version, which it computes with from
    now on."""
    assert server.store is not None and server.layout is not None
    server.store.take(message.worker)
    weights = [one.detach() for one in server.store.parameters]
    for bucket, parts in enumerate(server.layout.buckets):
        if message.place in server.layout.holders(bucket):
            frames: list[Buffer] = [frame_of(weights[part]) for part in parts]
            frames += pack_states([server.store.copy_of_state(part) for part in parts])
            sent = server.message(
                Kind.STATE,
                message.worker,
                clock=message.clock,
                place=message.place,
                bucket=bucket,
                frames=tuple(frames),
            )
            yield Reply(peer=peer, message=sent, lends=True)


def send_fixed(server: ParameterServer, peer: bytes, message: Message) -> Iterator[Reply]:
    """What a rank holds and does not train; raises Malformed before there is any."""
    if server.store is None or server.layout is None:
        raise Malformed("asked for what is not trained before the first weights")
    for bucket, frames in enumerate(server.store.fixed):
        if message.place in server.layout.fixed_holders(bucket):
            sent = server.message(Kind.FIXED, message.worker, place=message.place, bucket=bucket, frames=frames)
            yield Reply(peer=peer, message=sent)
