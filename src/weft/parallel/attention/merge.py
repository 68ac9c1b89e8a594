"""Outputs of attention over two sets of keys, merged into that over both, by their log-sum-exps.

With p = σ(lse' - lse), the new keys' part of the sum, the merged output is out + p (out' - out): nothing can overflow.
torch's functions read and write every entry three times; on a GPU, which would wait for its memory, one Triton kernel
does it in one pass, if Triton is installed.

Dims: B samples, H heads, T queries of which Q are merged, E entries of a value.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from weft.dtypes import accumulator_dtype

log = logging.getLogger("weft")

Fused = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(out, lse, new out, new lse, result): writes the result, which may be `out`, and updates `lse`."""


class Merged:
    """Output and log-sum-exp of the keys seen so far."""

    def __init__(self, *, num_queries: int, is_masked: bool) -> None:
        """`is_masked`: some queries may see none of a block's keys."""
        self.out = self.lse = torch.empty(0)
        self._num_queries = num_queries
        self._is_masked = is_masked
        self._is_empty = True

    def add(self, out_BHQE: Tensor, lse_BHQ: Tensor, queries: tuple[int, int]) -> None:
        """Merge the output of some queries over a further block."""
        if self._is_empty:
            self._is_empty = False
            if out_BHQE.shape[2] == self._num_queries:
                self.out, self.lse = out_BHQE, lse_BHQ
                return
            # Through a window, not every query sees the first block. What has seen nothing is replaced when merged.
            batch, heads, _, width = out_BHQE.shape
            self.out = lse_BHQ.new_zeros(batch, heads, self._num_queries, width)
            self.lse = lse_BHQ.new_full((batch, heads, self._num_queries), -math.inf)
        fused = _fused_merge() if self.out.is_cuda and self.lse.dtype == torch.float32 else None
        if fused is not None and self.out.dtype != self.lse.dtype and queries == (0, self.out.shape[2]):
            wide = torch.empty_like(self.out, dtype=self.lse.dtype)
            fused(self.out, self.lse, out_BHQE, lse_BHQ, wide)
            self.out = wide
            return
        self.out = self.out.to(self.lse.dtype)
        out, lse = self.out[:, :, slice(*queries)], self.lse[:, :, slice(*queries)]
        if fused is not None:
            fused(out, lse, out_BHQE, lse_BHQ, out)
            return
        difference = lse_BHQ - lse
        if self._is_masked:  # NaN for queries that have seen nothing so far: -inf - (-inf)
            difference.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        out.lerp_(out_BHQE.to(out.dtype), difference.sigmoid_().unsqueeze(-1))
        torch.logaddexp(lse, lse_BHQ, out=lse)

    def finish(self, q_BHTD: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
        """(output of all keys in the dtype of the queries, its log-sum-exp); no keys: 0 and -inf."""
        if self._is_empty:
            self.out = q_BHTD.new_zeros(*q_BHTD.shape[:3], width)
            self.lse = self.out[..., 0].to(accumulator_dtype(q_BHTD.dtype)).fill_(-math.inf)
        return self.out.to(q_BHTD.dtype), self.lse


@functools.cache
def _fused_merge() -> Fused | None:
    """The Triton kernel, if it works here; tried on a few numbers, because it needs a compiler."""
    try:
        from weft.parallel.attention.merge_triton import merge

        some = torch.zeros(1, 1, 1, 8, device="cuda")
        merge(some, some[..., 0].clone(), some, some[..., 0].clone(), some)
    except Exception as error:
        log.info("blocks of attention are merged by torch's functions, without Triton (%r)", error)
        return None
    fused: Fused = merge
    return fused
