"""The exchange between replicas that differ: its buckets of weights, the bytes that it sends, the memory that it takes.

This is the one account of it, without torch: `sync/exchange/weight_buckets.py` makes these buckets, `sync/local.py`
these buffers, and the prediction of memory adds them up (`planning/memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors, is_coded
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.partition.flat_buffers import FlatBuffer, item_bytes
from weft.plan.partition.replicas import keeps_anchor
from weft.plan.partition.wire import CODED, Member, assign_buckets, coded_member, sent_bytes
from weft.plan.plan import Codec, Plan

MAX_EXCHANGES_IN_FLIGHT = 2
"""Buckets of weights under way at once."""

NO_CODEC = Codec()

REPORT_WORDS = 2
"""Words that each replica reports in an exchange: its compute time, and whether it must stop."""

TAIL_ITEM_BYTES = 8
"""The tail of an exchange, in float64: running statistics of BatchNorm, and every replica's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor that a rank's optimizer updates; under ZeRO its part of one, which may be empty."""

    numel: int
    dtype: str
    name: str = ""
    shape: tuple[int, ...] = ()
    """That of the whole tensor, of which this may be a range."""
    start: int = 0
    """The first element of that range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBucket:
    """Weights of one dtype that travel together."""

    members: tuple[int, ...]
    """Their places among all weights."""
    numel: int
    dtype: str
    """The format in which they are summed: at least 32 bits."""
    coded: tuple[CodedTensor, ...] = ()
    """Its tensors, if a codec compresses them; it then compresses all of the bucket."""

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


def exchange_buckets(weights: Sequence[Weight], bucket_bytes: int, codec: Codec = NO_CODEC) -> list[ExchangeBucket]:
    """The buckets of these weights, in the order of exchange; empty weights are in none. Those that a codec compresses
    share no bucket with others."""
    there = [(place, weight) for place, weight in enumerate(weights) if weight.numel]
    members = []
    for _, weight in there:
        member = Member(numel=weight.numel, item_bytes=item_bytes(_summed_in(weight.dtype)), kind=weight.dtype)
        members.append(coded_member(member) if is_coded(codec, weight.shape) else member)
    return [
        ExchangeBucket(
            members=tuple(there[index][0] for index in inside),
            numel=sum(members[index].numel for index in inside),
            dtype=_summed_in(members[inside[0]].kind.removeprefix(CODED)),
            coded=_coded([there[index][1] for index in inside]) if members[inside[0]].kind.startswith(CODED) else (),
        )
        for inside in assign_buckets(members, bucket_bytes, first_bytes=bucket_bytes)
    ]


def _coded(weights: Sequence[Weight]) -> tuple[CodedTensor, ...]:
    return coded_tensors([(weight.name, weight.shape, weight.numel, weight.start) for weight in weights])


def bucket_messages(bucket: ExchangeBucket, plan: Plan, *, step: int = 0) -> tuple[Message, ...]:
    """The messages in which a bucket travels after a step, counted from 0."""
    if not bucket.coded:
        return (Message(numel=bucket.numel, dtype=bucket.dtype),)
    return messages_of(plan.codec, bucket.coded, bucket.dtype, num_replicas=plan.num_replicas, step=step)


def kept_weights(buffers: Sequence[FlatBuffer], part: int) -> list[Weight]:
    """The weights that a rank updates, where parameters lie in these buffers and it keeps this part of each."""
    return [
        Weight(numel=stop - start, dtype=one.master, name=name, shape=shape, start=start)
        for one in buffers
        if one.trainable
        for member, (name, shape) in enumerate(zip(one.names, one.shapes, strict=True))
        for start, stop in (one.flat.kept(member, part),)
    ]


def exchange_bytes(buckets: Sequence[ExchangeBucket], plan: Plan, *, num_statistics: int = 0, step: int = 0) -> int:
    """Bytes that a rank sends along the axis of replicas in one exchange, after a step counted from 0;
    `num_statistics` are elements, if any."""
    size = plan.num_replicas
    messages = [message for one in buckets for message in bucket_messages(one, plan, step=step)]
    tail = sent_bytes("all-reduce", (num_statistics + size * REPORT_WORDS) * TAIL_ITEM_BYTES, size)
    return sum(message.sent_bytes(size) for message in messages) + tail


def outer_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> int:
    """Bytes of what a rank keeps from exchange to exchange: the weights of the last one, and the outer momentum."""
    copies = keeps_anchor(plan) + (plan.data.outer == "nesterov")
    return copies * sum(one.num_bytes for one in buckets)


def exchange_buffer_bytes(buckets: Sequence[ExchangeBucket]) -> int:
    """Bytes of the buffers from which weights are sent as they are, which are kept: those of two buckets, that
    alternate. What a codec compresses has others (`codec_memory.py`)."""
    plain = [one for one in buckets if not one.coded]
    return sum(
        _largest((one.dtype, one.num_bytes) for one in plain[turn::MAX_EXCHANGES_IN_FLIGHT])
        for turn in range(MAX_EXCHANGES_IN_FLIGHT)
    )


def exchange_temporary_bytes(buckets: Sequence[ExchangeBucket], plan: Plan, *, on_host: bool) -> int:
    """Bytes of temporaries while replicas exchange a bucket: the distance of its weights from their mean, and the mean
    itself where the change since the last exchange travels; `on_host`: that is computed elsewhere, from a copy."""
    return (1 + (keeps_anchor(plan) and not on_host)) * max((one.num_bytes for one in buckets), default=0)


def _summed_in(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _largest(sizes: Iterable[tuple[str, int]]) -> int:
    """The largest bytes of each dtype, added up: every dtype has a buffer of its own."""
    largest: dict[str, int] = {}
    for dtype, num_bytes in sizes:
        largest[dtype] = max(largest.get(dtype, 0), num_bytes)
    return sum(largest.values())
