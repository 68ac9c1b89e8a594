"""Methods on a slow network: the time of a step under each, what it sends, keeps and costs, and which to use.

One formula each. An exchange takes `codec` seconds of a rank's processor, and is `latency` + `bandwidth` seconds on its
way (`network.py`); c is what a step computes, and W replicas exchange:

    all-reduce   codec + max(c + one latency, c / 3 + latency + bandwidth)
                 buckets leave during the backward pass, two thirds of c; the last one after it
    others       max(c', bandwidth / n, c' + (latency + bandwidth - D c') / max(n, D))         c' = c + codec / n
                 n steps between exchanges, each merged D steps after it was sent; 0: it is waited for at once

    local        n = every, D = 0; in a ring of 2 (W - 1) rounds, or one direct round for what is gathered
    streaming    a fragment of F leaves every n = every / F steps, in two direct rounds, or one for what is gathered,
                 and is merged D steps later
    delayed      n = every, D = delay: two direct rounds, or one for what is gathered

The middle term is the link's: bytes of one exchange must leave before the next. Of what is merged later, phases begin
in steps, so an odd delay gives two of them no more time than the even one below; buckets with one phase have all of it,
and the slower of both kinds counts. With a delay of 1 there is no time for two phases, and a ring makes the sum. Two
buckets of a ring are on their way at once, all of an exchange that is merged later. What replicas report of a late
exchange goes along with it in one direct round, and takes no time of its own.

Methods are ranked by the time to the same loss: a step's, times the steps that a method needs (`extra_steps.py`). D of
streaming, and n and D of delayed averaging, are those with which that time is least.

Left out: the sums of an all-reduce, TCP's slow start after a pause, and jitter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.plan.exchange.codec_memory import kept_bytes
from weft.plan.exchange.coded_tensor import is_coded
from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues
from weft.plan.exchange.weight_exchange import (
    ExchangeBucket,
    Weight,
    bucket_messages,
    exchange_buckets,
    exchange_buffer_bytes,
    exchange_bytes,
    has_two_phases,
    outer_bytes,
)
from weft.plan.late_merges import exchanges_after
from weft.plan.plan import Axes, Codec, Data, Plan, Precision
from weft.planning.compression import Shape, codec_time_s, describe, gradient_messages
from weft.planning.extra_steps import (
    FRAGMENTS,
    LOCAL_EVERY,
    OUTER_EVERY,
    ExtraSteps,
    Method,
    OptimizerKind,
    extra_steps,
)
from weft.planning.network import Exchange, LatePart, Network
from weft.profiles.cluster import Compression

OUTER = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.6}
"""Rates at which benchmarks/compression_gpt.py found an outer step best for intervals of this length."""
DELAYS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)
"""Delays of delayed averaging from which the best is taken."""
INTERVALS = (1, 2, 3, 4, 5, 10)
"""Intervals of delayed averaging, none longer than its delay."""
BACKWARD_SHARE = 2 / 3
"""The share of computing during which buckets of gradients leave: a backward pass takes twice a forward pass."""
_DTYPE = "float32"
"""The dtype of weights and gradients."""
_TOPK_MEMORY = 0.95
"""The share of what topk left out that replicas keep from exchange to exchange, as it was run."""
_DELAYED_TOPK_DENSITY = 0.03
"""The share of a tensor that topk sends under delayed averaging, as it was run."""
_CODECS_OF_CHANGES = (Codec(name="half"), Codec(name="onebit"), Codec(name="topk", bits=2))
"""Codecs with which replicas that differ exchange their changes, where they were timed."""
_STREAMING_DELAYS = range(1, OUTER_EVERY // 2 + 1)
"""Delays of streaming from which the best is taken, none longer than half an interval."""
_DELAYED = tuple(
    Data(sync="delayed", every=every, delay=delay) for delay in DELAYS for every in INTERVALS if every <= delay
)
"""Settings of delayed averaging from which the best is taken, from the shortest delay on."""
_EQUAL = 1 + 1e-9
"""Times whose ratio is not above this are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, on ranks whose codecs were timed."""

    shapes: tuple[Shape, ...]
    num_blocks: int | None = None
    """Blocks of the model, which streaming deals out to fragments; None: not known, and taken to be enough."""
    compute_s: float
    """Seconds that a step computes on one replica, which has its part of the batch."""
    optimizer: OptimizerKind = "adaptive"
    compressions: tuple[Compression, ...] = ()

    def __post_init__(self) -> None:
        assert self.shapes and self.compute_s > 0, f"a step of {len(self.shapes)} tensors takes {self.compute_s} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A method with its settings, on a workload and a network. Seconds, and bytes through one link, are per step."""

    name: str
    method: Method
    plan: Plan
    extra: ExtraSteps
    compute_s: float
    codec_s: float
    latency_s: float
    bandwidth_s: float
    step_s: float
    sent_bytes: float
    kept_bytes: int
    """Memory of a rank beside weights, gradients and the optimizer's state."""

    @property
    def hidden_s(self) -> float:
        """What of the exchange no step waits for."""
        hidden_s = self.compute_s + self.codec_s + self.latency_s + self.bandwidth_s - self.step_s
        return hidden_s if hidden_s > 1e-9 * self.step_s else 0.0

    @property
    def waited_s(self) -> float:
        """What of it a step waits for."""
        waited_s = self.step_s - self.compute_s - self.codec_s
        return waited_s if waited_s > 1e-9 * self.step_s else 0.0

    @property
    def same_loss_s(self) -> float:
        """Seconds in place of one step of synchronous training, to the same loss."""
        return self.step_s * self.extra.factor

    @property
    def ranked_s(self) -> float:
        """Seconds by which methods are ranked: those to the same loss, more where the steps are unknown."""
        return self.step_s * self.extra.ranking_factor


