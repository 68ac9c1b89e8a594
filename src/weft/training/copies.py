"""Copies of tensors in host memory, in one buffer that is kept for the next time: what a save in the background writes.

The buffer is page-locked where tensors come from a GPU, which is the only memory that a GPU copies to at full speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from weft.layout import Range
from weft.training.tensor_bytes import flat_range

_ALIGNED_BYTES = 64


class HostCopies:
    """A buffer that holds copies of one list of tensors at a time."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def hold(self, parts: Sequence[tuple[torch.Tensor, Range]]) -> list[torch.Tensor]:
        """Copies of ranges of flattened tensors, as they are now. The last ones are overwritten."""
        sizes = [(stop - start) * tensor.element_size() for tensor, (start, stop) in parts]
        *places, end = itertools.accumulate((-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes), initial=0)
        if self._memory.numel() < end:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=self._is_on_gpu)
        copies = []
        for (tensor, span), place, size in zip(parts, places, sizes, strict=True):
            copy = self._memory[place : place + size].view(tensor.dtype)
            copies.append(copy.copy_(flat_range(tensor, *span), non_blocking=True))
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return copies
