"""Buckets of gradients that leave while the backward pass still runs: the part that all such syncs share.

A bucket leaves when all its gradients are ready and all buckets before it have left: the order of collectives is the
same on every rank, even where ranks use different parameters. How a gradient gets into its bucket, and how a bucket is
reduced, is the subclass's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from weft.sync.base import PipelineSync
from weft.sync.gradient_hooks import GradientHooks


class BucketedSync(GradientHooks, PipelineSync):
    """The order in which buckets of ready gradients leave."""

    def _set_buckets(self, bucket_of: Sequence[int], *, num_early: int) -> None:
        """Say which bucket each parameter is in; the first `num_early` may leave before `finish`."""
        counts = Counter(bucket_of)
        self._bucket_of = tuple(bucket_of)
        self._bucket_sizes = [counts[bucket] for bucket in range(num_early + 1)]
        self._num_early = num_early

    def _reset_ready(self) -> None:
        """No gradient is ready, and the first bucket is the next to leave."""
        self._ready = [False] * len(self._names)
        self._missing = self._bucket_sizes.copy()
        self._turn = 0

    @abstractmethod
    def _launch(self, bucket: int) -> None:
        """Start to reduce a bucket, whose turn it is."""

    def _set_ready(self, index: int) -> None:
        self._ready[index] = True
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._launch_full()

    def _launch_full(self) -> None:
        while self._turn < self._num_early and self._missing[self._turn] <= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._turn += 1
        self._launch(self._turn - 1)
