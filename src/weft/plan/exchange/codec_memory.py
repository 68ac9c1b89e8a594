"""The memory of a compressed exchange: what codecs keep from step to step, and the buffers that messages pass through.

Kept is counted as codecs allocate it (`codecs/kept.py`): in two copies where an exchange may be without effect, because
the step is skipped, in one with local steps. Buffers are found by simulating a step's use of the pool, in the order of
`sync/exchange/compressed_exchange.py`; a test compares both. On GPUs what kernels need comes on top (`gpu_scratch.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.plan.exchange.gpu_scratch import scratch_bytes
from weft.plan.exchange.gradient_exchange import (
    CodecGroups,
    CodedValues,
    all_reduce_buckets,
    codec_groups,
    part_buckets,
    slice_values,
)
from weft.plan.exchange.low_rank import message_numels, rank_of
from weft.plan.exchange.messages import messages_of, num_messages
from weft.plan.exchange.weight_exchange import exchange_buckets, kept_weights
from weft.plan.late_merges import max_in_flight, merges_late, uses_delayed_averaging
from weft.plan.partition.flat_buffers import FlatBuffer, ParameterSpec, item_bytes
from weft.plan.partition.zero import BufferPool
from weft.plan.plan import Codec, Plan

NUM_KEPT = {"topk": 1, "dgc": 2, "onebit": 1, "powersgd": 1}
"""How many values codecs keep per element of a tensor: what was not sent yet, and dgc's momentum of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecMemory:
    """Bytes of a rank."""

    kept: int = 0
    """What codecs keep from step to step."""
    buffers: int = 0
    """Messages on their way, and what they are made of; kept for the next exchange."""
    moved: int = 0
    """Copies of what is kept while all-reduce changes its buckets, once, after the first step."""


def codec_memory(
    plan: Plan,
    flats: Sequence[FlatBuffer],
    *,
    in_flats: bool,
    waits_in_backward: bool,
    device: str,
    fragment_of: Mapping[str, int] | None = None,
) -> CodecMemory:
    """The memory of a plan's codecs, where parameters lie in these buffers; `in_flats`: they are not the model's own
    tensors. `waits_in_backward`: layers wait for other ranks in a backward pass, so no exchange of gradients may.
    `device`: its kind. `fragment_of`: the fragment that each parameter travels in, by name."""
    codec, trainable = plan.codec, [one for one in flats if one.trainable]
    if codec.name == "none":
        return CodecMemory()
    if plan.replica_axis is not None:
        groups = CodecGroups(num_across=plan.num_replicas)
        found = exchange_buckets(kept_weights(trainable, 0), plan.comm.bucket_bytes, codec, fragment_of)
        changes = [CodedValues(tensors=one.coded, numel=one.numel, dtype=one.dtype) for one in found if one.coded]
        kept = kept_bytes(changes, codec, groups, num_copies=1)
        if merges_late(plan):  # messages are counted with what is under way
            if uses_delayed_averaging(plan) and codec.name == "powersgd":  # every exchange under way has its own
                kept *= max_in_flight(plan.data)
            on_host = plan.data.offload
            kernels = 0 if on_host else kernel_bytes(changes, codec, groups, num_copies=1, device=device)
            if on_host and device != "cpu":
                return CodecMemory(buffers=kernels)
            plain = 0
            if plan.data.switch_step:  # the averages until then have buffers of their own, which stay
                plain = message_buffer_bytes(changes, codec, groups, holds_values=True)
            return CodecMemory(kept=kept, buffers=kernels + plain)
        return CodecMemory(
            kept=kept,
            buffers=message_buffer_bytes(changes, codec, groups, holds_values=True)
            + kernel_bytes(changes, codec, groups, num_copies=1, device=device),
        )
    groups, small_bytes = codec_groups(plan), 0
    if groups.num_across == 1:
        return CodecMemory()
    if in_flats:
        coded, small_bytes = part_buckets(trainable, plan, part=0)
        coded = coded[::-1]  # the first buffers' gradients leave last
    else:
        named = (
            (name, shape, one.compute) for one in trainable for name, shape in zip(one.names, one.shapes, strict=True)
        )
        parameters = [ParameterSpec(name=name, shape=shape, dtype=dtype) for name, shape, dtype in named]
        coded, _ = all_reduce_buckets(parameters[::-1], plan)
    waits = not waits_in_backward and plan.axes.sequence == 1
    buffers = message_buffer_bytes(coded, codec, groups, holds_values=False, waits=waits)
    if codec.name == "dgc":  # the gradient that the optimizer sees of compressed tensors
        buffers += max((one.numel * item_bytes(values.dtype) for values in coded for one in values.tensors), default=0)
    return CodecMemory(
        kept=kept_bytes(coded, codec, groups, num_copies=2),  # a step may be skipped
        buffers=buffers + small_bytes + kernel_bytes(coded, codec, groups, num_copies=2, device=device),
        moved=0 if in_flats or groups.num_inside > 1 else kept_bytes(coded, codec, groups, num_copies=1),
    )


