"""The memory of a compressed exchange: what codecs keep from step to step, and the buffers that messages pass through.

Kept is counted as codecs allocate it (`codecs/kept.py`): in two copies where an exchange may be without effect, because
the step is skipped, in one with local steps. Buffers are found by simulating a step's use of the pool, in the order of
`sync/compressed_exchange.py`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues, slice_values
from weft.plan.exchange.low_rank import message_numels, rank_of
from weft.plan.exchange.messages import messages_of, num_messages
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.partition.zero import BufferPool
from weft.plan.plan import Codec

KEPT_KINDS: dict[str, tuple[str, ...]] = {
    "topk": ("residual",),
    "dgc": ("residual", "momentum"),
    "onebit": ("residual",),
    "powersgd": ("residual",),
}
"""What codecs keep with one value per element of a tensor: what was not sent yet, and momenta of it."""


def kept_bytes(buckets: Sequence[CodedValues], codec: Codec, groups: CodecGroups, *, can_fail: bool) -> int:
    """Bytes of what the codecs of these buckets keep on a rank."""
    return sum(_kept_bytes(slice_values(one, groups), codec, num_copies=2 if can_fail else 1) for one in buckets)


def _kept_bytes(values: CodedValues, codec: Codec, *, num_copies: int) -> int:
    numel = num_copies * len(KEPT_KINDS.get(codec.name, ())) * values.numel
    if codec.name == "powersgd":
        numel += num_copies * sum(rank_of(codec, one) * one.num_columns for one in values.tensors)  # the next start
        numel += message_numels(codec, values.tensors)[0]  # the first message's sum, with orthonormal factors
    return numel * item_bytes(values.dtype)


def temporary_bytes(buckets: Sequence[CodedValues], codec: Codec, groups: CodecGroups) -> int:
    """Bytes of temporaries while a bucket is compressed, where compiled loops are there."""
    return 0


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
            if waits:
                advance()
            phases = _phases(one, codec, groups, step, pool, holds_values=holds_values)
            if next(phases, 0) is None:
                in_flight.append(phases)
        while in_flight:
            advance()
    return pool.num_bytes


def _phases(
    values: CodedValues, codec: Codec, groups: CodecGroups, step: int, pool: _Pool, *, holds_values: bool
) -> Iterator[None]:
    """The phases of a bucket, each of which ends with an exchange under way."""
    mine, held = slice_values(values, groups), []
    if holds_values:
        held.append(pool.borrow(values.numel, values.dtype))
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
