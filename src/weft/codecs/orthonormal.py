"""Orthonormal rows of many thin matrices at once, whatever is in them.

Rows are made orthogonal to those before them, one after the other, and each of them twice (Gram-Schmidt, repeated):
"twice is enough" for rows that are orthogonal to rounding. The alternatives are worse here. Once is not enough when
rows are nearly dependent, as those of a power iteration are. Cholesky factors of the products of rows square the
condition number, and fail on rows that depend on each other. Householder's QR as LAPACK has it takes one matrix at a
time, and invents directions where there are none, which would become the start of the next iteration.

A row that is zero, or that depends on those before it up to rounding, becomes zero. Rows may be of any size: they are
scaled by powers of two first, which is exact, so no square overflows or vanishes. Nothing waits for a device.
"""

from __future__ import annotations

import torch


def negligible(dtype: torch.dtype) -> float:
    """What is at most this part of a row is taken for rounding."""
    return 64 * torch.finfo(dtype).eps


def orthonormalise_(rows: torch.Tensor) -> None:
    """Make the rows of each matrix orthonormal, in place; `rows`: [matrix, row, column], no more rows than columns.

    A row spans with those before it what it spanned with them before.
    """
    rows.mul_(to_below_one(torch.linalg.vector_norm(rows, torch.inf, dim=2, keepdim=True)))
    limits = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(negligible(rows.dtype))
    for place in range(rows.shape[1]):
        row, before = rows[:, place : place + 1], rows[:, :place]
        if place:
            for _ in range(2):
                torch.baddbmm(row, torch.bmm(row, before.mT), before, alpha=-1, out=row)
        size = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        row.div_(size.masked_fill_(size <= limits[:, place : place + 1], torch.inf))


def to_below_one(sizes: torch.Tensor) -> torch.Tensor:
    """The factors, powers of two, that bring these sizes into [1/2, 1); of what is smaller than normal numbers, the
    largest."""
    sizes = sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    mantissas, _ = torch.frexp(sizes)
    return mantissas.div_(sizes)
