"""One replica's side of a late exchange between replicas of one process: it is over at once, and merged later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.codecs.base import Codec

if TYPE_CHECKING:
    from weft.sync.late_merge import LateMergeSync


class SendingInProcess:
    """What `InProcessExchange` calls, on the memory of a sync."""

    def __init__(self, sync: LateMergeSync) -> None:
        self._sync, self.steps_done = sync, sync.steps_done

    def begin_exchange(self) -> None:
        self._sent = self._sync.new_exchange()

    @property
    def exchanged_buckets(self) -> Sequence[int]:
        return self._sent.buckets

    def codec_of(self, number: int) -> Codec | None:
        return self._sync.codec_in(self._sent, number)

    @torch.no_grad()
    def fill(self, number: int) -> torch.Tensor:
        self._sync.change(number, self._sent)
        return self._sync.values(number, self._sent)

    def take(self, number: int, mean: torch.Tensor) -> None:
        self._sent.mean[number] = mean

    def give_back(self, flat: torch.Tensor) -> None:
        pass  # it is kept until it is merged

    def fill_tail(self) -> torch.Tensor:
        return self._sync.fill_tail()

    def take_tail(self, total: torch.Tensor) -> None:
        self._sent.tail = total

    def finish_exchange(self) -> None:
        self._sync.queue_arrived(self._sent)
