"""Syncs whose ranks hold whole parameters and whole gradients; the one that exchanges no gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.parallel.zero.flat_parameters import Piece
from weft.sync.base import PipelineSync, Totals
from weft.sync.norm import GradientRules, NormParts


class WholeParameters(PipelineSync):
    """The part of a sync that does not depend on how whole gradients are exchanged."""

    def __init__(self, pieces: Sequence[Piece], rules: GradientRules) -> None:
        self.pieces: Sequence[Piece] = tuple(pieces)
        self._parameters = tuple(piece.tensor for piece in self.pieces)
        self._norm_parts = NormParts(self.pieces, rules)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def deferred_gradient(self, name: str) -> torch.Tensor:
        parameter = next(piece.tensor for piece in self.pieces if piece.name == name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class NoSync(WholeParameters):
    """Exchanges the loss only: there is one data rank, or this rank's stage has nothing to train."""

    def __init__(self, pieces: Sequence[Piece], group: Group, rules: GradientRules) -> None:
        super().__init__(pieces, rules)
        self._group = group

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool) -> Totals:
        norm = self._norm_parts.norm(loss_sum.device) if with_norm else None
        if self._group.size == 1:
            return Totals(loss_sum=loss_sum, count=count, norm=norm)
        totals = torch.stack([loss_sum.double(), count.double()])
        all_reduce(totals, self._group)
        return Totals(loss_sum=totals[0], count=totals[1], norm=norm)
