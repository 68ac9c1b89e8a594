"""Exchanges between replicas that stay under way over several steps, without a thread.

An exchange goes through phases; each starts one collective, and the next begins when that is over:

    no codec                             a reduce-scatter, then an all-gather of the shares of the sum
    codec whose messages can be summed   the same, of the message
    other codecs                         an all-gather of the messages

Two hops, whatever the number of replicas: a ring would take 2 (replicas - 1), each as long as the latency of the line.
The phases of a bucket begin in steps that the delay alone fixes: of two phases, the second begins half the delay after
the first, and a single one has the whole delay. So all ranks start the same collectives in the same order, none starts
from a callback, and what was sent in one step travels while the next ones compute. Buckets with more phases go first:
their next one begins while the messages of others are still on their way.

    delay = 4   step 1          step 2          step 3      step 4      step 5      step 6
    exchange 1  reduce-scatter                  all-gather              merged
    exchange 2                  reduce-scatter              all-gather              merged

With a delay of one step there is no time for two phases: an all-reduce makes the sum (`at_once`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from weft.codecs.base import Codec
from weft.comm.collectives import Pending, all_gather, all_reduce, reduce_scatter
from weft.comm.group import Group
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.messages import Message
from weft.plan.partition.zero import BufferPool

Phases = Iterator[Pending]
Take = Callable[[torch.Tensor], None]

_POLL_S = 2e-4
_NOTICED_WAIT = 0.05
"""The share of a step from which on a wait counts."""


@dataclass(slots=True, kw_only=True, eq=False)
class BucketInFlight:
    """The exchange of one bucket, until it is over."""

    phases: Phases
    num_phases: int
    num_started: int = 0
    under_way: Pending | None = None
    """The collective that was started last, until it is known to be over."""
    phase_age: int = 0
    """Steps since then."""
    longest_phase: int = 0
    """The most steps that a phase took."""
    waited_before_s: float = 0.0
    """Seconds that exchanges were waited for before the phase under way began."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One exchange that is under way, or over and not merged yet."""

    buckets: dict[int, BucketInFlight] = field(default_factory=dict)
    """Those that are not over, by their numbers, in the order in which they are sent."""
    num_phases: int = 0
    """The most that one of its buckets has."""
    needed_delay: int = 0
    """The delay with which no phase would have been waited for, as far as buckets are over."""


