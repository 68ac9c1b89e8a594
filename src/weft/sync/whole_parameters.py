"""Syncs whose ranks hold whole parameters and whole gradients; the one that exchanges none over data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradientExchange
from weft.parallel.zero.flat_parameters import Piece
from weft.sync.base import PipelineSync, Totals
from weft.sync.norm import GradientRules, NormParts


class WholeParameters(PipelineSync):
    """The part of a sync that does not depend on how whole gradients are exchanged."""

    def __init__(self, pieces: Sequence[Piece], rules: GradientRules, *, bucket_bytes: int) -> None:
        self.pieces: Sequence[Piece] = tuple(pieces)
        self._parameters = tuple(piece.tensor for piece in self.pieces)
        self._norm_parts = NormParts(self.pieces, rules)
        self._tied = rules.tied
        self._shared = SharedGradientExchange(rules.shared, bucket_bytes=bucket_bytes)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class NoSync(WholeParameters):
    """Exchanges nothing over data but the loss: there is one data rank, or this rank's stage has nothing to train."""

    def __init__(self, pieces: Sequence[Piece], group: Group, rules: GradientRules, *, bucket_bytes: int) -> None:
        super().__init__(pieces, rules, bucket_bytes=bucket_bytes)
        self._group = group

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        shared = {
            piece.name: torch.zeros_like(piece.tensor) if piece.tensor.grad is None else piece.tensor.grad
            for piece in self.pieces
            if piece.name in self._shared.names  # also what this rank did not use: the others wait for its part
        }
        self._shared.run(shared)
        for piece in self.pieces:
            if piece.tensor.grad is None and piece.name in shared:
                gradient = shared[piece.name]
                if piece.name in self._tied or self._shared.came_from_others(piece.name, gradient):
                    piece.tensor.grad = gradient
        norm = self._norm_parts.norm(loss_sum.device) if with_norm else None
        if self._group.size == 1:
            return Totals(loss_sum=loss_sum, count=count, norm=norm)
        totals = loss_sum.new_zeros(2 + self._group.size, dtype=torch.float64)
        totals[0], totals[1] = loss_sum, count
        totals[2 + self._group.index].fill_(compute_s)
        all_reduce(totals, self._group)
        return Totals(loss_sum=totals[0], count=totals[1], norm=norm, compute_s=totals[2:])
