"""This rank's part of every parameter, under the unsplit model's names, in the precision that training keeps.

A parameter may be a tensor of the model, a view of a flat buffer, or a part of one that ranks share. Checkpoints and
`verify` need not distinguish them: they see a tensor and its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.layout import Layout
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.sync.base import Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of one parameter."""

    tensor: torch.Tensor
    layout: Layout
    flat: FlatParameters | None = None
    """The flat buffer it lies in, if any."""
    piece: nn.Parameter | None = None
    """The parameter that the optimizer updates; None if it is frozen."""


def held_parameters(model: nn.Module, sync: Sync, layouts: Mapping[str, Layout]) -> dict[str, Held]:
    """Each parameter by name, in the order of the model. `layouts`: where this rank's part of each tensor lies."""
    sync.settle()
    pieces = {piece.name: piece.tensor for piece in sync.pieces}
    in_flats = {}
    for flat in sync.flats:
        for name, part in zip(flat.names, flat.kept_views(flat.master), strict=True):
            in_flats[name] = Held(tensor=part, layout=layouts[name], flat=flat, piece=pieces.get(name))
    return {
        name: in_flats.get(name) or Held(tensor=parameter.detach(), layout=layouts[name], piece=pieces.get(name))
        for name, parameter in model.named_parameters()
    }
