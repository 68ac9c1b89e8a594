"""The exchange of gradients through a codec: its buckets, and the bytes that a rank sends for it in a step.

This is the one account of it, without torch: `sync/compressed_all_reduce.py` and `sync/replica_compression.py` make
these buckets, `sync/exchange/compressed_exchange.py` exchanges them, and a test requires the bytes equal.

    all-reduce             large gradients in buckets of their own, small ones and the tail in dense buckets
    over flat buffers      of every buffer the large members of a rank's part; all small members together; the tail
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors, is_coded, slice_of
from weft.plan.exchange.messages import messages_of
from weft.plan.partition.flat_buffers import FlatBuffer, ParameterSpec, item_bytes, sharded_bytes
from weft.plan.partition.grid import Grid
from weft.plan.partition.host_levels import find_host_place, level_groups
from weft.plan.partition.replicas import state_axes
from weft.plan.partition.wire import (
    CODEC_TAIL_WORDS,
    CODED,
    Member,
    assign_buckets,
    coded_member,
    sent_bytes,
    tail_of,
)
from weft.plan.plan import Codec, Plan

INSIDE = "ring+ulysses"
"""Axes of the ranks of one replica whose gradients are summed as they are, before its counterparts' are compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedValues:
    """A flat buffer of values that a codec compresses."""

    tensors: tuple[CodedTensor, ...]
    numel: int
    """With gaps between tensors."""
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecGroups:
    """A rank's place in the groups of a compressed exchange."""

    num_across: int
    """Replicas between which the codec acts."""
    num_inside: int = 1
    """Ranks that are summed as they are before; each then has a slice."""
    index_inside: int = 0
    across: str = "data"
    """The axes under which the codec's messages are counted."""
    inside: str = INSIDE


def codec_groups(plan: Plan, *, rank: int = 0, hosts: Sequence[int] = ()) -> CodecGroups:
    """The groups of a rank of a plan whose gradients are compressed. `hosts`: the number of each rank's host."""
    axes, place = plan.axes, find_host_place(plan, hosts, rank)
    if place is not None:
        (inside, _), (across, _) = level_groups(plan, hosts)
        return CodecGroups(
            num_across=len(place.places),
            num_inside=len(place.places[0]),
            index_inside=place.index,
            across=across,
            inside=inside,
        )
    if plan.data.shard != "nothing":
        return CodecGroups(num_across=axes.replicate, across="replicate")
    index_inside = Grid(axes).ranks_along(tuple(INSIDE.split("+")), rank).index(rank)
    return CodecGroups(num_across=axes.sizes["data"], num_inside=axes.sequence, index_inside=index_inside)


