"""Which pairs of a query and a key a mask allows, block by block, so that no rank makes the mask of a whole sequence.

A mask is given by what it is made of, in global order and on every rank: which keys count, and which document each
token belongs to. Both are as long as the sequence; the mask of a block is as large as its scores.

Dims: B samples, S tokens of the whole padded sequence, Q and K those of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.plan.partition.sequence import Places, Rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What queries of one ring rank may see of the keys of another, causality and padding apart."""

    places: Places
    key_mask_BS: Tensor | None
    """bool; a key that is False is seen by nobody."""
    documents_BS: Tensor | None
    """A query sees keys of its own document only."""

    def block(self, queries: int, keys: int, rectangle: Rectangle) -> Tensor:
        """[B, 1, Q or 1, K], True where a query may look."""
        mask_B1QK = None
        if self.documents_BS is not None:
            of_queries = self._part(self.documents_BS, queries, rectangle.q)
            of_keys = self._part(self.documents_BS, keys, rectangle.k)
            mask_B1QK = of_queries[:, None, :, None] == of_keys[:, None, None, :]
        if self.key_mask_BS is not None:
            counts = self._part(self.key_mask_BS, keys, rectangle.k)[:, None, None, :]
            mask_B1QK = counts if mask_B1QK is None else mask_B1QK & counts
        assert mask_B1QK is not None
        return mask_B1QK

    def _part(self, whole_BS: Tensor, ring_rank: int, local: tuple[int, int]) -> Tensor:
        parts = [whole_BS[:, start:stop] for start, stop in self.places.ring_ranges(ring_rank)]
        return torch.cat(parts, 1)[:, slice(*local)]


def make_masks(places: Places, key_mask_BS: Tensor | None, documents_BS: Tensor | None) -> Masks | None:
    """None where there is nothing to mask, which is computed faster."""
    if key_mask_BS is None and documents_BS is None:
        return None
    return Masks(places=places, key_mask_BS=key_mask_BS, documents_BS=documents_BS)
