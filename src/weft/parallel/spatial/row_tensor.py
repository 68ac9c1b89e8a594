"""A tensor of which this rank has some rows only, and which says of itself that it is the whole.

The class is the tag: every torch function that is given such a tensor comes to `__torch_function__`, wherever it is
called, be it in a block that is computed again in the backward pass, on another thread, or in a hook. A mode that is
switched on around the forward pass would miss those. Shapes are those of the whole image, so that sizes a model works
out of them (`x.view(B, -1)`, `size=skip.shape[2:]`, `torch.zeros(x.shape)`) are right on every rank, and alike.

Memory holds this rank's rows and nothing else. Rules that run on them see them as they are, because inside of a rule
these tensors are ordinary ones. What each function does is in `rules.py` and beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.group import Group
from weft.plan.partition.tensor import Range, shares

HEIGHT_DIM = 2
"""Of images and maps (samples, channels, height, width), the only ones that have windows."""

Function = Callable[..., Any]
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How a tensor is split."""

    dim: int
    """The dim that is height, never negative."""
    height: int
    """Rows of the whole."""
    group: Group
    """The ranks that have them."""

    @property
    def own(self) -> Range:
        """Which of them are here."""
        return shares(self.height, self.group.size)[self.group.index]

    @property
    def num_own(self) -> int:
        start, stop = self.own
        return stop - start

    def at(self, dim: int, height: int | None = None) -> Rows:
        """The same, along another dim or of another height."""
        return Rows(dim=dim, height=self.height if height is None else height, group=self.group)

    def whole_shape(self, local: Iterable[int]) -> list[int]:
        return [self.height if dim == self.dim else size for dim, size in enumerate(local)]


class RowTensor(torch.Tensor):
    """This rank's rows. Made by `mark`, read by rules."""

    weft_rows: Rows

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from weft.parallel.spatial.rules import apply_rule  # the rules need this class

        named = {name: value for name, value in (kwargs or {}).items() if name != "out" or value is not None}
        if not args and "input" in named:  # as rules expect it
            args = (named.pop("input"),)
        with torch._C.DisableTorchFunctionSubclass():
            return apply_rule(func, args, named)


def mark(local: torch.Tensor, rows: Rows) -> RowTensor:
    """Say of a tensor that nobody else has that it is this rank's rows. The class is changed in place, without a view,
    so that what overwrites it later costs no copy."""
    assert local.shape[rows.dim] == rows.num_own, f"{tuple(local.shape)} is not {rows.num_own} rows of {rows}"
    local.__class__ = RowTensor
    assert isinstance(local, RowTensor)
    local.weft_rows = rows
    return local


def rows_of(value: Any) -> Rows | None:
    """How a value is split; None for what is whole."""
    return value.weft_rows if isinstance(value, RowTensor) else None


def rows_of_images(x: torch.Tensor) -> Rows | None:
    """How images are split; None for what is whole, or has other dims than images have."""
    rows = rows_of(x)
    return rows if rows is not None and rows.dim == HEIGHT_DIM and x.dim() == 4 else None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are taken over many entries, as torch does inside."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