def slice_values(values: CodedValues, groups: CodecGroups) -> CodedValues:
    """What a rank gives to the codec of a bucket."""
    if groups.num_inside == 1:
        return values
    numel = -(-values.numel // groups.num_inside)
    tensors = slice_of(values.tensors, numel * groups.index_inside, numel * (groups.index_inside + 1))
    return CodedValues(tensors=tensors, numel=numel, dtype=values.dtype)


def coded_bytes(values: CodedValues, codec: Codec, groups: CodecGroups, *, step: int) -> tuple[int, int]:
    """Bytes that a rank sends for one bucket in a step, counted from 0: inside a replica, and between replicas."""
    mine, num_inside = slice_values(values, groups), groups.num_inside
    # Twice: a sum that leaves a slice, and a gather of the slices.
    inside = 2 * sent_bytes("all-gather", num_inside * mine.num_bytes, num_inside)
    if not mine.tensors:
        return inside, 0
    messages = messages_of(codec, mine.tensors, mine.dtype, num_replicas=groups.num_across, step=step)
    return inside, sum(message.sent_bytes(groups.num_across) for message in messages)


def all_reduce_buckets(
    parameters: Sequence[ParameterSpec], plan: Plan, *, not_coded: Collection[str] = ()
) -> tuple[list[CodedValues], list[int]]:
    """The buckets of gradients that a codec compresses, and the bytes of each that travels as it is, tail included.

    `parameters`: trainable ones in the order in which gradients become ready; `not_coded`: those that other ranks of
    the replica hold too.
    """
    is_large = [one.name not in not_coded and is_coded(plan.codec, one.shape) for one in parameters]
    plain = [Member(numel=one.numel, item_bytes=item_bytes(one.dtype), kind=one.dtype) for one in parameters]
    tail = tail_of(plain, num_ranks=plan.axes.state, extra_words=CODEC_TAIL_WORDS)
    members = [coded_member(one) if large else one for one, large in zip(plain, is_large, strict=True)]
    members.append(tail)
    coded, dense = [], []
    for inside in assign_buckets(members, plan.comm.bucket_bytes):
        first = members[inside[0]]
        if not first.kind.startswith(CODED):
            dense.append(sum(members[place].num_bytes for place in inside))
            continue
        named = [(parameters[place].name, parameters[place].shape, parameters[place].numel) for place in inside]
        numel = sum(members[place].numel for place in inside)
        coded.append(CodedValues(tensors=coded_tensors(named), numel=numel, dtype=first.kind.removeprefix(CODED)))
    return coded, dense


def compressed_all_reduce_bytes(
    parameters: Sequence[ParameterSpec],
    plan: Plan,
    *,
    step: int,
    groups: CodecGroups,
    not_coded: Collection[str] = (),
) -> dict[str, int]:
    """Bytes that a rank sends by axis for gradients in a step, counted from 0, in which parameters are the model's own
    tensors, given in the order in which gradients become ready; under tensor parallelism, this rank's shards."""
    coded, dense = all_reduce_buckets(parameters, plan, not_coded=not_coded)
    sent = {state_axes(plan): sum(sent_bytes("all-reduce", one, plan.axes.state) for one in dense)}
    _add(sent, coded, plan.codec, groups, step)
    return sent


def part_buckets(
    buffers: Sequence[FlatBuffer], plan: Plan, *, part: int, not_coded: Collection[str] = ()
) -> tuple[list[CodedValues], int]:
    """Of each trainable buffer the part that a rank keeps, with what is compressed of it; and the bytes of everything
    else in these parts."""
    coded, num_small = [], 0
    for one in (one for one in buffers if one.trainable):
        flat, found = one.flat, []
        first = flat.part(part)[0]
        for member, (name, shape) in enumerate(zip(one.names, one.shapes, strict=True)):
            start, stop = flat.kept(member, part)
            if start == stop:
                continue
            if name in not_coded or not is_coded(plan.codec, shape):
                num_small += (stop - start) * item_bytes(one.accumulate)
                continue
            offset = flat.offsets[member] + start - first
            found.append(CodedTensor(name=name, shape=shape, offset=offset, numel=stop - start, start=start))
        coded.append(CodedValues(tensors=tuple(found), numel=flat.part_numel, dtype=one.accumulate))
    return coded, num_small


def compressed_flat_bytes(
    buffers: Sequence[FlatBuffer],
    plan: Plan,
    *,
    step: int,
    part: int,
    groups: CodecGroups,
    not_coded: Collection[str] = (),
) -> dict[str, int]:
    """Bytes that a rank sends by axis in a step, counted from 0, in which parameters lie in these flat buffers."""
    coded, small_bytes = part_buckets(buffers, plan, part=part, not_coded=not_coded)
    sent = sharded_bytes(buffers, plan, is_coded=True)
    together = state_axes(plan) if plan.data.shard == "nothing" else "replicate"
    sent[together] += sent_bytes("all-reduce", small_bytes, groups.num_across * groups.num_inside)
    _add(sent, coded, plan.codec, groups, step)
    return sent


def _add(sent: dict[str, int], coded: Sequence[CodedValues], codec: Codec, groups: CodecGroups, step: int) -> None:
    for one in coded:
        in_slices, in_messages = coded_bytes(one, codec, groups, step=step)
        sent[groups.across] = sent.get(groups.across, 0) + in_messages
        if groups.num_inside > 1:
            sent[groups.inside] = sent.get(groups.inside, 0) + in_slices
