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

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from weft.dtypes import accumulator_dtype

if TYPE_CHECKING:
    from weft.sync.local import LocalSync


class Meeting:
    """The replicas of one process, and what they have for each other."""

    def __init__(self) -> None:
        self.syncs: Sequence[LocalSync] = ()
        """Those of all replicas, in their order; given once all are made."""
        self._due = 0
        self._sums: list[list[torch.Tensor]] = []
        """What the others gave, by the number of their call."""
        self._turn = 0
        self._is_hearing = False

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
        rests = [rest for sync in self.syncs if (rest := sync.fill_rest()) is not None]
        if rests:
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

    def hear(self, calls: Iterable[Callable[[], object]]) -> None:
        """Make the calls of the other replicas; what they give to `mean_` is kept for the first one's call, which comes
        next."""
        self._sums = []
        try:
            self._is_hearing = True
            for call in calls:
                self._turn = 0
                call()
        finally:
            self._is_hearing, self._turn = False, 0

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the first replica's tensors by the means over replicas; those of the others stay as they are."""
        if not self._is_hearing:
            for tensor, total in zip(tensors, self._sums[self._turn], strict=True):
                tensor.copy_(total.add_(tensor).div_(len(self.syncs)))
            self._sums[self._turn] = []  # frees its memory
        elif self._turn == len(self._sums):
            self._sums.append([tensor.to(accumulator_dtype(tensor.dtype), copy=True) for tensor in tensors])
        else:
            for total, tensor in zip(self._sums[self._turn], tensors, strict=True):
                total.add_(tensor)
        self._turn += 1
