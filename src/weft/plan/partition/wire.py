"""The bytes each exchange puts on the wire: one arithmetic, used to predict before a run and to count during it.

`sent_bytes` turns a collective and the tensor handed to it into what one rank sends with a bandwidth-optimal
algorithm (rings). `comm/` calls it with the tensors it really hands over, the functions below it with the tensors a
plan implies; a test holds the two equal, to the byte. What a transport adds to a message (headers, retries) is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.plan.partition.sequence import HeadShares, Places
from weft.plan.plan import Plan

Collective = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "send",
]

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the exchange starts soon after the backward pass does."""

TAIL_WORDS = 3
"""Words of the tail before its flags: the loss sum, and the count of targets in two parts."""

SHARDED_TAIL_WORDS = 3
"""Words of a sharded step's tail before its flags: the loss sum, the count of targets, the gradient's squared norm."""

SHARDED_TAIL_ITEM_BYTES = 8
"""That tail is float64, whatever the gradients are, so that a count of targets stays exact."""


def sent_bytes(collective: Collective, buffer_bytes: int, group_size: int) -> int:
    """Bytes the busiest rank of a group sends in one call, rounded up.

    `buffer_bytes` is the whole buffer: what each rank holds before an all-reduce, the concatenation of all ranks'
    parts for gathers and scatters, the whole input of an all-to-all, the message of a send, broadcast or reduce.
    """
    if group_size == 1:
        return 0
    others = group_size - 1
    match collective:
        case "all-reduce":
            return _divide_up(2 * others * buffer_bytes, group_size)
        case "reduce-scatter" | "all-gather" | "all-to-all" | "scatter" | "gather":
            return _divide_up(others * buffer_bytes, group_size)
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
    """Bytes a host sends to others in one call of a group that has as many ranks on each, numbered host by host.

    In two levels a host exchanges like one rank. In one, an all-reduce goes round all ranks in a ring, whose steps
    between two hosts are one a host; reduce-scatter and all-gather send every rank its part directly.
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
    """Elements."""
    item_bytes: int
    """Bytes an element."""
    kind: str = "float"
    """Members of different kinds (dtypes) never share a bucket."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.item_bytes


