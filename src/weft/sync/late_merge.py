"""Exchanges between replicas that are merged steps after they were sent: what delayed averaging and streaming share.

After a step, in this order:

    1  exchanges whose delay is over are merged, the oldest first
    2  those under way begin their next phase, if it is due (`exchange/in_flight.py`)
    3  what is due after this step is sent

So the collectives of a step depend on its number and the delay alone. An exchange is under way with the change of some
buckets; the subclass decides what becomes of weights and anchors when its mean arrives. Replicas differ by what is
under way: outside of steps the run is their mean (`LocalSync.consensus`), and training goes on as if nobody had looked.

Under `[data] offload` all that is kept is in host memory, and so is what is sent. Running statistics of BatchNorm stay
each replica's own. Until `[data] switch_step` replicas average after every step, as `LocalSync` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.codecs.base import Codec
from weft.comm.collectives import Pending, all_gather
from weft.comm.group import Group
from weft.comm.under_way import wait_before_leaving
from weft.plan.exchange.weight_exchange import ExchangeBucket, has_two_phases
from weft.sync.exchange.compressed_exchange import CompressedExchange
from weft.sync.exchange.in_flight import ExchangesInFlight, Flight, Phases
from weft.sync.exchange.in_flight_memory import free_bytes, further_delay_that_fits, require_memory
from weft.sync.in_process import InProcessSide
from weft.sync.late_merge_in_process import SendingInProcess
from weft.sync.local import LocalSync


@dataclass(slots=True, kw_only=True, eq=False)
class Sent:
    """One exchange that is not merged yet."""

    step: int
    """The number of steps done when it was sent."""
    buckets: tuple[int, ...]
    """Numbers of its buckets."""
    codecs: CompressedExchange
    flight: Flight = field(default_factory=Flight)
    own: dict[int, torch.Tensor] = field(default_factory=dict)
    """This replica's change of each bucket, while it is needed."""
    mean: dict[int, torch.Tensor] = field(default_factory=dict)
    """The mean over replicas of each bucket that has arrived."""
    tail: torch.Tensor | None = None
    """The replicas' reports."""
    tail_exchange: Pending | None = None


