"""The exchange between replicas that differ: its buckets of weights, the bytes that it sends, the memory that it takes.

This is the one account of it, without torch: `sync/exchange/weight_buckets.py` makes these buckets, `sync/local.py`
these buffers, and the prediction of memory adds them up (`planning/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors, is_coded
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.late_merges import (
    fragment_sent_after,
    max_in_flight,
    merges_late,
    uses_delayed_averaging,
    uses_streaming,
)
from weft.plan.partition.flat_buffers import FlatBuffer, item_bytes
from weft.plan.partition.replicas import keeps_anchor
from weft.plan.partition.wire import CODED, Collective, Member, assign_buckets, coded_member, sent_bytes
from weft.plan.plan import Codec, Plan

MAX_BUCKETS_IN_FLIGHT = 2
"""Buckets of weights under way at once."""

NO_CODEC = Codec()

REPORT_WORDS = 2
"""Words that each replica reports in an exchange: its compute time, and whether it must stop."""

DELAY_WORDS = 4
"""Words that it reports beside these with `[data] delay = "auto"`: the delay that nine of ten exchanges would
have needed, the waiting per step as a share of a step, the most phases of a bucket, and the longest delay for which it
has memory."""

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
    fragment: int = 0
    """The fragment of the model that it belongs to, where these are exchanged one after the other."""

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


def exchange_buckets(
    weights: Sequence[Weight],
    bucket_bytes: int,
    codec: Codec = NO_CODEC,
    fragment_of: Mapping[str, int] | None = None,
) -> list[ExchangeBucket]:
    """The buckets of these weights, in the order of exchange; empty weights are in none. Those that a codec compresses
    share no bucket with others, nor do those of different fragments. `fragment_of`: by name; all in one if left out."""
    there = [(place, weight) for place, weight in enumerate(weights) if weight.numel]
    fragments = [(fragment_of or {}).get(weight.name, 0) for _, weight in there]
    members = []
    for (_, weight), fragment in zip(there, fragments, strict=True):
        kind = f"{weight.dtype} {fragment}"
        member = Member(numel=weight.numel, item_bytes=item_bytes(_summed_in(weight.dtype)), kind=kind)
        members.append(coded_member(member) if is_coded(codec, weight.shape) else member)
    return [
        ExchangeBucket(
            members=tuple(there[index][0] for index in inside),
            numel=sum(members[index].numel for index in inside),
            dtype=_summed_in(there[inside[0]][1].dtype),
            coded=_coded([there[index][1] for index in inside]) if members[inside[0]].kind.startswith(CODED) else (),
            fragment=fragments[inside[0]],
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


def report_words(plan: Plan) -> int:
    """Words that each replica reports in an exchange."""
    return REPORT_WORDS + (DELAY_WORDS if uses_delayed_averaging(plan) and plan.data.delay == "auto" else 0)


def exchange_bytes(buckets: Sequence[ExchangeBucket], plan: Plan, *, num_statistics: int = 0, step: int = 0) -> int:
    """Bytes that a rank sends along the axis of replicas in one exchange, after a step counted from 0;
    `num_statistics` are elements, if any."""
    size, is_plain = plan.num_replicas, step < plan.data.switch_step
    if uses_streaming(plan) and not is_plain:
        buckets = [one for one in buckets if fragment_sent_after(plan.data, one.fragment, step + 1)]
    messages = [message for one in buckets for message in bucket_messages(one, plan, step=step)]
    if merges_late(plan) and not is_plain:
        num_statistics = 0
        if has_two_phases(plan.data.delay):
            messages = [_in_equal_shares(message, size) for message in messages]
    collective: Collective = "all-gather" if merges_late(plan) and not is_plain else "all-reduce"
    tail = sent_bytes(collective, (num_statistics + size * report_words(plan)) * TAIL_ITEM_BYTES, size)
    return sum(message.sent_bytes(size) for message in messages) + tail


def has_two_phases(delay: int | str) -> bool:
    """True if an exchange with this delay has time for two phases, a reduce-scatter and a gather of the shares."""
    return not isinstance(delay, int) or delay > 1


def outer_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> int:
    """Bytes of what a rank keeps from exchange to exchange: the weights of the last one, the outer momentum, and what
    is under way over several steps."""
    copies = keeps_anchor(plan) + (plan.data.outer == "nesterov")
    under_way = _under_way(buckets, plan, _kept_under_way_bytes) if merges_late(plan) else 0
    return copies * sum(one.num_bytes for one in buckets) + under_way


def exchange_buffer_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> int:
    """Bytes of the buffers from which weights are sent as they are, which are kept: those of two buckets, that
    alternate. What a codec compresses has others (`codec_memory.py`). Exchanges that stay under way over several steps
    hold their messages, and the share of the sum that a rank makes, all the time."""
    under_way = 0
    if merges_late(plan):
        decoded = max((one.num_bytes for one in buckets if one.coded), default=0)  # one bucket at a time
        under_way = _under_way(buckets, plan, _message_under_way_bytes) + decoded
    if uses_delayed_averaging(plan) or (uses_streaming(plan) and not plan.data.switch_step):
        return under_way
    plain = [one for one in buckets if not one.coded]
    return under_way + sum(
        _largest((one.dtype, one.num_bytes) for one in plain[turn::MAX_BUCKETS_IN_FLIGHT])
        for turn in range(MAX_BUCKETS_IN_FLIGHT)
    )


def _under_way(buckets: Sequence[ExchangeBucket], plan: Plan, count: Callable[[ExchangeBucket, Plan], int]) -> int:
    """The sum of a number of bytes over all that is under way at most: whole exchanges, or the largest fragments."""
    by_fragment: dict[int, int] = {}
    for one in buckets:
        by_fragment[one.fragment] = by_fragment.get(one.fragment, 0) + count(one, plan)
    if uses_delayed_averaging(plan):
        return max_in_flight(plan.data) * sum(by_fragment.values())
    return sum(sorted(by_fragment.values(), reverse=True)[: max_in_flight(plan.data)])


def _kept_under_way_bytes(bucket: ExchangeBucket, plan: Plan) -> int:
    """Bytes of a bucket's change and of the sum that arrives, in equal shares for all replicas. A message is made of
    the change at once and decoded when it is merged: of a coded bucket at most the change is kept, to be taken back."""
    if bucket.coded:
        several = max(len(bucket_messages(bucket, plan, step=step)) for step in _steps(plan)) > 1
        return (uses_delayed_averaging(plan) + several) * bucket.num_bytes
    size = plan.num_replicas if has_two_phases(plan.data.delay) else 1
    return 2 * -(-bucket.numel // size) * size * item_bytes(bucket.dtype)


def in_flight_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> int:
    """Bytes of all that is under way at once, where exchanges are merged later: what is kept, and messages."""
    return sum(_under_way(buckets, plan, count) for count in (_kept_under_way_bytes, _message_under_way_bytes))


def exchange_temporary_bytes(buckets: Sequence[ExchangeBucket], plan: Plan, *, on_host: bool) -> int:
    """Bytes of temporaries while replicas exchange a bucket: the distance of its weights from their mean, and the mean
    itself where the change since the last exchange travels; `on_host`: that is computed elsewhere, from a copy."""
    return (1 + (keeps_anchor(plan) and not on_host)) * max((one.num_bytes for one in buckets), default=0)


def _message_under_way_bytes(bucket: ExchangeBucket, plan: Plan) -> int:
    size, has_shares = plan.num_replicas, has_two_phases(plan.data.delay)

    def held(message: Message) -> int:
        if not message.adds_up:
            return size * message.num_bytes
        whole = _in_equal_shares(message, size if has_shares else 1).num_bytes
        return (2 * whole if bucket.coded else 0) + (whole // size if has_shares else 0)

    return max(held(message) for step in _steps(plan) for message in bucket_messages(bucket, plan, step=step))


def _steps(plan: Plan) -> tuple[int, int]:
    """Steps with the largest messages: the first, which a warm-up compresses less or not at all, and one after it."""
    return 0, plan.codec.warmup_steps


def _in_equal_shares(message: Message, size: int) -> Message:
    """A message that is summed in two phases, of which every rank has a share, is as long as they are together."""
    return replace(message, numel=-(-message.numel // size) * size) if message.adds_up else message


def _summed_in(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _largest(sizes: Iterable[tuple[str, int]]) -> int:
    """The largest bytes of each dtype, added up: every dtype has a buffer of its own."""
    largest: dict[str, int] = {}
    for dtype, num_bytes in sizes:
        largest[dtype] = max(largest.get(dtype, 0), num_bytes)
    return sum(largest.values())
