"""The time that codecs take on this device: one bucket encoded and decoded, without the wire.

A line describes it: seconds per bucket, per element, and per element of every replica's message, because what does not
add up is decoded replica by replica. Three points give it: a small and a large bucket, and the large one with messages
of more replicas. All ranks measure at the same time, so that ranks that share cores or memory find the speeds they will
have in training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from weft.codecs.base import Bucket, Codec
from weft.codecs.dgc import Dgc
from weft.codecs.make import make_codec
from weft.plan.exchange.coded_tensor import coded_tensors
from weft.plan.exchange.messages import Message
from weft.plan.plan import Codec as CodecSection

MEASURED = (
    CodecSection(name="half"),
    CodecSection(name="topk"),
    CodecSection(name="topk", bits=2),
    CodecSection(name="dgc", density=0.001),
    CodecSection(name="onebit"),
    CodecSection(name="sign"),
    CodecSection(name="qsgd"),
    CodecSection(name="qsgd", levels=4),
    CodecSection(name="terngrad"),
    CodecSection(name="powersgd"),
)
"""Every codec, with usual settings."""

MOMENTUM = (0.9, False)
"""What dgc corrects for here: the momentum, and whether it is Nesterov's."""

_SIDE = {"cpu": 512, "cuda": 1024}
_NUM_MATRICES = {"cpu": (1, 4, 16), "cuda": (4, 16, 64)}
"""Of the small bucket, and of the large one: the larger number where there is time for it."""
_FEW_REPLICAS, _MORE_REPLICAS = 2, 6
_MOST_SAMPLES = 50
_FEWEST_EXCHANGES = 2
"""Of a point: the first one warms up."""


def measure_codec(section: CodecSection, device: torch.device, *, budget_s: float) -> dict[str, float]:
    """alpha_s, element_ns and replica_element_ns, as `Compression` has them."""
    side, (few, several, many) = _SIDE[device.type], _NUM_MATRICES[device.type]

    def exchange(num_matrices: int, num_replicas: int) -> TimedExchange:
        return TimedExchange(section, [(side, side)] * num_matrices, device, num_replicas=num_replicas)

    small = exchange(few, _FEW_REPLICAS)
    few_s = _median_s(small, budget_s / 4)
    # Codecs without compiled loops are slow: on fewer elements, then.
    longest_s = few_s * many / few * 2 * _FEWEST_EXCHANGES * _MORE_REPLICAS / _FEW_REPLICAS
    large = many if longest_s < budget_s else several
    large_s = [_median_s(exchange(large, number), budget_s * 3 / 8) for number in (_FEW_REPLICAS, _MORE_REPLICAS)]
    return fit_codec(few * side**2, large * side**2, [few_s, *large_s], adds_up=small.adds_up)


def fit_codec(few: int, many: int, times: list[float], *, adds_up: bool) -> dict[str, float]:
    """The line through three times: of few elements and of many with few replicas, and of many with more.

    What adds up is decoded once, however many replicas there are: a difference is noise then.
    """
    few_s, many_s, more_s = times
    if adds_up:
        many_s = more_s = min(many_s, more_s)
    replica_s = max(0.0, more_s - many_s) / (many * (_MORE_REPLICAS - _FEW_REPLICAS))
    both_s = max(0.0, many_s - few_s) / (many - few)
    return {
        "alpha_s": max(0.0, few_s - few * both_s),
        "element_ns": 1e9 * max(0.0, both_s - _FEW_REPLICAS * replica_s),
        "replica_element_ns": 1e9 * replica_s,
    }


class TimedExchange:
    """One exchange of a bucket of matrices after the other, in which every replica sends the same."""

    def __init__(
        self, section: CodecSection, shapes: list[tuple[int, ...]], device: torch.device, *, num_replicas: int
    ) -> None:
        tensors = coded_tensors([(str(place), shape, math.prod(shape)) for place, shape in enumerate(shapes)])
        numel = sum(one.numel for one in tensors)
        self._device, self._num_replicas, self._step = device, num_replicas, 0
        self.adds_up = True
        """The messages of all exchanges so far added up."""
        self._given = torch.randn(numel, generator=torch.Generator(device).manual_seed(0), device=device)
        self._values = torch.empty_like(self._given)
        self._not_finite = torch.zeros(1, device=device)
        self._buffers: dict[tuple[int, Message], tuple[torch.Tensor, torch.Tensor]] = {}
        bucket = Bucket(
            codec=section,
            tensors=tensors,
            numel=numel,
            dtype=torch.float32,
            device=device,
            replica=0,
            num_replicas=num_replicas,
        )
        self.codec: Codec = make_codec(bucket)
        if isinstance(self.codec, Dgc):
            self.codec.momenta = [MOMENTUM] * len(shapes)

    def seconds(self) -> float:
        """Seconds of encoding and decoding in the next exchange."""
        self._values.copy_(self._given)
        messages = self.codec.begin(self._step)
        self._step += 1
        taken_s = 0.0
        for number, message in enumerate(messages):
            self.adds_up &= message.adds_up
            sent, received = self._buffers_of(number, message)
            taken_s += self._time(partial(self.codec.encode, number, self._values, sent, self._not_finite))
            received.copy_(sent)
            taken_s += self._time(partial(self.codec.decode, number, received, self._values))
        self.codec.end(True)
        return taken_s

    def _buffers_of(self, number: int, message: Message) -> tuple[torch.Tensor, torch.Tensor]:
        key = (number, message)
        if key not in self._buffers:
            sent = torch.zeros(message.numel, dtype=getattr(torch, message.dtype), device=self._device)
            self._buffers[key] = sent, (sent.clone() if message.adds_up else sent.repeat(self._num_replicas, 1))
        return self._buffers[key]

    def _time(self, run: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _median_s(exchange: TimedExchange, budget_s: float) -> float:
    """Of as many exchanges as there is time for, after the first, which may compile."""
    deadline = time.perf_counter() + budget_s
    samples = [exchange.seconds() for _ in range(_FEWEST_EXCHANGES)][1:]
    while time.perf_counter() < deadline and len(samples) < _MOST_SAMPLES:
        samples.append(exchange.seconds())
    return statistics.median(samples)
