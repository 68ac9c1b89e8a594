"""All-reduce data parallelism: gradients are summed over the data axis while the backward pass still runs.

    backward      |-- head --|-- block 3 --|-- block 2 --|-- block 1 --|-- embedding --|
    bucket 0               1 |~~ exchange ~~|
    bucket 1                             2 |~~~~~~~~ exchange ~~~~~~~~|
    bucket 2 + tail                                                                  3 |~~ exchange ~~| 4

(1) A parameter's gradient moves into its view of a flat bucket as soon as autograd has accumulated it, and from then on
*is* that view. (2) A bucket leaves when it is full and all buckets before it have left. (3) The last bucket waits for
the end of the backward pass, because the tail (loss, count, times, flags of used parameters) travels in it. (4)
`finish` waits for all of them. Then gradients that other stages or tensor ranks hold too are exchanged with these.

Buckets start in the reverse order of registration and are laid out anew after the first step in the order in which
gradients really became ready on rank 0, parameters it did not use last, so that these never hold up a full bucket. If
rank 0 had no data in that step, the next one decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from weft.comm.buckets import Buckets, bucket_memory_bytes, make_buckets
from weft.comm.collectives import Pending, all_reduce, broadcast
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.comm.shared_memory.native import copy
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.partition.wire import TAIL_WORDS
from weft.sync.base import Totals
from weft.sync.bucketed import BucketedSync
from weft.sync.norm import GradientRules
from weft.sync.whole_parameters import WholeParameters

_COUNT_RADIX = 4096
"""A count travels as two words below this radix, so that float32 sums of it stay exact up to 2**36 targets."""


class AllReduce(BucketedSync, WholeParameters):
    """Sums gradients over the ranks of a group, in buckets, overlapped with the backward pass."""

    _coded: Collection[int] = ()
    """Parameters that a codec compresses (`compressed_all_reduce.py`)."""
    _lasting: Collection[int] = ()
    """Parameters that have a gradient also in a step in which no rank uses them: what a codec had kept of others."""
    _num_extra_words = 0
    """Words at the end of the tail that a subclass adds."""

    def __init__(self, pieces: Sequence[Piece], group: Group, *, bucket_bytes: int, rules: GradientRules) -> None:
        WholeParameters.__init__(self, pieces, rules, bucket_bytes=bucket_bytes)
        BucketedSync.__init__(self, [piece.name for piece in self.pieces], self._parameters)
        self._has_versions = rules.defers
        self._group = group
        self._bucket_bytes = bucket_bytes
        num_bytes = bucket_memory_bytes(self._parameters, num_ranks=group.size, extra_words=self._num_extra_words)
        self._allocator = BufferAllocator(group, self._parameters[0].device, num_bytes=num_bytes)
        self._pending: list[Pending] = []
        self._ready_order: list[int] = []
        self._order_agreed = False
        self._exchanged = False
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self.begin()

    def begin(self) -> None:
        for pending in self._pending:  # of a step that ended in an error which the user caught, on all ranks
            pending.wait()
        super().begin()
        if not self._order_agreed and self._exchanged:
            self._agree_on_order()
        self._used = [False] * len(self._parameters)
        self._reset_ready()
        self._disarm()
        self._pending = []
        self._ready_order = []
        self._defers = self._has_versions

    def take_deferred(self) -> None:
        if not self._defers:
            return
        self._defers = False
        self.arm()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._set_absent(index)
            else:
                self._take(index, parameter)

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        views = self._buckets.views
        unused = [index for index, used in enumerate(self._used) if not used]
        for index in unused:
            if self._bucket_of[index] >= self._turn:  # else the others' sum is in there by now
                views[index].zero_()
        while self._turn < len(self._buckets.buckets) - 1:
            self._launch_next()
        self._fill_tail(loss_sum, count, unused, compute_s)
        self._launch_next()
        self._wait_for_all()
        self._shared.run({name: views[self._index[name]] for name in self._shared.names})
        self._exchanged = True
        self._disarm()  # a backward pass of the user's own must not start an exchange
        if unused:  # a rank that used everything knows that nothing is globally unused, and need not look
            flags = self._buckets.tail[TAIL_WORDS + self._group.size :].tolist()
            for index in unused:
                name = self._names[index]
                is_used = flags[index] or name in self._tied or self._shared.came_from_others(name, views[index])
                self._parameters[index].grad = views[index] if is_used or index in self._lasting else None
        # A copy, for the tail's memory is the next step's too.
        totals = self._buckets.tail[: TAIL_WORDS + self._group.size].clone()
        exact_count = totals[1].double() * _COUNT_RADIX + totals[2]
        norm = self._norm_parts.norm(totals.device) if with_norm else None
        return Totals(loss_sum=totals[0], count=exact_count, norm=norm, compute_s=totals[TAIL_WORDS:])

    def _wait_for_all(self) -> None:
        for pending in self._pending:
            pending.wait()

    def state(self) -> dict[str, Any]:
        # The layout decides the order of additions inside a ring all-reduce, so it is part of "to the bit".
        return {"order": list(self._order), "agreed": self._order_agreed, "ready": list(self._ready_order)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._lay_out([int(index) for index in state["order"]])
        self._order_agreed = bool(state["agreed"])
        self._ready_order = [int(index) for index in state["ready"]]
        self._exchanged = True

    def _lay_out(self, order: list[int]) -> None:
        self._order = order
        if hasattr(self, "_buckets"):
            del self._buckets  # before there are new ones: gradients must not be held twice
        self._buckets: Buckets = make_buckets(
            self._parameters,
            order,
            bucket_bytes=self._bucket_bytes,
            num_ranks=self._group.size,
            allocator=self._allocator,
            coded=self._coded,
            extra_words=self._num_extra_words,
        )
        self._set_buckets(self._buckets.bucket_of, num_early=len(self._buckets.buckets) - 1)
        self._all_used = torch.ones(len(order), dtype=self._buckets.tail.dtype, device=self._buckets.tail.device)

    def _agree_on_order(self) -> None:
        """Take the order of rank 0. Every rank asks, whatever it saw itself: a rank without data takes part too."""
        seen = set(self._ready_order)
        order = self._ready_order + [index for index in self._order if index not in seen]
        message = torch.tensor([len(seen), *order], dtype=torch.int64, device=self._buckets.tail.device)
        broadcast(message, self._group)
        num_seen, *agreed = message.tolist()
        if num_seen:
            self._lay_out(agreed)
            self._order_agreed = True

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        if self._defers:
            return
        if self._ignores:
            if not self._used[index]:
                parameter.grad = None
            return
        if not self._used[index]:
            view = self._buckets.views[index]
            assert parameter.grad is not None
            copy(view, parameter.grad)
            parameter.grad = view
            self._used[index] = True
        if not self._armed[index]:
            return
        if not self._ready[index]:
            self._ready_order.append(index)
            self._set_ready(index)
        elif self._bucket_of[index] < self._turn:
            self._refuse_second(index)

    def _set_absent(self, index: int) -> None:
        if not self._used[index]:
            self._buckets.views[index].zero_()
        self._set_ready(index)

    def _launch(self, bucket: int) -> None:
        self._pending.append(all_reduce(self._buckets.buckets[bucket], self._group, wait=False))

    def _fill_tail(self, loss_sum: torch.Tensor, count: torch.Tensor, unused: list[int], compute_s: float) -> None:
        tail = self._buckets.tail
        high = torch.div(count, _COUNT_RADIX, rounding_mode="floor")
        tail[0] = loss_sum
        tail[1] = high
        tail[2] = count - high * _COUNT_RADIX
        times, flags_of_all, _ = tail[TAIL_WORDS:].split([self._group.size, len(self._names), self._num_extra_words])
        times.zero_()
        times[self._group.index].fill_(compute_s)  # an assignment would be a copy from the host, which waits
        flags = self._all_used
        if unused:
            flags = flags.clone()
            flags[unused] = 0
        flags_of_all.copy_(flags)
