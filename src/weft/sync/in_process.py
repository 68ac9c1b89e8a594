"""Exchanges between replicas that are all in one process: what collectives do for real ranks, done in memory.

The replicas of a step run one after the other. So an exchange is put off until the last of them has made its update,
and then made for all of them at once:

    replica 1   step, is due ┐
    replica 2   step, is due ┤
    replica 0   step, is due ┴ sums of all buckets ─ taken by every replica

Calls that all ranks make together (evaluate, save) are made by the *first* replica, after those of the others: what the
others give to `LocalSync.mean_` is added up (`collect`), and the first replica gets the means.

Sums begin with replica 0 and go on in the order of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from weft.codecs.base import Codec
from weft.dtypes import accumulator_dtype
from weft.parallel.zero.grouping import torch_dtype

if TYPE_CHECKING:
    from weft.sync.local import LocalSync

Call = Callable[[], object]


@torch.no_grad()
def exchange_in_process(
    codecs: Sequence[Codec],
    values: Sequence[torch.Tensor],
    *,
    step: int,
    scale: float = 1.0,
    keep: float | torch.Tensor = 1.0,
    not_finite: torch.Tensor | None = None,
) -> None:
    """One bucket's exchange between replicas, each of which has a codec: all values become the scaled sum.

    `not_finite`: grows if a value is not finite; the caller then ends the exchange. Without it, it counts at once.
    """
    flag = values[0].new_zeros(1, dtype=torch.float32) if not_finite is None else not_finite
    messages = [codec.begin(step, keep=keep) for codec in codecs][0]
    for place, message in enumerate(messages):
        sent = values[0].new_empty(len(codecs), message.numel, dtype=torch_dtype(message.dtype))
        for codec, own, row in zip(codecs, values, sent, strict=True):
            codec.encode(place, own, row, flag)
        received = sent
        if message.adds_up:
            received = sent[0]
            for row in sent[1:]:
                received += row
        for codec, own in zip(codecs, values, strict=True):
            codec.decode(place, received, own, scale=scale)
    if not_finite is None:
        for codec in codecs:
            codec.end(True)


class InProcessExchange:
    """The exchange between the replicas of one process."""

    def __init__(self) -> None:
        self.syncs: Sequence[LocalSync] = ()
        """Those of all replicas, in their order; given once all are made."""
        self._num_due = 0
        """Replicas that have made the step after which all exchange."""
        self._mode: Literal["gather", "sum", "mean"] = "mean"
        """What a call is made for: values of all replicas; tensors of the others; the first replica's own call."""
        self._gathered: list[list[Any]] = []
        """The values of all replicas, by the number of `gather` in their call."""
        self._sums: list[list[torch.Tensor]] = []
        """The sums of the others' tensors, by the number of `mean_` in their call."""
        self._begin_call()

    def exchange(self) -> None:
        """One more replica is due; the last one makes the exchange of all."""
        self._num_due += 1
        if self._num_due == len(self.syncs):
            self._num_due = 0
            self._exchange()

    def abandon(self) -> None:
        """A step ended in an error: no replica is due."""
        self._num_due = 0

    @torch.no_grad()
    def _exchange(self) -> None:
        first = self.syncs[0]
        for number in range(first.num_buckets):
            flats = [sync.fill(number) for sync in self.syncs]
            codecs = [codec for sync in self.syncs if (codec := sync.codec_of(number)) is not None]
            if codecs:
                exchange_in_process(codecs, flats, step=first.steps_done - 1, scale=1 / len(flats))
            else:
                self._add_up(flats)
                for flat in flats:
                    flat.div_(len(flats))
            for sync, flat in zip(self.syncs, flats, strict=True):
                sync.take(number, flat)
                if codecs:
                    sync.compressed.hand_back(flat)
        tails = [sync.fill_tail() for sync in self.syncs]
        self._add_up(tails)
        for sync, tail in zip(self.syncs, tails, strict=True):
            sync.take_tail(tail)
        for sync in self.syncs:
            sync.finish_exchange()

    def _add_up(self, flats: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by the sum of all."""
        total, *others = flats
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)

    def collect(self, others: Sequence[Call], *, first: Call | None = None) -> None:
        """Make the calls of the other replicas, and add up what they give to `mean_` for the first one's call, which
        comes next. `first`: that call, where it contains `gather`: all calls are made once more before, for the
        values alone."""
        self.clear()
        try:
            if first is not None:
                self._run("gather", (first, *others))
            self._run("sum", others)
        finally:
            self._mode = "mean"
            self._begin_call()

    def clear(self) -> None:
        """Drop what was collected: the first replica's call is over."""
        self._gathered, self._sums = [], []
        self._begin_call()

    def _run(self, mode: Literal["gather", "sum"], calls: Sequence[Call]) -> None:
        self._mode = mode
        for call in calls:
            self._begin_call()
            call()

    def _begin_call(self) -> None:
        self._num_gathers = self._num_means = 0

    def gather(self, value: Any) -> list[Any]:
        """Every replica's value, in their order; in the mode "gather" those so far."""
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        if self._mode == "gather":
            if number == len(self._gathered):
                self._gathered.append([])
            self._gathered[number].append(value)
        return self._gathered[number]

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the first replica's tensors by the means over replicas; those of the others stay as they are."""
        if self._mode == "gather":
            return
        number, self._num_means = self._num_means, self._num_means + 1
        if self._mode == "mean":
            for tensor, total in zip(tensors, self._sums[number], strict=True):
                tensor.copy_(total.add_(tensor).div_(len(self.syncs)))
            self._sums[number] = []  # frees its memory
        elif number == len(self._sums):
            self._sums.append([tensor.to(accumulator_dtype(tensor.dtype), copy=True) for tensor in tensors])
        else:
            for total, tensor in zip(self._sums[number], tensors, strict=True):
                total.add_(tensor)