class LateMergeSync(LocalSync):
    """A replica's own sync, and exchanges of changes that are merged some steps after they were sent."""

    keeps_own = False
    """Whether the own change is needed when the mean is merged."""

    def __init__(self, *given: Any, exchange_group: Group, everyone: Group, num_sharing: int, **named: Any) -> None:
        """As `LocalSync`; `exchange_group`: the ranks of `group`, as a group that moves tensors from where they are
        kept. `everyone`: all ranks, of which `num_sharing` share the memory where that is. Refuses what does not fit
        into it."""
        self._exchange_group = exchange_group
        super().__init__(*given, **named)
        self._num_sharing = num_sharing * (1 if self._in_process is None else self.num_replicas)
        if self._device.type != "meta" and self.num_replicas > 1:
            free = free_bytes(self._kept_on, num_sharing=self._num_sharing)
            require_memory(self._planned(), self._plan, free, everyone, can_move=self._kept_on.type != "cpu")

    def _planned(self) -> list[ExchangeBucket]:
        return [one.planned for one in self._buckets]

    def further_delay_that_fits(self) -> int:
        """Steps by which the delay could grow in the memory that is left when a step needs the most."""
        free = free_bytes(self._kept_on, num_sharing=self._num_sharing, at_peak=True)
        return further_delay_that_fits(self._planned(), self._plan, free)

    def _make_buffers(self) -> None:
        if self._plan.data.switch_step:
            super()._make_buffers()
        self.delay = self._first_delay()
        """Steps between the sending of an exchange and its merging."""
        self._exchanges = ExchangesInFlight(
            self._exchange_group, self._kept_on, num_replicas=self.num_replicas, allocate=self._make_memory
        )
        self._queue: deque[Sent] = deque()
        """Exchanges that are not merged yet, oldest first."""
        wait_before_leaving(self)

    def _first_delay(self) -> int:
        delay = self._plan.data.delay
        assert isinstance(delay, int)
        return delay

    def _make_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._kept_on)  # not page-locked: it never goes to a GPU

    def _make_compressed(self, device: torch.device) -> CompressedExchange:
        # What travels under `offload` is in host memory, and compressed there.
        return super()._make_compressed(self._kept_on)

    @property
    def _codec_group(self) -> Group:
        return self._exchange_group

    # The exchange.

    def _exchange_if_due(self) -> bool:
        if self.steps_done < self._plan.data.switch_step:
            return super()._exchange_if_due()
        self.steps_done += 1
        self.agrees = False
        for sent in self._queue:
            self._exchanges.count_step(sent.flight)
        is_merged = self._merge_due()
        for sent in self._queue:
            self._exchanges.advance(sent.flight, age=self.steps_done - sent.step, delay=self.delay)
        if self._due_buckets() is not None:
            self.inner.settle()
            if self._in_process is not None:
                self._in_process.exchange()
            else:
                self._send()
                is_merged = self._merge_due() or is_merged
        if is_merged:
            self.inner.publish()
        return is_merged

    def _due_buckets(self) -> Sequence[int] | None:
        """The numbers of the buckets that are sent after this step, if any are here; None: no rank sends anything."""
        raise NotImplementedError

    @torch.no_grad()
    def _send(self) -> None:
        """Start the exchange of what is due after this step."""
        sent = self.new_exchange()
        phases = {number: self._phases(number, sent) for number in sent.buckets}
        num_phases_of = {number: self._num_phases(number, sent) for number in sent.buckets}
        sent.tail = self.fill_tail()
        if phases:
            sent.flight = self._exchanges.start(phases, num_phases_of)
        # Every replica has filled its own row: one hop instead of the rounds of a ring.
        rows = sent.tail.view(self.num_replicas, -1)
        sent.tail_exchange = all_gather(sent.tail, rows[self._group.index], self._group, wait=False)
        self._queue.append(sent)

    def new_exchange(self) -> Sent:
        """A new exchange of what is due after this step."""
        numbers = self._due_buckets()
        assert numbers is not None
        return Sent(step=self.steps_done, buckets=tuple(numbers), codecs=self._codecs_of_next())

    def queue_arrived(self, sent: Sent) -> None:
        """What was sent has arrived already, and is merged when its delay is over."""
        self._queue.append(sent)
        if self._merge_due():
            self.inner.publish()

    def _codecs_of_next(self) -> CompressedExchange:
        """The codecs of the exchange that is being sent."""
        return self._compressed

    @property
    def _is_at_once(self) -> bool:
        """There is no time for two phases."""
        return not has_two_phases(self.delay)

    def _phases(self, number: int, sent: Sent) -> Phases:
        """Those of a bucket, whose change is taken when the first one begins: one bucket after the other."""
        own = self.change(number, sent)

        def take(mean: torch.Tensor) -> None:
            sent.mean[number] = mean
            if not self.keeps_own and number in sent.own:
                self._exchanges.hand_back(sent.own.pop(number))

        codec, at_once = self.codec_in(sent, number), self._is_at_once
        if codec is None:
            yield from self._exchanges.mean(own, take, at_once=at_once)
            return
        values = self.values(number, sent)
        yield from self._exchanges.coded_mean(codec, values, take, step=self.steps_done - 1, at_once=at_once)

    def change(self, number: int, sent: Sent) -> torch.Tensor:
        """Put this replica's change of a bucket, old minus new, into memory of its own."""
        bucket = self._buckets[number]
        is_coded = self.codec_in(sent, number) is not None
        borrow = self._exchanges.borrow if is_coded and not self.keeps_own else self._exchanges.borrow_exact
        own = sent.own[number] = borrow(self._length(number), bucket.dtype)
        own[bucket.numel :].zero_()
        self._read_change(number, bucket.read_into(own[: bucket.numel]))
        return own

    def _length(self, number: int) -> int:
        """The length of a bucket's change: with equal shares for all ranks, if these are summed."""
        numel = self._buckets[number].numel
        return numel if number in self._number_of or self._is_at_once else self._exchanges.padded(numel)

    def _read_change(self, number: int, weights: torch.Tensor) -> None:
        """Replace the weights of a bucket by their change since the anchor."""
        torch.sub(self._anchors[number], weights, out=weights)

    def values(self, number: int, sent: Sent) -> torch.Tensor:
        """The change of a bucket in memory that the exchange may overwrite."""
        own = sent.own[number] if self.keeps_own else sent.own.pop(number)
        if not self.keeps_own:
            return own
        numel = self._buckets[number].numel
        return self._exchanges.borrow(numel, own.dtype).copy_(own[:numel])

    def _num_phases(self, number: int, sent: Sent) -> int:
        """The number of collectives in which a bucket is exchanged."""
        in_a_sum = 1 if self._is_at_once else 2
        codec = self.codec_in(sent, number)
        if codec is None:
            return in_a_sum
        return sum(in_a_sum if one.adds_up else 1 for one in codec.begin(self.steps_done - 1))

    def codec_in(self, sent: Sent, number: int) -> Codec | None:
        """The codec of a bucket in an exchange, if it has one."""
        return sent.codecs.codecs[self._number_of[number]] if number in self._number_of else None

    def in_process_side(self) -> InProcessSide:
        is_plain = self.steps_done <= self._plan.data.switch_step
        return self if is_plain else SendingInProcess(self)

    def _averaged_statistics(self) -> Sequence[torch.Tensor]:
        return super()._averaged_statistics() if self.steps_done <= self._plan.data.switch_step else []

    # The merge.

    @torch.no_grad()
    def _merge_due(self) -> bool:
        """Merge all exchanges whose delay is over; False if there are none."""
        num_before = self.num_exchanges
        while self._queue and self._queue[0].step + self.delay <= self.steps_done:
            self._merge(self._queue.popleft())
        return self.num_exchanges > num_before

    def _merge(self, sent: Sent) -> None:
        self.inner.settle()
        arrived = [number for number in sent.buckets if number not in sent.flight.buckets]  # before, for a checkpoint
        for numbers in (arrived, self._exchanges.finish(sent.flight)):
            for number in numbers:
                self._merge_bucket(number, sent)
                for kept in (sent.own, sent.mean):
                    if number in kept:
                        self._exchanges.hand_back(kept.pop(number))
        self._copy_shared()
        self._wait_for_tail(sent)
        if sent.tail is not None:
            super().take_tail(sent.tail)
        self.spread = (self._squares[0] / self._squares[1].clamp(min=1e-300)).sqrt()  # 0 where nothing is trained
        self._squares = torch.zeros_like(self._squares)
        self.num_exchanges += 1
        self.merged_step = self.steps_done
        self._after_merge(sent)

    def _merge_bucket(self, number: int, sent: Sent) -> None:
        """Change weights and anchor of a bucket by the mean that has arrived; its memory may be overwritten."""
        raise NotImplementedError

    def _after_merge(self, sent: Sent) -> None:
        """An exchange was merged."""

    def _wait_for_tail(self, sent: Sent) -> None:
        if sent.tail_exchange is not None:
            sent.tail_exchange.wait()
            sent.tail_exchange = None

    def _add_norms(self, distance: torch.Tensor, weights: torch.Tensor) -> None:
        """Add to the squared distance from other replicas, and to the squared norm of the weights."""
        found = torch.stack([torch.linalg.vector_norm(distance), torch.linalg.vector_norm(weights)])
        self._squares += found.to(self._squares).square_()

    def wait(self) -> None:
        """At the end of a process: wait for what it has begun, and begin nothing, which others may not do with it."""
        for sent in list(self._queue):
            for one in sent.flight.buckets.values():
                if one.under_way is not None:
                    one.under_way.wait()
            self._wait_for_tail(sent)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def drain(self) -> None:
        for sent in self._queue:
            for _ in self._exchanges.finish(sent.flight):
                pass
            self._wait_for_tail(sent)

    # Between exchanges.

    def conclude(self) -> None:
        self.drain()
        super().conclude()

    def restart(self, *, steps_done: int) -> None:
        self.drain()
        self._forget()
        super().restart(steps_done=steps_done)

    def _forget(self) -> None:
        """Drop all that is under way."""
        for sent in self._queue:
            for buffer in (*sent.own.values(), *sent.mean.values()):
                self._exchanges.hand_back(buffer)
        self._queue.clear()

    def own_tensors(self) -> dict[str, torch.Tensor]:
        found = super().own_tensors()
        for place, sent in enumerate(self._queue):
            for kind, flats in ((f"own-{place}", sent.own), (f"mean-{place}", sent.mean)):
                for number, flat in flats.items():
                    bucket = self._buckets[number]
                    views = zip(bucket.names, bucket.views(flat[: bucket.numel]), strict=True)
                    found |= {f"{kind}/{name}": view for name, view in views}
        return found

    def state(self) -> dict[str, Any]:
        return super().state() | {"sent": [[sent.step, list(sent.buckets)] for sent in self._queue]}

    def load_state(self, state: dict[str, Any]) -> None:
        """What is under way gets its memory here; the tensors of `own_tensors` are read into it afterwards."""
        super().load_state(state)
        self.drain()
        self._forget()
        for step, numbers in state["sent"]:
            sent = Sent(step=int(step), buckets=tuple(numbers), codecs=self._compressed)
            for number in numbers:
                sent.mean[number] = self._borrow_zeros(number)
                if self.keeps_own:
                    sent.own[number] = self._borrow_zeros(number)
            self._queue.append(sent)

    def _borrow_zeros(self, number: int) -> torch.Tensor:
        return self._exchanges.borrow_exact(self._length(number), self._buckets[number].dtype).zero_()