def predict(workload: Workload, network: Network) -> list[Prediction]:
    """All methods, best first; among equals the one that changes less. Codecs that compress no tensor of the model are
    left out: plans with them are refused."""
    useful = [one for one in workload.compressions if any(is_coded(one.codec, shape) for shape in workload.shapes)]
    workload = replace(workload, compressions=tuple(useful))
    found = [*_all_reduces(workload, network), *_methods_between_replicas(workload, network)]
    return sorted(found, key=lambda one: one.ranked_s)


def late_step_s(compute_s: float, latency_s: float, bandwidth_s: float, *, spacing: float, delay: int) -> float:
    """Seconds of a step of replicas that exchange after every `spacing` steps and merge `delay` steps later; those of
    the codec are in `compute_s`."""
    waited_s = latency_s + bandwidth_s - delay * compute_s
    return max(compute_s, bandwidth_s / spacing, compute_s + waited_s / max(spacing, delay))


def _all_reduces(workload: Workload, network: Network) -> Iterator[Prediction]:
    axes = Axes(data=network.num_replicas * network.ranks_per_link)
    yield _synchronous(workload, network, Plan(axes=axes), None)
    for measured in workload.compressions:
        if measured.codec.name == "half":  # gradients are rounded by [precision], not by a codec
            yield _synchronous(workload, network, Plan(axes=axes, precision=Precision(reduce="bf16")), measured)
        else:
            yield _synchronous(workload, network, Plan(axes=axes, codec=measured.codec), measured)


def _synchronous(workload: Workload, network: Network, plan: Plan, measured: Compression | None) -> Prediction:
    codec = measured.codec if measured else None
    messages = tuple(gradient_messages(codec, workload.shapes, network.num_replicas))
    exchange = Exchange(messages=messages, codec_s=_codec_s(measured, workload, network))
    latency_s, bandwidth_s = exchange.ring_latency_s(network), exchange.bandwidth_s(network, in_rings=True)
    last_s, hideable_s = network.ring.latency_s, BACKWARD_SHARE * workload.compute_s
    suffix = "bf16" if plan.codec.name == "none" and codec else describe(codec) if codec else ""
    return Prediction(
        name="all-reduce" + (f", {suffix}" if suffix else ""),
        method="all-reduce",
        plan=plan,
        extra=extra_steps(workload.optimizer, "all-reduce", suffix),
        compute_s=workload.compute_s,
        codec_s=exchange.codec_s,
        latency_s=latency_s,
        bandwidth_s=bandwidth_s,
        step_s=exchange.codec_s
        + max(workload.compute_s + last_s, workload.compute_s - hideable_s + latency_s + bandwidth_s),
        sent_bytes=sum(one.sent_bytes(network.num_replicas) for one in messages),
        kept_bytes=_codec_bytes(_buckets(workload, plan.codec), plan, network, num_copies=2),  # a step may be skipped
    )


