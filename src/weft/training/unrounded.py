"""What a model rounds to float32 by itself stays in float64: for comparisons only.

Norms, softmaxes and rotary tables of many models cast to float32 and back, whatever they are given: right for 16 bits,
but in float64 a sum that was taken in another order is then off by 1e-7, which hides what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Unrounded(TorchFunctionMode):
    """While entered, no float64 tensor becomes a float32 one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else None
        if isinstance(given, torch.Tensor) and given.dtype == torch.float64:
            if func is torch.Tensor.float:
                return given
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        return func(*args, **kwargs)
