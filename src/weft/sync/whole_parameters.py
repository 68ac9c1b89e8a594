"""Syncs whose ranks hold whole parameters and whole gradients; the one that exchanges no gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import ParameterGathering
from weft.sync.base import Totals
from weft.sync.norm import GradientRules, NormParts


class WholeParameters:
    """The part of a sync that does not depend on how whole gradients are exchanged."""

    exchanges_in_forward = False
    flats: Sequence[FlatParameters] = ()
    gathering: ParameterGathering | None = None

    def __init__(self, pieces: Sequence[Piece], rules: GradientRules) -> None:
        self.pieces: Sequence[Piece] = tuple(pieces)
        self._parameters = tuple(piece.tensor for piece in self.pieces)
        self._norm_parts = NormParts(self.pieces, rules)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def skip_microbatch(self) -> None:
        pass

    def end_microbatch(self) -> None:
        pass

    def deferred_gradient(self, name: str) -> torch.Tensor:
        parameter = next(piece.tensor for piece in self.pieces if piece.name == name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def publish(self) -> None:
        pass


class NoSync(WholeParameters):
    """Exchanges the loss only: there is one data rank, or this rank's stage has nothing to train."""

    def __init__(self, pieces: Sequence[Piece], group: Group, rules: GradientRules) -> None:
        super().__init__(pieces, rules)
        self._group = group

    def arm(self) -> None:
        pass

    def arm_parameters(self, names: Collection[str]) -> None:
        pass

    def complete(self, names: Collection[str]) -> None:
        pass

    def take_deferred(self) -> None:
        pass

    def ignoring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool) -> Totals:
        norm = self._norm_parts.norm(loss_sum.device) if with_norm else None
        if self._group.size == 1:
            return Totals(loss_sum=loss_sum, count=count, norm=norm)
        totals = torch.stack([loss_sum.double(), count.double()])
        all_reduce(totals, self._group)
        return Totals(loss_sum=totals[0], count=totals[1], norm=norm)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state