def kept_bytes(buckets: Sequence[CodedValues], codec: Codec, groups: CodecGroups, *, num_copies: int) -> int:
    """Bytes of what the codecs of these buckets keep on a rank."""
    return sum(_kept_bytes(slice_values(one, groups), codec, num_copies) for one in buckets)


def _kept_bytes(values: CodedValues, codec: Codec, num_copies: int) -> int:
    numel = num_copies * NUM_KEPT.get(codec.name, 0) * values.numel
    if codec.name == "powersgd":
        numel += num_copies * sum(rank_of(codec, one) * one.num_columns for one in values.tensors)  # the next start
        numel += message_numels(codec, values.tensors)[0]  # the first message's sum, with orthonormal factors
    return numel * item_bytes(values.dtype)


def kernel_bytes(
    buckets: Sequence[CodedValues], codec: Codec, groups: CodecGroups, *, num_copies: int, device: str
) -> int:
    """Bytes that the kernels of these buckets' codecs need beside that; none on the host."""
    if device == "cpu":
        return 0
    slices = (slice_values(one, groups) for one in buckets)
    return sum(scratch_bytes(codec, one.tensors, one.dtype, num_copies=num_copies) for one in slices)


class _Pool:
    """Lengths of buffers instead of buffers."""

    def __init__(self) -> None:
        self._pool: BufferPool[int] = BufferPool(int)

    def borrow(self, numel: int, dtype: str) -> tuple[int, str]:
        return self._pool.borrow(numel, dtype) or numel, dtype

    def hand_back(self, borrowed: tuple[int, str]) -> None:
        self._pool.hand_back(*borrowed)

    @property
    def num_bytes(self) -> int:
        return sum(numel * item_bytes(str(dtype)) for dtype, free in self._pool.free.items() for numel in free)


def message_buffer_bytes(
    buckets: Sequence[CodedValues], codec: Codec, groups: CodecGroups, *, holds_values: bool, waits: bool = True
) -> int:
    """Bytes of the buffers that are kept for messages, and for slices. `holds_values`: values come in buffers of the
    pool too, as changes of weights do. `waits`: earlier buckets are waited for when another starts."""
    pool, in_flight = _Pool(), list[Iterator[None]]()

    def advance() -> None:
        in_flight[:] = [phases for phases in in_flight if next(phases, 0) is None]

    for step in (0, 0, codec.warmup_steps, codec.warmup_steps):  # the second time finds what the first has made
        for one in buckets:
            held = [pool.borrow(one.numel, one.dtype)] if holds_values else []
            if waits:
                advance()
            phases = _phases(one, codec, groups, step, pool, held)
            if next(phases, 0) is None:
                in_flight.append(phases)
        while in_flight:
            advance()
    return pool.num_bytes


def _phases(
    values: CodedValues, codec: Codec, groups: CodecGroups, step: int, pool: _Pool, held: list[tuple[int, str]]
) -> Iterator[None]:
    """The phases of a bucket, each of which ends with an exchange under way; `held` is handed back in the end."""
    mine = slice_values(values, groups)
    if groups.num_inside > 1:
        held += [pool.borrow(mine.numel * groups.num_inside, mine.dtype), pool.borrow(mine.numel, mine.dtype)]
        yield
    messages = messages_of(codec, mine.tensors, mine.dtype, num_replicas=groups.num_across, step=step)
    for message in messages if mine.tensors else ():
        num_rows = 1 if message.adds_up else groups.num_across
        borrowed = pool.borrow(num_rows * message.numel, message.dtype)
        yield
        pool.hand_back(borrowed)
    if groups.num_inside > 1:
        yield from (None for _ in range(len(messages) if mine.tensors else 0, num_messages(codec, step)))
        yield
    for one in held:
        pool.hand_back(one)
