"""Replicas of one process meet here: what exchanges between replicas do for real ranks, done in memory.

The replicas of a step run one after the other. So an exchange is put off until the last of them has made its update,
and then made for all of them at once:

    replica 1   step, is due ┐
    replica 2   step, is due ┤
    replica 0   step, is due ┴ sums of all buckets ─ taken by every replica

Calls that all ranks make together (evaluate, save) are made by the *first* replica, after the others were heard: what
they would have given to `LocalSync.mean_` is added up, and the first replica gets the means.

Sums begin with replica 0 and go on in the order of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.dtypes import accumulator_dtype

if TYPE_CHECKING:
    from weft.sync.local import LocalSync


Call = Callable[[], object]


class Meeting:
    """The replicas of one process, and what they have for each other."""

    def __init__(self) -> None:
        self.syncs: Sequence[LocalSync] = ()
        """Those of all replicas, in their order; given once all are made."""
        self._due = 0
        self._mode = "taking"
        self._told: list[list[Any]] = []
        """What every replica told, by the number of the gathering in its call."""
        self._sums: list[list[torch.Tensor]] = []
        """What the others gave, added up, by the number of the average in their call."""
        self._begin_call()

    def exchange(self) -> None:
        """One more replica is due; the last one makes the exchange of all."""
        self._due += 1
        if self._due == len(self.syncs):
            self._due = 0
            self._exchange()

    def forget(self) -> None:
        """A step ended in an error: nobody is due."""
        self._due = 0

    @torch.no_grad()
    def _exchange(self) -> None:
        first = self.syncs[0]
        for number in range(first.num_buckets):
            flats = [sync.fill(number) for sync in self.syncs]
            self._add_up(flats)
            for sync, flat in zip(self.syncs, flats, strict=True):
                sync.take(number, flat)
        rests = [sync.fill_rest() for sync in self.syncs]
        self._add_up(rests)
        for sync, rest in zip(self.syncs, rests, strict=True):
            sync.take_rest(rest)
        for sync in self.syncs:
            sync.finish_exchange()

    def _add_up(self, flats: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by the sum of all."""
        total, *others = flats
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)

    def hear(self, others: Sequence[Call] = (), *, first: Call | None = None) -> None:
        """Make the calls of the other replicas; what they give to `mean_` is kept for the first one's call, which comes
        next. `first`: that call, where replicas tell each other plain values (`gather`): all are made once for these
        values alone."""
        self._told, self._sums = [], []
        try:
            if first is not None:
                self._run("telling", (first, *others))
            self._run("giving", others)
        finally:
            self._mode = "taking"
            self._begin_call()

    def _run(self, mode: str, calls: Sequence[Call]) -> None:
        self._mode = mode
        for call in calls:
            self._begin_call()
            call()

    def _begin_call(self) -> None:
        self._num_gathered = self._num_averaged = 0

    def gather(self, value: Any) -> list[Any]:
        """Every replica's value, in their order; while they are still told, those told so far."""
        number, self._num_gathered = self._num_gathered, self._num_gathered + 1
        if self._mode == "telling":
            if number == len(self._told):
                self._told.append([])
            self._told[number].append(value)
        return self._told[number]

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the first replica's tensors by the means over replicas; those of the others stay as they are."""
        if self._mode == "telling":
            return
        number, self._num_averaged = self._num_averaged, self._num_averaged + 1
        if self._mode == "taking":
            for tensor, total in zip(tensors, self._sums[number], strict=True):
                tensor.copy_(total.add_(tensor).div_(len(self.syncs)))
            self._sums[number] = []  # frees its memory
        elif number == len(self._sums):
            self._sums.append([tensor.to(accumulator_dtype(tensor.dtype), copy=True) for tensor in tensors])
        else:
            for total, tensor in zip(self._sums[number], tensors, strict=True):
                total.add_(tensor)
