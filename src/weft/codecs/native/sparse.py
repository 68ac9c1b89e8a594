"""Calls of the loops in `sparse.c`, for topk and dgc."""

from __future__ import annotations

import functools

import torch


class Loops:
    """The compiled loops, for dense host tensors."""

    def add(
        self, counts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, target: torch.Tensor, scale: float
    ) -> None:
        """target += scale × the entries."""


@functools.cache
def find_loops() -> Loops | None:
    """The compiled loops; None without a compiler."""
    return None
