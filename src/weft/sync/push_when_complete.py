"""Pushes a bucket to its server as soon as its last gradient is complete, in whatever order buckets become so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.parallel.zero.flat_parameters import Piece
from weft.sync.gradient_hooks import GradientHooks

BucketKey = tuple[int, int]
"""A server, and one of its buckets."""


class PushWhenComplete(GradientHooks):
    """Watches gradients become complete, and pushes each bucket with its last one, in whatever order."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        buckets: Sequence[tuple[BucketKey, tuple[int, ...]]],
        push: Callable[[BucketKey], None],
    ) -> None:
        """`buckets`: with the numbers of their pieces."""
        super().__init__([piece.name for piece in pieces], [piece.tensor for piece in pieces])
        self._sizes = {key: len(numbers) for key, numbers in buckets}
        self._keys_of: list[list[BucketKey]] = [[] for _ in pieces]
        for key, numbers in buckets:
            for number in numbers:
                self._keys_of[number].append(key)
        self._push = push
        self.begin()

    def begin(self) -> None:
        self._disarm()
        self._ready = [False] * len(self._names)
        self._incomplete = self._sizes.copy()

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        if self._ignores or not self._armed[index]:
            return
        if not self._ready[index]:
            self._set_ready(index)
        elif any(not self._incomplete[key] for key in self._keys_of[index]):
            self._refuse_second(index)

    def _set_ready(self, index: int) -> None:
        self._ready[index] = True
        for key in self._keys_of[index]:
            self._incomplete[key] -= 1
            if not self._incomplete[key]:
                self._push(key)
