"""Masks of attention, made block by block, so that no rank makes the mask of a whole sequence.

A mask is given by what it is made of, in global order and on every rank: which keys may be seen, and which document
each token belongs to. Both are as long as the sequence; the mask of a block is as large as its scores. A window is a
property of one call of attention and known from numbers alone (`plan/partition/window.py`).

Dims: B samples, S tokens of the whole padded sequence, Q and K those of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.plan.partition.sequence import Places, Rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The samples of one forward pass, as far as attention must know them."""

    places: Places
    key_mask_BS: Tensor | None = None
    """bool, of the whole padded sequence in global order, on every rank: no query sees a key that is False."""
    documents_BS: Tensor | None = None
    """Whole numbers, likewise: a query sees keys of its own document only."""

    @property
    def is_masked(self) -> bool:
        return self.key_mask_BS is not None or self.documents_BS is not None

    def mask(self, queries: int, keys: int, rectangle: Rectangle) -> Tensor | None:
        """[B, 1, Q or 1, K], True where a query may attend; causality, padding and windows apart.

        `queries` and `keys`: the ring ranks that hold them. None: every query may see every key.
        """
        mask_B1QK = None
        if self.documents_BS is not None:
            of_queries = self._part(self.documents_BS, queries, rectangle.q)
            of_keys = self._part(self.documents_BS, keys, rectangle.k)
            mask_B1QK = of_queries[:, None, :, None] == of_keys[:, None, None, :]
        if self.key_mask_BS is not None:
            is_seen = self._part(self.key_mask_BS, keys, rectangle.k)[:, None, None, :]
            mask_B1QK = is_seen if mask_B1QK is None else mask_B1QK & is_seen
        return mask_B1QK

    def _part(self, whole_BS: Tensor, ring_rank: int, local: tuple[int, int]) -> Tensor:
        parts = [whole_BS[:, start:stop] for start, stop in self.places.ring_ranges(ring_rank)]
        return torch.cat(parts, 1)[:, slice(*local)]


def window_mask(rectangle: Rectangle, device: torch.device) -> Tensor | None:
    """[1, 1, Q, K], True where a window lets a query attend; None: everywhere. Made on the device, without a copy."""
    if rectangle.band is None:
        return None
    (first, last), (start, stop) = rectangle.q, rectangle.k
    place_Q = torch.arange(rectangle.distance, rectangle.distance + last - first, device=device)
    behind_QK = place_Q[:, None] - torch.arange(stop - start, device=device)
    return ((behind_QK <= rectangle.band.before) & (behind_QK >= -rectangle.band.after))[None, None]
