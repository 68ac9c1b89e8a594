"""The bytes that each exchange sends: one arithmetic, to predict them before a run and to count them during it.

`sent_bytes` gives the bytes that one rank sends in a collective with a bandwidth-optimal (ring) algorithm. `comm/`
calls it with the tensors it really exchanges, the functions below with the tensors that a plan implies; tests require
the two to be equal, to the byte. Overheads of a transport (headers, retries) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.plan.partition.sequence import HeadShares, Places
from weft.plan.plan import Plan

Collective = Literal[
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce", "scatter", "gather", "send"
]

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that its exchange starts soon after the backward pass does."""

TAIL_WORDS = 3
"""First words of the tail: the loss sum, and the count of targets in two parts. One word per rank follows, for its
compute time, then the flags."""

SHARDED_TAIL_WORDS = 3
"""First words of a sharded step's tail: the loss sum, the count of targets, the gradient's squared norm. One word per
rank follows, for its compute time, then the flags."""

SHARDED_TAIL_ITEM_BYTES = 8
"""That tail is float64 for any dtype of gradients, so that the count of targets is exact."""

PIPELINE_WORDS_BYTES = 32
"""What the last stage tells the others about a step: loss, count, correction, squared norm, in float64."""

SMALLEST_SLICED_BYTES = 1 << 20
"""Smaller tensors cross from stage to stage whole: gathering their slices would take longer than sending them."""

CODEC_TAIL_WORDS = 1
"""Last word of the tail with a codec: the number of ranks with a gradient that is not finite."""

NORM_BYTES = 8
"""The squared norm of a rank's part of the gradient, in float64."""

NUM_TENSOR_SUMS = 2
"""Squares that LARS and LAMB sum per tensor: of the weight, and of what its norm is compared with; in float64."""


