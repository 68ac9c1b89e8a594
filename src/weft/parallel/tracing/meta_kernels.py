"""Functions that torch has on the meta device in fewer formats than on a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

_BF16_ON_META = frozenset({"_grouped_mm", "grouped_mm"})
"""Grouped products, as mixtures of experts take them: without values torch accepts them in bfloat16 only."""


def call_in_unit(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function, on the meta device also in formats that its kernel there does not have."""
    first = args[0] if args else None
    if getattr(func, "__name__", "") not in _BF16_ON_META or not isinstance(first, torch.Tensor) or not first.is_meta:
        return func(*args, **kwargs)

    def narrowed(one: Any) -> Any:
        return one.bfloat16() if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    result = func(*tree_map(narrowed, args), **tree_map(narrowed, dict(kwargs)))
    return result.to(kwargs.get("out_dtype") or first.dtype)