def _methods_between_replicas(workload: Workload, network: Network) -> Iterator[Prediction]:
    timed = {(one.codec.name, one.codec.bits): one for one in workload.compressions}
    compressions = [timed.get((codec.name, codec.bits)) for codec in _CODECS_OF_CHANGES]
    outer = Data(sync="local", every=OUTER_EVERY, **OUTER)  # type: ignore[arg-type]
    num_fragments = FRAGMENTS if workload.num_blocks is None else min(FRAGMENTS, workload.num_blocks)
    for measured in (None, *(one for one in compressions if one)):
        replicas = _replicas(workload, network, measured)
        yield replicas.predict("local", f"every {LOCAL_EVERY} steps", Data(sync="local", every=LOCAL_EVERY))
        yield replicas.predict("diloco", f"DiLoCo, every {OUTER_EVERY}", outer)
        if num_fragments > 1 and (measured is None or measured.codec.name == "onebit"):
            streams = [replace(outer, fragments=num_fragments, delay=delay) for delay in _STREAMING_DELAYS]
            data = replicas.best_of("streaming", streams)
            yield replicas.predict("streaming", f"streaming DiLoCo, delay {data.delay}", data)
        if measured is not None and measured.codec.name == "topk":
            replicas = _replicas(workload, network, _at_density(measured, _DELAYED_TOPK_DENSITY))
        data = replicas.best_of("delayed", _DELAYED)
        every = f", every {data.every}" if data.every > 1 else ""
        yield replicas.predict("delayed", f"delayed by {data.delay}{every}", data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicas:
    """Replicas that differ between exchanges, with one codec."""

    workload: Workload
    network: Network
    codec: Codec
    buckets: list[ExchangeBucket]
    """The buckets of an exchange of the whole model."""
    exchange: Exchange
    in_rings: tuple[LatePart, ...]
    late_parts: tuple[LatePart, ...]
    """The exchange at once, and where it has time for several phases."""

    def best_of(self, method: Method, settings: Sequence[Data]) -> Data:
        """The first of these settings with the least time to the same loss."""
        times_s = [self.step_s(data) * self.extra(method, data).ranking_factor for data in settings]
        limit_s = min(times_s) * _EQUAL
        return next(data for data, each_s in zip(settings, times_s, strict=True) if each_s <= limit_s)

    def extra(self, method: Method, data: Data) -> ExtraSteps:
        assert isinstance(data.delay, int)
        optimizer, codec = self.workload.optimizer, self.suffix
        return extra_steps(optimizer, method, codec, every=data.every, delay=data.delay, fragments=data.fragments)

    @property
    def suffix(self) -> str:
        return "" if self.codec.name == "none" else describe(self.codec)

    def parts(self, data: Data) -> tuple[LatePart, ...]:
        """Of one exchange of the whole model; of fragments each has the latency."""
        return self.late_parts if has_two_phases(data.delay) else self.in_rings

    def step_s(self, data: Data) -> float:
        delay = data.delay
        assert isinstance(delay, int)
        return max(
            late_step_s(
                self.workload.compute_s + self.exchange.codec_s / data.every,
                one.latency_s,
                one.bandwidth_s / data.fragments,
                spacing=data.every / data.fragments,
                delay=one.num_phases * (delay // one.num_phases),
            )
            for one in self.parts(data)
        )

    def predict(self, method: Method, name: str, data: Data) -> Prediction:
        plan, parts = _plan(self.network, data, self.codec), self.parts(data)
        is_whole = data.fragments == 1
        buckets = self.buckets if is_whole else _buckets(self.workload, self.codec, data.fragments)
        return Prediction(
            name=name + (f", {self.suffix}" if self.suffix else ""),
            method=method,
            plan=plan,
            extra=self.extra(method, data),
            compute_s=self.workload.compute_s,
            codec_s=self.exchange.codec_s / data.every,
            latency_s=max(one.latency_s for one in parts) * data.fragments / data.every,
            bandwidth_s=max(one.bandwidth_s for one in parts) / data.every,
            step_s=self.step_s(data),
            sent_bytes=_sent_bytes(buckets, plan),
            kept_bytes=_codec_bytes(buckets, plan, self.network, num_copies=1)
            + (outer_bytes(buckets, plan) + exchange_buffer_bytes(buckets, plan)) // self.network.ranks_per_link,
        )


def _replicas(workload: Workload, network: Network, measured: Compression | None) -> _Replicas:
    codec = measured.codec if measured else Codec()
    if codec.name == "topk":
        codec = replace(codec, memory=_TOPK_MEMORY)
    plan = _plan(network, Data(sync="local"), codec)
    buckets = _buckets(workload, codec)
    each = [bucket_messages(bucket, plan, step=codec.warmup_steps) for bucket in buckets]
    exchange = Exchange(
        messages=tuple(message for messages in each for message in messages),
        codec_s=_codec_s(measured, workload, network),
        buckets=tuple(each),
    )
    in_rings = LatePart(
        num_phases=1,
        latency_s=exchange.ring_latency_s(network),
        bandwidth_s=exchange.bandwidth_s(network, in_rings=True),
    )
    return _Replicas(
        workload=workload,
        network=network,
        codec=codec,
        buckets=buckets,
        exchange=exchange,
        in_rings=(in_rings,),
        late_parts=tuple(exchange.late_parts(network)),
    )


def _at_density(measured: Compression, density: float) -> Compression:
    """A sparse codec as it was timed at another density: all elements are encoded, and only sent ones decoded."""
    decode_ns = measured.replica_element_ns * density / measured.density
    return replace(measured, density=density, replica_element_ns=decode_ns)


def _plan(network: Network, data: Data, codec: Codec) -> Plan:
    """Replicas that differ are hosts: where a host has several ranks, they share one copy of the state."""
    if network.ranks_per_link == 1:
        return Plan(axes=Axes(data=network.num_replicas), data=data, codec=codec)
    axes = Axes(data=network.ranks_per_link, replicate=network.num_replicas)
    return Plan(axes=axes, data=replace(data, shard="optimizer"), codec=codec)


def _buckets(workload: Workload, codec: Codec, num_fragments: int = 1) -> list[ExchangeBucket]:
    """The buckets in which all weights are exchanged, in fragments of about equal size."""
    numels = [math.prod(shape) for shape in workload.shapes]
    ends, whole = zip(numels, itertools.accumulate(numels), strict=True), sum(numels)
    fragment_of = {str(place): (end - numel) * num_fragments // whole for place, (numel, end) in enumerate(ends)}
    weights = [
        Weight(numel=numel, dtype=_DTYPE, name=str(place), shape=shape)
        for place, (numel, shape) in enumerate(zip(numels, workload.shapes, strict=True))
    ]
    return exchange_buckets(weights, Plan().comm.bucket_bytes, codec, fragment_of)


def _sent_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> float:
    """Bytes sent per step in an interval after the codec's warm-up."""
    every = plan.data.every
    first = every * -(-plan.codec.warmup_steps // every)
    steps = [step for step in range(first, first + every) if exchanges_after(plan.data, step + 1)]
    return sum(exchange_bytes(buckets, plan, step=step) for step in steps) / every


def _codec_s(measured: Compression | None, workload: Workload, network: Network) -> float:
    if measured is None:
        return 0.0
    return codec_time_s(measured, workload.shapes, network.num_replicas, ranks_per_link=network.ranks_per_link)


def _codec_bytes(buckets: Sequence[ExchangeBucket], plan: Plan, network: Network, *, num_copies: int) -> int:
    values = [CodedValues(tensors=one.coded, numel=one.numel, dtype=one.dtype) for one in buckets if one.coded]
    groups = CodecGroups(num_across=network.num_replicas)
    return kept_bytes(values, plan.codec, groups, num_copies=num_copies) // network.ranks_per_link
