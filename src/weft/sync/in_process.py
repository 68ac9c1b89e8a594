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
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from weft.codecs.base import Codec
from weft.dtypes import accumulator_dtype
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.messages import Message

if TYPE_CHECKING:
    from weft.sync.local import LocalSync

Call = Callable[[], object]


class CodecsInProcess:
    """One bucket's exchange between the codecs of all replicas.

        begin(step)                             every codec begins
        give(0, values), give(1, values), ...   each replica's first message is made, when its values are there
        take(values)                            sums, or the messages of all, are decoded; so on for further messages

    Replicas may give their values from one buffer: only messages are kept of them. What codecs decode is the same on
    all replicas, so it is done once, except by codecs that learn from it what they keep.
    """

    def __init__(self, codecs: Sequence[Codec], device: torch.device) -> None:
        """`codecs`: those of all replicas for this bucket, in their order."""
        self.codecs = tuple(codecs)
        self._device = device
        self._messages: tuple[Message, ...] = ()

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> None:
        """A new exchange, as `Codec.begin`."""
        self._messages = [codec.begin(step, keep=keep) for codec in self.codecs][0]
        self._open(0)

    def give(self, replica: int, values: torch.Tensor, not_finite: torch.Tensor) -> None:
        """Take the values of a replica, the next one in their order, which may be overwritten."""
        self._encode(0, replica, values, not_finite)

    def take(self, values: torch.Tensor, not_finite: torch.Tensor, *, scale: float = 1.0) -> None:
        """Make `values` the sum over replicas of what was sent, times `scale`, as it is on every one of them."""
        decoders = self.codecs if self.codecs[0].learns_from_decoding else self.codecs[:1]
        for number in range(len(self._messages)):
            if number:
                self._open(number)
                for replica in range(len(self.codecs)):
                    self._encode(number, replica, values, not_finite)
            for codec in decoders:
                codec.decode(number, self._received, values, scale=scale)
        del self._received

    def end(self, is_made: bool | torch.Tensor) -> None:
        """As `Codec.end`."""
        for codec in self.codecs:
            codec.end(is_made)

    def _open(self, number: int) -> None:
        """Make room for one message of every replica, or for their sum."""
        message = self._messages[number]
        shape = (message.numel,) if message.adds_up else (len(self.codecs), message.numel)
        self._received = torch.empty(shape, dtype=torch_dtype(message.dtype), device=self._device)

    def _encode(self, number: int, replica: int, values: torch.Tensor, not_finite: torch.Tensor) -> None:
        codec, adds_up = self.codecs[replica], self._messages[number].adds_up
        if not adds_up:
            codec.encode(number, values, self._received[replica], not_finite)
        elif replica == 0:
            codec.encode(number, values, self._received, not_finite)
        else:
            message = torch.empty_like(self._received)
            codec.encode(number, values, message, not_finite)
            self._received.add_(message)


@torch.no_grad()
def exchange_in_process(
    codecs: Sequence[Codec], values: Sequence[torch.Tensor], *, step: int, scale: float = 1.0
) -> None:
    """One bucket's exchange between replicas, which counts at once: all values become the scaled sum."""
    played = CodecsInProcess(codecs, values[0].device)
    not_finite = torch.zeros(1, device=values[0].device)  # replicas that differ look at their losses
    played.begin(step)
    for replica, own in enumerate(values):
        played.give(replica, own, not_finite)
    played.take(values[0], not_finite, scale=scale)
    for other in values[1:]:
        other.copy_(values[0])
    played.end(True)


class InProcessSide(Protocol):
    """One replica's side of an exchange, in the order in which it is called."""

    steps_done: int

    def begin_exchange(self) -> None:
        """All replicas are about to give their values."""

    @property
    def exchanged_buckets(self) -> Sequence[int]:
        """The numbers of the buckets that travel."""

    def codec_of(self, number: int) -> Codec | None:
        """The codec of a bucket, if it has one."""

    def fill(self, number: int) -> torch.Tensor:
        """This replica's values of a bucket, in memory that the exchange may use."""

    def take(self, number: int, mean: torch.Tensor) -> None:
        """Take the mean of what all replicas gave, which may be overwritten."""

    def give_back(self, flat: torch.Tensor) -> None:
        """The values of a bucket that a codec compressed were taken."""

    def fill_tail(self) -> torch.Tensor:
        """What travels beside the buckets, to be summed."""

    def take_tail(self, total: torch.Tensor) -> None:
        """Take the sum of all tails."""

    def finish_exchange(self) -> None:
        """All is taken."""


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
        sides = [sync.in_process_side() for sync in self.syncs]
        first = sides[0]
        for side in sides:
            side.begin_exchange()
        for number in first.exchanged_buckets:
            flats = [side.fill(number) for side in sides]
            codecs = [codec for side in sides if (codec := side.codec_of(number)) is not None]
            if codecs:
                exchange_in_process(codecs, flats, step=first.steps_done - 1, scale=1 / len(flats))
            else:
                self._add_up(flats)
                for flat in flats:
                    flat.div_(len(flats))
            for side, flat in zip(sides, flats, strict=True):
                side.take(number, flat)
                if codecs:
                    side.give_back(flat)
        tails = [side.fill_tail() for side in sides]
        self._add_up(tails)
        for side, tail in zip(sides, tails, strict=True):
            side.take_tail(tail)
        for side in sides:
            side.finish_exchange()

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
