"""A tensor subclass that holds this rank's rows of an image and reports the shape of the whole image.

Every torch function given such a tensor comes to `__torch_function__`, wherever it is called: in a recomputed block, on
another thread, in a hook. A mode entered around the forward pass would miss those. With the whole image's shape, sizes
that a model derives from it (`x.view(B, -1)`, `size=skip.shape[2:]`, `torch.zeros(x.shape)`) are right on every rank.

Inside a rule these tensors are ordinary ones that hold this rank's rows and nothing else. `rules.py` lists the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.group import Group
from weft.plan.partition.tensor import Range, shares

HEIGHT_DIM = 2
"""Height in images and feature maps (samples, channels, height, width), the only tensors with windows."""

Function = Callable[..., Any]
Rule = Callable[..., Any]
"""Called as rule(func, *args, **kwargs) in place of func(*args, **kwargs); returns `join.JOIN` to gather rows first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The split of one tensor by rows."""

    dim: int
    """The dim that is height, never negative."""
    height: int
    """Rows of the whole tensor."""
    group: Group
    """The ranks that share the rows."""

    @property
    def parts(self) -> tuple[Range, ...]:
        """Every rank's rows."""
        return shares(self.height, self.group.size)

    @property
    def own(self) -> Range:
        """This rank's rows."""
        return self.parts[self.group.index]

    @property
    def num_own(self) -> int:
        return len(range(*self.own))

    def at(self, dim: int, height: int | None = None) -> Rows:
        """The same split along another dim or of another height."""
        return Rows(dim=dim, height=self.height if height is None else height, group=self.group)

    def whole_shape(self, local: Iterable[int]) -> list[int]:
        return [self.height if dim == self.dim else size for dim, size in enumerate(local)]


class RowTensor(torch.Tensor):
    """This rank's rows. Made by `mark`, read by rules."""

    weft_rows: Rows

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from weft.parallel.spatial.rules import apply_rule  # the rules need this class

        named = {name: value for name, value in (kwargs or {}).items() if name != "out" or value is not None}
        if not args and "input" in named:  # rules expect it first
            args = (named.pop("input"),)
        with torch._C.DisableTorchFunctionSubclass():
            return apply_rule(func, args, named)


def mark(local: torch.Tensor, rows: Rows) -> RowTensor:
    """Turn a tensor that nothing else refers to into this rank's rows; a view would make in-place writes copy."""
    assert local.shape[rows.dim] == rows.num_own, f"{tuple(local.shape)} is not {rows.num_own} rows of {rows}"
    local.__class__ = RowTensor
    assert isinstance(local, RowTensor)
    local.weft_rows = rows
    return local


def rows_of(value: Any) -> Rows | None:
    """The split of a value; None for anything whole."""
    return value.weft_rows if isinstance(value, RowTensor) else None


def rows_of_images(x: torch.Tensor) -> Rows | None:
    """The split of images; None for whole tensors and for other numbers of dims."""
    rows = rows_of(x)
    return rows if rows is not None and rows.dim == HEIGHT_DIM and x.dim() == 4 else None
