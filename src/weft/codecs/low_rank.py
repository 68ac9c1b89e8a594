"""The arithmetic of powersgd on matrices of one shape at once: products with thin factors, and orthonormal factors.

Factors lie transposed, [matrix, rank, row] on the left and [matrix, rank, column] on the right, so that matrices are
read along their rows: on a CPU that is half the time. `native/low_rank.c` does the same in fewer passes.

Factors are made orthonormal row by row: each row is made orthogonal to those before it, twice (Gram-Schmidt, repeated),
which is enough to be so up to rounding. The alternatives are worse here. Once is not enough when rows are nearly
dependent, as those of a power iteration are. Cholesky factors of the products of rows square the condition number, and
fail on rows that depend on each other. Householder's QR as LAPACK has it takes one matrix at a time, and invents
directions where there are none, which would become the start of the next iteration. Here a row that is zero, or that
depends on those before it up to rounding, becomes zero. Rows may be of any size: they are scaled by powers of two
first, which is exact, so no square overflows or vanishes. Nothing waits for a device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from weft.codecs.native.library import find_library
from weft.codecs.native.low_rank import Loops

Factor = float | torch.Tensor
"""A number, or on a GPU a tensor of one element."""


class LowRank(Protocol):
    """What powersgd does with matrices [matrix, row, column] and their factors."""

    def encode(
        self,
        values: torch.Tensor,
        kept: torch.Tensor,
        keep: Factor,
        *,
        wanted: torch.Tensor,
        right: torch.Tensor,
        left: torch.Tensor,
    ) -> None:
        """wanted = values + keep · kept; left = right · wantedᵀ. `wanted` may be `kept`."""

    def decode(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        scale: float,
        share: float,
        values: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        """values = scale · leftᵀ · right; wanted -= share · leftᵀ · right."""

    def orthonormalise_(self, rows: torch.Tensor) -> None:
        """Make the rows of each factor orthonormal, in place; there are no more rows than columns.

        A row spans with those before it what it spanned with them before.
        """

    def next_start(self, right: torch.Tensor, old: torch.Tensor, *, size: float, new: torch.Tensor) -> None:
        """new = right, rows scaled by powers of two to a largest element of about `size`; rows that are negligible
        beside the largest stay as in `old`. `new` may be `old`."""


def find_low_rank(device: torch.device, dtype: torch.dtype) -> LowRank:
    """The fastest arithmetic there is."""
    library = find_library("low_rank") if device.type == "cpu" else None
    return TorchLowRank() if library is None else Loops(library, dtype, negligible=negligible(dtype))


def negligible(dtype: torch.dtype) -> float:
    """What is at most this part of a row is taken for rounding."""
    return 64 * torch.finfo(dtype).eps


def add_kept(values: torch.Tensor, kept: torch.Tensor, keep: Factor, *, out: torch.Tensor) -> None:
    """out = values + keep · kept."""
    if isinstance(keep, torch.Tensor):
        torch.addcmul(values, kept, keep.to(kept.dtype), out=out)
    else:
        torch.add(values, kept, alpha=keep, out=out)


class TorchLowRank(LowRank):
    """In torch's operations, on any device."""

    def encode(
        self,
        values: torch.Tensor,
        kept: torch.Tensor,
        keep: Factor,
        *,
        wanted: torch.Tensor,
        right: torch.Tensor,
        left: torch.Tensor,
    ) -> None:
        add_kept(values, kept, keep, out=wanted)
        torch.bmm(right, wanted.mT, out=left)

    def decode(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        scale: float,
        share: float,
        values: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        torch.baddbmm(values, left.mT, right, beta=0, alpha=scale, out=values)
        torch.baddbmm(wanted, left.mT, right, alpha=-share, out=wanted)

    def orthonormalise_(self, rows: torch.Tensor) -> None:
        rows.mul_(_to_below_one(torch.linalg.vector_norm(rows, torch.inf, dim=2, keepdim=True)))
        limits = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(negligible(rows.dtype))
        for place in range(rows.shape[1]):
            row, before = rows[:, place : place + 1], rows[:, :place]
            for _ in range(2 if place else 0):
                torch.baddbmm(row, torch.bmm(row, before.mT), before, alpha=-1, out=row)
            size = torch.linalg.vector_norm(row, dim=2, keepdim=True)
            row.div_(size.masked_fill_(size <= limits[:, place : place + 1], torch.inf))

    def next_start(self, right: torch.Tensor, old: torch.Tensor, *, size: float, new: torch.Tensor) -> None:
        sizes = torch.linalg.vector_norm(right, torch.inf, dim=2, keepdim=True)
        caught_nothing = sizes <= sizes.amax(dim=1, keepdim=True) * negligible(sizes.dtype)
        torch.where(caught_nothing, old, right * (_to_below_one(sizes) * size), out=new)


def _to_below_one(sizes: torch.Tensor) -> torch.Tensor:
    """The factors, powers of two, that bring these sizes into [1/2, 1); of what is smaller than normal numbers, the
    largest."""
    sizes = sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    mantissas, _ = torch.frexp(sizes)
    return mantissas.div_(sizes)