def sent_bytes(collective: Collective, buffer_bytes: int, group_size: int) -> int:
    """Bytes that the busiest rank of a group sends in one call, rounded up.

    `buffer_bytes` is the whole buffer: what each rank holds before an all-reduce, the concatenation of all ranks'
    parts for gathers and scatters, the whole input of an all-to-all, the message of a send, broadcast or reduce.
    """
    if group_size == 1:
        return 0
    others = group_size - 1
    match collective:
        case "all-reduce":
            return -(-2 * others * buffer_bytes // group_size)
        case "reduce-scatter" | "all-gather" | "all-to-all" | "scatter" | "gather":
            return -(-others * buffer_bytes // group_size)
        case "broadcast" | "reduce" | "send":
            return buffer_bytes


def between_hosts_bytes(
    collective: Literal["all-reduce", "reduce-scatter", "all-gather"],
    buffer_bytes: int,
    *,
    num_hosts: int,
    ranks_per_host: int,
    num_levels: int,
) -> float:
    """Bytes that a host sends to other hosts in one call of a group with equally many ranks on each, host by host.

    With two levels a host exchanges like one rank. With one level, an all-reduce is a ring over all ranks, with one
    step per host between hosts; reduce-scatter and all-gather send every rank its part directly.
    """
    if num_hosts == 1:
        return 0.0
    if num_levels == 2:
        rounds = 2 if collective == "all-reduce" else 1
        return rounds * buffer_bytes * (num_hosts - 1) / num_hosts
    num_ranks = num_hosts * ranks_per_host
    if collective == "all-reduce":
        return 2 * buffer_bytes * (num_ranks - 1) / num_ranks
    return ranks_per_host * buffer_bytes * (num_hosts - 1) / num_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One tensor that travels in a bucket."""

    numel: int
    item_bytes: int
    """Bytes per element."""
    kind: str = "float"
    """Members of different kinds (dtypes) never share a bucket."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.item_bytes


CODED = "coded "
"""Begins the kind of members that a codec compresses, so that they share no bucket with others."""


def coded_member(member: Member) -> Member:
    return replace(member, kind=CODED + member.kind)


def assign_buckets(
    members: Sequence[Member], bucket_bytes: int, *, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[tuple[int, ...], ...]:
    """Fill buckets with members in the order given; each bucket holds members of one kind only.

    Buckets come in the order in which their last members do, which is the order in which they are exchanged. A member
    larger than `bucket_bytes` has a bucket to itself.

        members (MB)   1  9  9  9 30  2        bucket_bytes 25 MB, all of one kind
        buckets       (0)(1  2)(3)(4)(5)       the first one closes at `first_bytes`, 1 MiB
    """
    closed: list[tuple[int, ...]] = []
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    for index, member in enumerate(members):
        limit = min(bucket_bytes, first_bytes) if not closed else bucket_bytes
        inside = open_members.setdefault(member.kind, [])
        if inside and open_bytes[member.kind] + member.num_bytes > limit:
            closed.append(tuple(inside))
            open_members[member.kind] = inside = []
            open_bytes[member.kind] = 0
        inside.append(index)
        open_bytes[member.kind] = open_bytes.get(member.kind, 0) + member.num_bytes
    closed.extend(tuple(inside) for inside in open_members.values() if inside)
    return tuple(sorted(closed, key=lambda bucket: bucket[-1]))


def tail_of(members: Sequence[Member], *, num_ranks: int, extra_words: int = 0) -> Member:
    """The tail of a gradient exchange: loss, count, each rank's compute time, one flag per parameter that a rank used,
    and with a codec one word more.

    It travels with the gradients, so that a step needs no collective for it. It has at least 32 bits per word, whatever
    the gradients have.
    """
    widest = max(members, key=lambda member: member.item_bytes)
    numel = TAIL_WORDS + num_ranks + len(members) + extra_words
    if widest.item_bytes >= 4:
        return Member(numel=numel, item_bytes=widest.item_bytes, kind=widest.kind)
    return Member(numel=numel, item_bytes=4, kind="tail")


def gradient_all_reduce_bytes(members: Sequence[Member], *, bucket_bytes: int, data: int) -> int:
    """Bytes that a rank sends over the data axis in one step of all-reduce data parallelism."""
    everything = [*members, tail_of(members, num_ranks=data)]
    buckets = assign_buckets(everything, bucket_bytes)
    sizes = (sum(everything[index].num_bytes for index in bucket) for bucket in buckets)
    return sum(sent_bytes("all-reduce", size, data) for size in sizes)


def sum_over_holders_bytes(num_bytes: int, num_holders: int) -> int:
    """Bytes that a rank sends, once per step, to sum gradients that several ranks hold, in any number of buckets.

    Three or more holders send each other all they have (`comm/shared_gradients.py`); two do so in an all-reduce.
    """
    return sent_bytes("all-gather", num_holders * num_bytes, num_holders)


def pipeline_bytes(
    boundaries: Sequence[tuple[int, int]],
    plan: Plan,
    *,
    rank: int,
    tied: Sequence[tuple[int, int]] = (),
    together: bool = False,
) -> int:
    """Bytes that one rank along the pipeline axis sends over it in one step of equal microbatches.

    `boundaries`: (bytes of activations, bytes of their gradients) from each stage to the next, for one microbatch; of
    tensors that are sent in slices, those of one slice.
    `tied`: (bytes, number of ranks that hold it) of each parameter that this rank shares with others. `together`: the
    stages update together for a weight that some of them share, which only 2bw does.
    """
    num_ranks, num_microbatches, last = plan.axes.pipeline, plan.step.microbatches, len(boundaries)
    sent = sum(sum_over_holders_bytes(num_bytes, num_holders) for num_bytes, num_holders in tied)
    for stage in range(rank, last + 1, num_ranks):
        sent += num_microbatches * boundaries[stage][0] if stage < last else 0
        sent += num_microbatches * boundaries[stage - 1][1] if stage else 0
    if together or needs_norm(plan):
        return sent + sent_bytes("all-reduce", PIPELINE_WORDS_BYTES, num_ranks)
    return sent + (PIPELINE_WORDS_BYTES if rank else 0)


def num_slices(numel: int, item_bytes: int, num_ranks: int) -> int:
    """The number of slices in which tensor ranks send a tensor that all of them hold to the next stage; 1: whole."""
    is_worth_it = numel * item_bytes >= SMALLEST_SLICED_BYTES and numel % num_ranks == 0
    return num_ranks if is_worth_it else 1


def tensor_norm_bytes(num_tensors: int, num_ranks: int) -> int:
    """Bytes that a rank sends in one step to ranks that hold other parts of the same tensors, for LARS and LAMB.

    Every rank gathers the sums of all (`optim/tensor_norms.py`), once over the ranks that share the state and once over
    those that split layers.
    """
    return sent_bytes("all-gather", num_ranks * NUM_TENSOR_SUMS * NORM_BYTES * num_tensors, num_ranks)


def needs_norm(plan: Plan) -> bool:
    """True if an update waits for the norm of the whole gradient."""
    # With a codec a gradient that is not finite must be known to all ranks of a replica, and the norm tells them.
    is_told = plan.codec.name != "none" and plan.data.sync == "all-reduce" and plan.axes.tensor * plan.axes.pipeline > 1
    return plan.step.clip_norm > 0 or plan.precision.compute != "model" or is_told


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayers:
    """The exchanges of ranks that split layers, for one microbatch: their numbers and bytes."""

    activation_bytes: int
    """Bytes of the whole activation between two regions: samples × tokens × features."""
    num_regions: int
    """Split regions in the blocks: two per transformer block."""
    num_whole_attentions: int = 0
    """Attention modules that no region shards; with split tokens they run on all tokens."""
    num_embeddings: int = 0
    num_outputs: int = 0
    """1 if the last layer is split."""
    num_targets: int = 0
    """Targets of the built-in loss of split logits; 0 if the output is gathered or not split."""
    loss_item_bytes: int = 4
    whole_output_bytes: int = 0
    """Bytes of the output if the user's own loss needs all of it, each rank's part as wide as the widest."""
    partial_bytes: int = 0
    """Bytes of whole parameters that are used on a share; with split tokens, all in the blocks that are not split."""
    broadcast_bytes: int = 0
    """Bytes of other whole parameters, where sums over data may round differently on two tensor ranks."""
    repeated_bytes: tuple[tuple[int, int], ...] = ()
    """(bytes, number of ranks that hold it) of each parameter that this rank shares with others."""
    sliced_receive_bytes: tuple[int, ...] = ()
    """Bytes of each whole activation and gradient that is received from another stage in slices."""


def tensor_bytes(layers: SplitLayers, plan: Plan) -> int:
    """Bytes that a rank sends over the tensor axis in one step of equal microbatches.

    A region costs an all-reduce of its output forward and one of its input's gradient backward. With split tokens each
    is a reduce-scatter and a gather, which together send the same, and the input is gathered again in the backward pass
    instead of being kept. Full recomputation repeats the forward exchanges inside blocks.
    """
    size, activation = plan.axes.tensor, layers.activation_bytes
    reduced = sent_bytes("all-reduce", activation, size)
    gathered = sent_bytes("all-gather", activation, size)
    forwards = 2 if plan.recompute.policy == "full" else 1
    sent = (layers.num_embeddings + layers.num_outputs) * reduced
    if plan.tensor.sequence:
        # Outside the regions tokens are split once, which costs a gather backward, and gathered once.
        sent += layers.num_regions * (forwards * 2 + 3) * gathered + 2 * gathered
        sent += layers.num_whole_attentions * (forwards + 1) * gathered
    else:
        sent += layers.num_regions * (forwards + 1) * reduced
    loss_bytes = layers.num_targets * layers.loss_item_bytes
    sent += sent_bytes("all-reduce", loss_bytes, size) + sent_bytes("all-reduce", 2 * loss_bytes, size)
    sent += sent_bytes("all-gather", layers.whole_output_bytes, size)
    sent += sum(sent_bytes("all-gather", num_bytes, size) for num_bytes in layers.sliced_receive_bytes)
    shared = sum_over_holders_bytes(layers.partial_bytes, size) + sent_bytes("broadcast", layers.broadcast_bytes, size)
    shared += sum(sum_over_holders_bytes(num_bytes, holders) for num_bytes, holders in layers.repeated_bytes)
    shared += sent_bytes("all-reduce", NORM_BYTES, size) if needs_norm(plan) else 0
    return plan.step.microbatches * sent + shared


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAttention:
    """Attention over split tokens, for one microbatch."""

    num_layers: int
    samples: int
    places: Places
    heads: HeadShares
    head_dim: int
    item_bytes: int
    ulysses_rank: int = 0
    """Matters where the heads do not divide evenly."""


def attention_bytes(layers: SplitAttention, plan: Plan) -> dict[str, int]:
    """Bytes that a rank sends over the sequence axes in one step of equal microbatches, without gradients of weights.

    Ulysses: queries, keys and values once, and the output once; backward their gradients. Ring: keys and values to all
    others; backward once more, and their gradients back, in at least 32 bits. Full recomputation repeats the forward.
    """
    places, rank, heads = layers.places, layers.ulysses_rank, layers.heads
    each = layers.samples * layers.head_dim * layers.item_bytes
    queries, keys = ([stop - start for start, stop in ranges] for ranges in (heads.queries, heads.keys))
    together = [num_queries + 2 * num_keys for num_queries, num_keys in zip(queries, keys, strict=True)]
    # A rank sends its tokens of all other ranks' heads, and gets the other tokens of its own heads.
    scattered, scattered_output = (sum(parts) - parts[rank] for parts in (together, queries))
    others = places.ulysses - 1
    ulysses = {
        "forward": places.tokens_per_rank * each * (scattered + others * queries[rank]),
        "backward": places.tokens_per_rank * each * (scattered_output + others * together[rank]),
    }
    block = places.tokens_per_ring * layers.samples * layers.head_dim * 2 * keys[rank]
    hops = (places.ring - 1) * block
    ring = {"forward": hops * layers.item_bytes, "backward": hops * (layers.item_bytes + max(layers.item_bytes, 4))}
    forwards = 2 if plan.recompute.policy == "full" else 1
    times = layers.num_layers * plan.step.microbatches
    return {
        axis: times * (forwards * sent["forward"] + sent["backward"])
        for axis, sent in (("ring", ring), ("ulysses", ulysses))
    }


def batch_norm_bytes(channels: Sequence[int], *, item_bytes: int, microbatches: int, data: int) -> int:
    """Bytes that a rank sends over the data axis in one step for synchronised BatchNorms of these numbers of channels.

    Each gathers, per microbatch, a mean, a sum of squared deviations and a count forward, and reduces two sums
    backward. `item_bytes` is that of the statistics: 8 for a float64 model, else 4.
    """
    forward = (sent_bytes("all-gather", data * (2 * number + 1) * item_bytes, data) for number in channels)
    backward = (sent_bytes("all-reduce", 2 * number * item_bytes, data) for number in channels)
    return microbatches * (sum(forward) + sum(backward))
