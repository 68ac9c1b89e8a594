"""Which codec pays: the bandwidth below which an exchange with it is faster than a dense all-reduce.

Both sides exchange the same gradients between W replicas, in buckets, one link of B bytes per second per replica:

    dense    rounds × latency + bytes / B
    coded    time of encoding and decoding + rounds × latency + fewer bytes / B

The difference is linear in 1 / B, so there is one bandwidth at which both take as long: below it the codec pays. What
overlaps with the backward pass is the same on both sides and is left out; so is the arithmetic of the dense sum, which
favours dense. The bytes are those of `plan/exchange/messages.py`, of a step after the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import coded_tensors, is_coded
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.partition.wire import Member, assign_buckets
from weft.plan.plan import Codec, Comm
from weft.profiles.cluster import Cluster, Compression, num_rounds

Shape = tuple[int, ...]

SAFE_WITH = {
    "half": "any optimizer, between local steps",
    "topk": "SGD; local steps with any optimizer",
    "dgc": "SGD with momentum",
    "onebit": "SGD; local steps with any optimizer",
    "sign": "SGD at a rate of its own",
    "qsgd": "any optimizer at 256 levels; SGD below",
    "terngrad": "SGD",
    "powersgd": "SGD, AdamW after a warm-up; local steps",
}
"""Optimizers and syncs with which each codec keeps the quality of dense training; docs/methods/compression.md has the
reasons and the measurements."""

_DTYPE = "float32"
_ITEM_BYTES = 4
_USUAL_SIDE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One exchange of a model's gradients with a codec, against the dense one."""

    codec: Codec
    dense_bytes: int
    """Bytes that a replica sends through its link without a codec."""
    sent_bytes: int
    """The same with it: the tensors that are compressed, and those that travel as they are."""
    dense_latency_s: float
    """Seconds of latency without a codec: rounds of messages that wait for each other."""
    latency_s: float
    """The same with it."""
    codec_s: float
    """Seconds of encoding and decoding."""

    @property
    def compression(self) -> float:
        return self.dense_bytes / self.sent_bytes

    def dense_s(self, bytes_per_s: float) -> float:
        """Seconds of the exchange without a codec, through links of this bandwidth."""
        return self.dense_latency_s + self.dense_bytes / bytes_per_s

    def coded_s(self, bytes_per_s: float) -> float:
        """Seconds of the exchange with the codec."""
        return self.codec_s + self.latency_s + self.sent_bytes / bytes_per_s

    @property
    def pays_below_bytes_per_s(self) -> float:
        """The bandwidth at which both sides take as long; infinite: it pays always, 0: it never does."""
        fewer_bytes = self.dense_bytes - self.sent_bytes
        more_s = self.codec_s + self.latency_s - self.dense_latency_s
        if fewer_bytes <= 0:
            return 0.0
        return fewer_bytes / more_s if more_s > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The replicas that exchange, and the links between them."""

    num_replicas: int
    ranks_per_link: int = 1
    """Ranks that sum densely first, then compress an equal part each and send it through one link: those of a host."""
    alpha_s: float = 0.0
    """Latency of a message."""
    bytes_per_s: float | None = None
    """Rate of the slowest link; None where there is none between hosts."""

    def latency_s(self, messages: Sequence[Message]) -> float:
        rounds = (num_rounds("all-reduce" if one.adds_up else "all-gather", self.num_replicas) for one in messages)
        return sum(rounds) * self.alpha_s


def links_of(cluster: Cluster, num_replicas: int | None = None) -> Links:
    """One replica per host, or per rank where there is one host; at least two. Another number is taken to have equal
    links."""
    network = [link for link in cluster.links if link.kind == "network"]
    per_host = cluster.num_ranks // cluster.num_hosts if cluster.num_hosts > 1 else 1
    inside = [link for link in cluster.links if link.transport == "c10d"]
    return Links(
        num_replicas=num_replicas or max(2, cluster.num_hosts if cluster.num_hosts > 1 else cluster.num_ranks),
        ranks_per_link=per_host,
        alpha_s=max((link.alpha_s for link in network or inside), default=0.0),
        bytes_per_s=min((link.bytes_per_s for link in network), default=None),
    )


def usual_shapes(num_parameters: int) -> list[Shape]:
    """Tensors of a model of which only the size is known: square matrices of 1024 rows, or smaller ones for models
    that would have fewer than sixteen of them, one with the rows that are left, and a bias."""
    side = min(_USUAL_SIDE, 1 << max(0, (num_parameters // 16).bit_length() // 2))
    matrices, left = divmod(num_parameters, side * side)
    rows, rest = divmod(left, side)
    return [(side, side)] * matrices + [(rows, side)] * (rows > 0) + [(rest,)] * (rest > 0)


def advise(measured: Compression, shapes: Sequence[Shape], links: Links) -> Advice:
    """A codec, as it was measured, on a model of tensors of these shapes."""
    codec, dense = measured.codec, gradient_messages(None, shapes, links.num_replicas)
    messages = gradient_messages(codec, shapes, links.num_replicas)
    return Advice(
        codec=codec,
        dense_bytes=sum(one.sent_bytes(links.num_replicas) for one in dense),
        sent_bytes=sum(one.sent_bytes(links.num_replicas) for one in messages),
        dense_latency_s=links.latency_s(dense),
        latency_s=links.latency_s(messages),
        codec_s=codec_time_s(measured, shapes, links.num_replicas, ranks_per_link=links.ranks_per_link),
    )


def gradient_messages(codec: Codec | None, shapes: Sequence[Shape], num_replicas: int) -> list[Message]:
    """The messages in which gradients of these shapes travel in one step, after the warm-up; None: as they are."""
    if codec is None:
        return [Message(numel=sum(map(math.prod, bucket)), dtype=_DTYPE) for bucket in _buckets(shapes)]
    messages = [
        message
        for bucket in _buckets([shape for shape in shapes if is_coded(codec, shape)])
        for message in messages_of(
            codec,
            coded_tensors([(str(place), shape, math.prod(shape)) for place, shape in enumerate(bucket)]),
            _DTYPE,
            num_replicas=num_replicas,
            step=codec.warmup_steps,
        )
    ]
    return messages + gradient_messages(None, [one for one in shapes if not is_coded(codec, one)], num_replicas)


def codec_time_s(measured: Compression, shapes: Sequence[Shape], num_replicas: int, *, ranks_per_link: int) -> float:
    """Seconds in which a rank encodes its part of tensors of these shapes and decodes what all replicas sent."""
    codec = measured.codec
    coded = [shape for shape in shapes if is_coded(codec, shape)]
    numel_here = sum(map(math.prod, coded)) / ranks_per_link
    return measured.time_s(numel_here, num_replicas=num_replicas, num_buckets=len(_buckets(coded)))


def describe(codec: Codec) -> str:
    """The codec and what decides its bytes, in words."""
    match codec.name:
        case "topk" | "dgc":
            values = "" if codec.bits == Codec().bits else f", {codec.bits} bits"
            return f"{codec.name} {codec.density:g}{values}"
        case "qsgd":
            return f"qsgd, {codec.levels} levels"
        case "powersgd":
            return f"powersgd, rank {codec.rank}"
        case _:
            return codec.name


def _buckets(shapes: Sequence[Shape]) -> list[list[Shape]]:
    members = [Member(numel=math.prod(shape), item_bytes=_ITEM_BYTES) for shape in shapes]
    return [[shapes[place] for place in bucket] for bucket in assign_buckets(members, Comm().bucket_bytes)]
