"""Grouped matrix products in float64, which torch has in 16 and 32 bits only: for comparisons.

Mixtures of experts multiply the tokens of every expert by its weights in one kernel. In float64 it refuses, so there
the groups are multiplied one after the other: the same sums, and autograd differentiates them as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.parallel.wrapping.replacements import Replacements, functions


class Float64Products:
    """Replacements under which grouped products take float64, and whether any did."""

    def __init__(self, model: nn.Module) -> None:
        self.is_used = False
        places = [
            (holder, name) for holder, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(holder, name)
        ]
        replaced = [(holder, name, self._wide(getattr(holder, name))) for holder, name in places]
        self.replacements = Replacements(*functions(model, replaced, why="takes float64 too"))

    def notes(self) -> list[str]:
        """A sentence on products that were taken group by group, if any were."""
        return ["grouped products, which torch has in 16 and 32 bits, were taken group by group"] * self.is_used

    def _wide(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def multiply(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if left.dtype != torch.float64:
                return original(left, right, *args, **kwargs)
            self.is_used = True
            return grouped_product(left, right, *args, **kwargs)

        return multiply


def grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's grouped product. `offs` are the ends of the groups along the dim that both, or the 2-dim one, have."""
    if offs is None:
        made = left @ right
    elif left.is_meta:  # shapes only: no group has a size
        shape = (len(offs),) if left.dim() == right.dim() else ()
        made = (left[..., :1, :].new_zeros(*shape, left.shape[-2], right.shape[-1])) + 0 * left.sum() + 0 * right.sum()
    else:
        ends = offs.tolist()
        groups = list(zip([0, *ends], ends, strict=False))
        if left.dim() == 2 and right.dim() == 3:
            parts = [left[start:stop] @ right[number] for number, (start, stop) in enumerate(groups)]
            made = torch.cat([*parts, left.new_zeros(len(left) - ends[-1], right.shape[-1])])
        elif left.dim() == 3 and right.dim() == 2:
            parts = [left[number] @ right[:, start:stop] for number, (start, stop) in enumerate(groups)]
            made = torch.cat([*parts, left.new_zeros(left.shape[1], right.shape[1] - ends[-1])], dim=1)
        else:
            made = torch.stack([left[:, start:stop] @ right[start:stop] for start, stop in groups])
    if bias is not None:
        made = made + bias
    return made if out_dtype is None else made.to(out_dtype)
