"""Exceptions for the gradients of some parameters, and the norm where several ranks hold one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.comm.shared_gradients import SharedGradient
from weft.layout import Range
from weft.parallel.zero.flat_parameters import Piece
from weft.sync.base import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRules:
    """Exceptions that a pipeline, or the tensor axis, makes for gradients of some parameters, by name."""

    defers: bool = False
    """Gradients are computed on weight versions, and handed over in `PipelineSync.take_deferred`."""
    shared: tuple[SharedGradient, ...] = ()
    """Gradients that several stages or tensor ranks hold, in the order in which these exchange them."""
    shared_weights: tuple[SharedGradient, ...] = ()
    """The parameters of which several stages or tensor ranks of a replica hold copies that an exchange with other
    replicas may round differently, in the order in which the first holder's are given to the others."""
    tied: frozenset[str] = frozenset()
    """Parameters that other stages hold too. They count as used, because another stage may have used them."""
    own_buffers: Mapping[str, str] = field(default_factory=dict)
    """Shared parameters that need flat buffers of their own, and the ranks that hold them: in common buffers their
    offsets would differ between these ranks."""
    norm_ranges: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """Elements of the flattened parameter that this rank counts in the gradient's norm, where other ranks hold and
    count the rest. A parameter that is not here is counted whole."""


def spoil_norm(totals: Totals, not_finite: torch.Tensor) -> Totals:
    """Totals of a step in which so many ranks had gradients that are not finite. A codec may have left these out, so
    that the sum looks fine: its norm is then NaN, which all ranks that are told of it understand."""
    norm = totals.norm
    if norm is not None:
        norm = torch.where(not_finite > 0, torch.full_like(norm, math.nan), norm)
    return replace(totals, not_finite=not_finite, norm=norm)


class NormParts:
    """The parts of the pieces' gradients that this rank counts in their norm."""

    def __init__(self, pieces: Sequence[Piece], rules: GradientRules) -> None:
        self._parts: list[tuple[nn.Parameter, tuple[Range, ...] | None]] = []
        for piece in pieces:
            ranges = rules.norm_ranges.get(piece.name)
            if ranges is not None and piece.layout.flat_range is not None:
                first, last = piece.layout.flat_range
                ranges = tuple(
                    (max(a, first) - first, min(b, last) - first) for a, b in ranges if a < last and b > first
                )
            if ranges != ():
                self._parts.append((piece.tensor, ranges))

    def norm(self, device: torch.device) -> torch.Tensor:
        """The 2-norm of these parts together, in float64, without waiting for a device."""
        found: list[torch.Tensor] = []
        for parameter, ranges in self._parts:
            if parameter.grad is not None:
                found += [parameter.grad] if ranges is None else [parameter.grad.flatten()[a:b] for a, b in ranges]
        if not found:
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch._foreach_norm(found)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
        return total.to(device)
