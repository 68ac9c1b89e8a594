"""A sync around another one: all it does not change goes to the sync inside, which knows nothing of it.

Syncs between replicas that differ (`local.py`) are made so: inside is the sync of one replica's own ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch

from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import ParameterGathering
from weft.sync.base import PipelineSync, Totals
from weft.sync.exchange.compressed_exchange import CompressedExchange


class WrappingSync(PipelineSync):
    """Does what the sync inside does, until a subclass changes it."""

    def __init__(self, inner: PipelineSync) -> None:
        self.inner = inner

    @property
    def pieces(self) -> Sequence[Piece]:  # type: ignore[override]
        return self.inner.pieces

    @property
    def flats(self) -> Sequence[FlatParameters]:  # type: ignore[override]
        return self.inner.flats

    @property
    def gathering(self) -> ParameterGathering | None:  # type: ignore[override]
        return self.inner.gathering

    @property
    def exchanges_in_forward(self) -> bool:
        return self.inner.exchanges_in_forward

    @property
    def exchanges_in_microbatches(self) -> bool:
        return self.inner.exchanges_in_microbatches

    def begin(self) -> None:
        self.inner.begin()

    def arm(self) -> None:
        self.inner.arm()

    def arm_parameters(self, names: Collection[str]) -> None:
        self.inner.arm_parameters(names)

    def complete(self, names: Collection[str]) -> None:
        self.inner.complete(names)

    def take_deferred(self) -> None:
        self.inner.take_deferred()

    def skip_microbatch(self) -> None:
        self.inner.skip_microbatch()

    def end_microbatch(self) -> None:
        self.inner.end_microbatch()

    def ignoring(self) -> AbstractContextManager[object]:
        return self.inner.ignoring()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        return self.inner.finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)

    def decide(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor | None) -> None:
        self.inner.decide(is_made=is_made, factor=factor)

    @property
    def compressed(self) -> CompressedExchange | None:
        return self.inner.compressed

    def publish(self) -> None:
        self.inner.publish()

    def settle(self) -> None:
        self.inner.settle()
