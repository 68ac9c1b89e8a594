"""Buckets of gradients that leave while the backward pass still runs: the part that all such syncs share.

A gradient is *ready* when no other will be added to it before it leaves. A bucket leaves when all its gradients are
ready and all buckets before it have left: the order of collectives is the same on every rank, even where ranks use
different parameters. How a gradient gets into its bucket, and how a bucket is reduced, is the subclass's.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from weft.errors import ModelError
from weft.sync.base import PipelineSync


class BucketedSync(PipelineSync):
    """Hooks on parameters, readiness of their gradients, and the order in which buckets leave."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names = tuple(names)
        self._index = {name: index for index, name in enumerate(names)}
        self._ignores = False
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))

    def _set_buckets(self, bucket_of: Sequence[int], *, num_early: int) -> None:
        """Say which bucket each parameter is in; the first `num_early` may leave before `finish`."""
        counts = Counter(bucket_of)
        self._bucket_of = tuple(bucket_of)
        self._bucket_sizes = [counts[bucket] for bucket in range(num_early + 1)]
        self._num_early = num_early

    def _disarm(self) -> None:
        self._armed = [False] * len(self._names)

    def _reset_ready(self) -> None:
        """No gradient is ready, and the first bucket is the next to leave."""
        self._ready = [False] * len(self._names)
        self._missing = self._bucket_sizes.copy()
        self._turn = 0

    def arm(self) -> None:
        self._armed = [True] * len(self._names)

    def arm_parameters(self, names: Collection[str]) -> None:
        for index in self._indices(names):
            self._armed[index] = True

    def complete(self, names: Collection[str]) -> None:
        for index in self._indices(names):
            if not self._ready[index]:
                self._set_absent(index)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    @abstractmethod
    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a parameter's gradient."""

    @abstractmethod
    def _launch(self, bucket: int) -> None:
        """Start to reduce a bucket, whose turn it is."""

    def _set_absent(self, index: int) -> None:
        """No gradient, or no other one, will come for a parameter."""
        self._set_ready(index)

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

    def _refuse_second(self, index: int) -> NoReturn:
        raise ModelError(
            f'"{self._names[index]}" got a second gradient in one backward pass after its first was sent; reentrant '
            "checkpointing of shared layers does that, so call torch.utils.checkpoint with use_reentrant=False"
        )

    def _indices(self, names: Collection[str]) -> list[int]:
        return [self._index[name] for name in names if name in self._index]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Autograd keeps the hook where the garbage collector does not see it: it must not keep the trainer alive.
        reference = weakref.ref(self)

        def gradient_ready(parameter: torch.Tensor) -> None:
            sync = reference()
            if sync is not None:
                sync._take(index, parameter)

        return gradient_ready