def assign_buckets(members: Sequence[Member], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Fill buckets with members in the order given; each bucket holds members of one kind only.

    Buckets come in the order in which their last members do, which is the order in which they are exchanged. A member
    larger than `bucket_bytes` has a bucket to itself.

        members (MB)   1  9  9  9 30  2        bucket_bytes 25 MB, all of one kind
        buckets       (0)(1  2)(3)(4)(5)       the first one closes at FIRST_BUCKET_BYTES
    """
    closed: list[tuple[int, ...]] = []
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    for index, member in enumerate(members):
        limit = min(bucket_bytes, FIRST_BUCKET_BYTES) if not closed else bucket_bytes
        inside = open_members.setdefault(member.kind, [])
        if inside and open_bytes[member.kind] + member.num_bytes > limit:
            closed.append(tuple(inside))
            open_members[member.kind] = inside = []
            open_bytes[member.kind] = 0
        inside.append(index)
        open_bytes[member.kind] = open_bytes.get(member.kind, 0) + member.num_bytes
    closed.extend(tuple(inside) for inside in open_members.values() if inside)
    return tuple(sorted(closed, key=lambda bucket: bucket[-1]))


def tail_of(members: Sequence[Member]) -> Member:
    """The tail of a gradient exchange: loss, count, and one flag a parameter that says whether a rank used it.

    It travels with the gradients, so that a step costs no collective of its own for them. Never narrower than
    32 bits, whatever the gradients are.
    """
    widest = max(members, key=lambda member: member.item_bytes)
    numel = TAIL_WORDS + len(members)
    if widest.item_bytes >= 4:
        return Member(numel=numel, item_bytes=widest.item_bytes, kind=widest.kind)
    return Member(numel=numel, item_bytes=4, kind="tail")


def gradient_all_reduce_bytes(members: Sequence[Member], *, bucket_bytes: int, data: int) -> int:
    """Bytes a rank sends over the data axis in one step of all-reduce data parallelism."""
    everything = [*members, tail_of(members)]
    buckets = assign_buckets(everything, bucket_bytes)
    sizes = (sum(everything[index].num_bytes for index in bucket) for bucket in buckets)
    return sum(sent_bytes("all-reduce", size, data) for size in sizes)


PIPELINE_WORDS_BYTES = 32
"""What the last stage tells the others of a step: loss, count, correction, squared norm, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What travels between one stage and the next for one microbatch."""

    activation_bytes: int
    gradient_bytes: int


def pipeline_bytes(
    boundaries: Sequence[Boundary], plan: Plan, *, rank: int, tied: Sequence[tuple[int, int]] = ()
) -> int:
    """Bytes that one rank along the pipeline axis sends over it in one step of equal microbatches.

    `tied`: of each parameter that this rank and others hold, its bytes and how many hold it.
    """
    num_ranks, num_microbatches, last = plan.axes.pipeline, plan.step.microbatches, len(boundaries)
    sent = sum(sent_bytes("all-reduce", num_bytes, num_holders) for num_bytes, num_holders in tied)
    for stage in range(rank, last + 1, num_ranks):
        sent += num_microbatches * boundaries[stage].activation_bytes if stage < last else 0
        sent += num_microbatches * boundaries[stage - 1].gradient_bytes if stage else 0
    if plan.step.clip_norm > 0 or plan.precision.compute != "model":
        return sent + sent_bytes("all-reduce", PIPELINE_WORDS_BYTES, num_ranks)
    return sent + (PIPELINE_WORDS_BYTES * (num_ranks - 1) if rank == num_ranks - 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayers:
    """What ranks that split layers pass to each other for one microbatch, as numbers of exchanges and their bytes."""

    activation_bytes: int
    """Of what is between two regions, whole: samples × tokens × features."""
    num_regions: int
    """In the blocks: two a transformer block."""
    num_embeddings: int = 0
    num_outputs: int = 0
    """1 where the last layer is split."""
    num_targets: int = 0
    """Of the built-in loss of split logits; 0 where the output is made whole, or is whole."""
    loss_item_bytes: int = 4
    whole_output_bytes: int = 0
    """Of the output where a loss of the user's own needs all of it, each rank's part as wide as the widest."""
    partial_bytes: tuple[int, ...] = ()
    """Whole parameters that are used on a share; under split tokens all of the blocks that are not split."""
    repeated_bytes: tuple[tuple[int, int], ...] = ()
    """Of parameters of this rank that others have too: their bytes, and how many have them."""


def tensor_bytes(layers: SplitLayers, plan: Plan) -> int:
    """Bytes a rank sends over the tensor axis in one step of equal microbatches.

    A region costs an all-reduce of its output forward and one of its input's gradient backward. Under split tokens each
    is a reduce-scatter and a gather, which together send the same, and the input is gathered once more backward instead
    of being kept. Full recomputation repeats what is sent forward inside blocks.
    """
    size, activation = plan.axes.tensor, layers.activation_bytes
    reduced = sent_bytes("all-reduce", activation, size)
    gathered = sent_bytes("all-gather", activation, size)
    forwards = 2 if plan.recompute.policy == "full" else 1
    sent = (layers.num_embeddings + layers.num_outputs) * reduced
    if plan.tensor.sequence:
        # Between the regions tokens are split once, which costs a gather backward, and joined once, which is one.
        sent += layers.num_regions * (forwards * 2 + 3) * gathered + 2 * gathered
    else:
        sent += layers.num_regions * (forwards + 1) * reduced
    loss_bytes = layers.num_targets * layers.loss_item_bytes
    sent += sent_bytes("all-reduce", loss_bytes, size) + sent_bytes("all-reduce", 2 * loss_bytes, size)
    sent += sent_bytes("all-gather", layers.whole_output_bytes, size)
    sent += sum(sent_bytes("all-reduce", num_bytes, size) for num_bytes in layers.partial_bytes)
    sent += sum(sent_bytes("all-reduce", num_bytes, holders) for num_bytes, holders in layers.repeated_bytes)
    takes_norm = plan.step.clip_norm > 0 or plan.precision.compute != "model"
    return plan.step.microbatches * sent + (sent_bytes("all-reduce", NORM_BYTES, size) if takes_norm else 0)


NORM_BYTES = 8
"""The squared norm of what a rank counts of the gradient, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAttention:
    """Attention of ranks that share out the tokens, for one microbatch."""

    num_layers: int
    samples: int
    places: Places
    heads: HeadShares
    head_dim: int
    """Entries of a query, a key or a value of one head."""
    item_bytes: int
    ulysses_rank: int = 0
    """Where heads do not divide, ranks send more or less."""


def attention_bytes(layers: SplitAttention, plan: Plan) -> dict[str, int]:
    """Bytes a rank sends over the axes of the sequence in one step of equal microbatches, gradients of weights apart.

    Ulysses: queries, keys and values once, and the output once; backward their gradients. The ring: keys and values to
    all others; backward once more, and their gradients home, in at least 32 bits. Full recomputation repeats what is
    sent forward.
    """
    places, rank, heads = layers.places, layers.ulysses_rank, layers.heads
    each = layers.samples * layers.head_dim * layers.item_bytes
    queries, keys = ([stop - start for start, stop in ranges] for ranges in (heads.queries, heads.keys))
    together = [num_queries + 2 * num_keys for num_queries, num_keys in zip(queries, keys, strict=True)]
    # All heads of this rank's tokens leave, but for its own; of its own heads all tokens return, but for its own.
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
    """Bytes a rank sends over the data axis in one step for synchronised BatchNorms of these numbers of channels.

    Each of them, for each microbatch: a mean, a sum of squared deviations and a count gathered forward, two sums
    reduced backward. `item_bytes` is that of the statistics: 8 for a float64 model, else 4.
    """
    forward = (sent_bytes("all-gather", data * (2 * number + 1) * item_bytes, data) for number in channels)
    backward = (sent_bytes("all-reduce", 2 * number * item_bytes, data) for number in channels)
    return microbatches * (sum(forward) + sum(backward))


def _divide_up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
