"""How one tensor differs from another: by how much, by a factor, or in some rows only."""

from __future__ import annotations

import math

import torch

Rows = tuple[int, int, int, int]
"""A dim, the first and the last index along it, and its length."""


def largest_error(mine: torch.Tensor | None, true: torch.Tensor | None) -> float:
    """The largest difference; infinite where there is nothing to compare, or not a number."""
    if mine is None or true is None:
        return math.inf
    error = float((mine.to(true) - true).abs().max()) if true.numel() else 0.0
    return math.inf if math.isnan(error) else error


def ratio_of(mine: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """The factor that fits best, by least squares, and the part of the largest difference that it leaves."""
    mine = mine.to(true)
    size, error = float((true * true).sum()), float((mine - true).abs().max()) if true.numel() else 0.0
    if size == 0 or error == 0:
        return math.nan, math.inf
    ratio = float((mine * true).sum()) / size
    return ratio, float((mine - ratio * true).abs().max()) / error


def rows_off(is_off: torch.Tensor) -> Rows | None:
    """The narrowest range of indices along one dim that has all that is off; None if that is all of every dim."""
    found: list[tuple[float, Rows]] = []
    for dim, length in enumerate(is_off.shape):
        others = [other for other in range(is_off.dim()) if other != dim]
        where = (is_off.any(dim=others) if others else is_off).nonzero().flatten().tolist()
        if where and where[-1] - where[0] + 1 < length:
            found.append(((where[-1] - where[0] + 1) / length, (dim, where[0], where[-1], length)))
    return min(found)[1] if found else None