class ExchangesInFlight:
    """The collectives of exchanges under way, on one group, in one order on all its ranks, and their memory."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        num_replicas: int,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        """`allocate`: new memory on the device."""
        self._group, self._device, self._num_replicas, self._allocate = group, device, num_replicas, allocate
        self._pool: BufferPool[torch.Tensor] = BufferPool(torch.Tensor.numel)
        self._not_finite = torch.zeros(1, dtype=torch.float32, device=device)  # replicas look at their own losses
        self.waited_s = 0.0
        """Seconds that this rank waited for exchanges under way; where a stream waits instead, not counted."""
        self.step_s = 0.0
        """Duration of a step, by which a wait is counted in steps; 0: not known yet."""
        self.is_measured = False
        """The host finds out how long exchanges are waited for; otherwise streams wait alone."""

    def start(self, phases: Mapping[int, Phases], num_phases_of: Mapping[int, int]) -> Flight:
        """Send one exchange: the phases of its buckets, of which each has so many."""
        order = sorted(phases, key=lambda number: -num_phases_of[number])
        buckets = {number: BucketInFlight(phases=phases[number], num_phases=num_phases_of[number]) for number in order}
        for one in buckets.values():
            self._begin_next(one, self.waited_s)
        return Flight(buckets=buckets, num_phases=max(num_phases_of.values(), default=0))

    def count_step(self, flight: Flight) -> None:
        """One more step has passed."""
        for one in flight.buckets.values():
            if one.under_way is not None:
                one.phase_age += 1
                if one.under_way.is_over:
                    self._end_phase(one)

    def advance(self, flight: Flight, *, age: int, delay: int) -> None:
        """Begin the phases that are due when so many steps of its delay have passed."""
        waited_before_s = self.waited_s
        num_due = {number: self._num_due(one, age, delay) for number, one in flight.buckets.items()}
        # One phase of all buckets after the other: they travel together.
        while due := [one for number, one in flight.buckets.items() if one.num_started < num_due[number]]:
            for one in due:
                self._begin_next(one, waited_before_s)

    @staticmethod
    def _num_due(one: BucketInFlight, age: int, delay: int) -> int:
        """The number of phases that have begun by then."""
        return min(1 + one.num_phases * age // max(delay, 1), one.num_phases)

    def finish(self, flight: Flight) -> Iterator[int]:
        """Wait until an exchange is over, bucket by bucket: their numbers, once each is."""
        waited_before_s = self.waited_s
        while left := [one for one in flight.buckets.values() if one.num_started < one.num_phases]:
            for one in left:
                self._begin_next(one, waited_before_s)
        for number, one in list(flight.buckets.items()):
            self._wait(one, waited_before_s)
            further = self._next(one.phases)  # takes the mean
            assert further is None, "a phase was left"
            flight.needed_delay = max(flight.needed_delay, one.num_phases * one.longest_phase)
            del flight.buckets[number]
            yield number

    def _begin_next(self, one: BucketInFlight, waited_before_s: float) -> None:
        """Wait for the phase of a bucket that is under way, and begin the next one."""
        self._wait(one, waited_before_s)
        one.num_started += 1
        one.phase_age = 0
        one.waited_before_s = self.waited_s
        one.under_way = self._next(one.phases)
        assert one.under_way is not None, "a phase is missing"

    @torch.no_grad()
    def _next(self, phases: Phases) -> Pending | None:
        return next(phases, None)

    def _wait(self, one: BucketInFlight, waited_before_s: float) -> None:
        """`waited_before_s`: of `waited_s`, before this exchange was waited for: its buckets travel together."""
        if one.under_way is None:
            return
        if self.is_measured and self._device.type == "cuda" and not one.under_way.is_over:
            # The host is up to a step ahead of its GPU: what that still computes is no waiting.
            torch.cuda.current_stream(self._device).synchronize()
        started = time.perf_counter()
        while self.is_measured and self._group.is_stream_ordered and not one.under_way.is_over:
            time.sleep(_POLL_S)  # the host would not notice how long a stream waits
        if self.is_measured and self._group.waits_on_stream:  # the stream will find it over, and count nothing
            self._group.traffic.add(wait_s=time.perf_counter() - started)
        one.under_way.wait()
        own_wait_s = time.perf_counter() - started
        self.waited_s += own_wait_s
        if self.step_s and own_wait_s > _NOTICED_WAIT * self.step_s:  # else it was over before
            waited_s = self.waited_s - max(waited_before_s, one.waited_before_s)
            one.phase_age += math.ceil(waited_s / self.step_s)
        self._end_phase(one)

    def _end_phase(self, one: BucketInFlight) -> None:
        one.longest_phase = max(one.longest_phase, one.phase_age, 1)
        one.under_way = None

    def mean(self, own: torch.Tensor, take: Take, *, at_once: bool) -> Phases:
        """Give `take` the mean of all replicas' `own`, which is as long as `padded` says. `at_once`: in one phase."""
        total = self.borrow_exact(own.numel(), own.dtype)
        yield from self._sum(own, total, at_once=at_once)
        take(total.div_(self._num_replicas))

    def coded_mean(self, codec: Codec, values: torch.Tensor, take: Take, *, step: int, at_once: bool) -> Phases:
        """Give `take` the mean of what all replicas send of their `values`, which are handed back here. A codec that
        does not learn from decoding may encode for later exchanges before this one is decoded: its state is settled
        once its message is made."""
        learns, numel, dtype = codec.learns_from_decoding, values.numel(), values.dtype
        messages = codec.begin(step)
        for number, message in enumerate(messages):
            sent, received = self._message_buffers(message, at_once=at_once)
            codec.encode(number, values, sent[: message.numel] if message.adds_up else sent, self._not_finite)
            if not learns:
                codec.end(True)
            if len(messages) == 1:  # so nothing as large as the values waits for the message
                self.hand_back(values)
            if message.adds_up:
                yield from self._sum(sent, received, at_once=at_once)
                taken = received[: message.numel]
                self.hand_back(sent)
            else:
                pending = all_gather(received, sent, self._group, wait=False)
                yield pending
                pending.wait()
                taken = received.view(self._group.size, -1)
            if len(messages) == 1:
                values = self.borrow(numel, dtype)
            if not learns:
                codec.begin(step)  # the format of this exchange, which may not be that of the last one sent
            codec.decode(number, taken, values, scale=1 / self._num_replicas)
            self.hand_back(received)
        if learns:
            codec.end(True)
        take(values)

    def _sum(self, tensor: torch.Tensor, total: torch.Tensor, *, at_once: bool) -> Phases:
        if at_once:
            pending = all_reduce(total.copy_(tensor), self._group, wait=False)
            yield pending
            pending.wait()
            return
        share = self.borrow_exact(total.numel() // self._group.size, total.dtype)
        pending = reduce_scatter(share, tensor, self._group, received=total, wait=False)
        yield pending
        pending.wait()
        pending = all_gather(total, share, self._group, wait=False)
        yield pending
        pending.wait()
        self.hand_back(share)

    def _message_buffers(self, message: Message, *, at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for this rank's message, and for what is received."""
        dtype, group = torch_dtype(message.dtype), self._group
        if message.adds_up:
            length = message.numel if at_once else self.padded(message.numel)
            sent = self.borrow_exact(length, dtype)
            sent[message.numel :].zero_()
            return sent, self.borrow_exact(length, dtype)
        received = self.borrow_exact(group.size * message.numel, dtype)
        return received[group.index * message.numel : (group.index + 1) * message.numel], received

    def padded(self, numel: int) -> int:
        """The least length from so many elements on of which every rank has an equal share."""
        return -(-numel // self._group.size) * self._group.size

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a moment, not initialised, until it is handed back: buckets of all sizes share it."""
        found = self._pool.borrow(numel, dtype)
        return (self._allocate(numel, dtype) if found is None else found)[:numel]

    def borrow_exact(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for several steps: of just this size, which the next exchange will need again."""
        found = self._pool.borrow(numel, (dtype, numel))
        return self._allocate(numel, dtype) if found is None else found

    def forget_exact(self) -> None:
        """Let go of free memory of just one size: the next exchange is of other buckets."""
        for key in [one for one in self._pool.free if isinstance(one, tuple)]:
            del self._pool.free[key]

    def trim(self) -> None:
        """Let go of memory that nothing uses: fewer exchanges are under way from now on."""
        self._pool.free.clear()

    def hand_back(self, buffer: torch.Tensor) -> None:
        # `borrow` gives a slice and `borrow_exact` a whole tensor, which tells where it came from.
        if buffer._base is None:
            self._pool.hand_back(buffer, (buffer.dtype, buffer.numel()))
        else:
            self._pool.hand_back(buffer._base, buffer.dtype)
