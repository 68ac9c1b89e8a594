"""What a model rounds to float32 by itself stays in float64: for comparisons only.

Norms, softmaxes and rotary tables of many models cast to float32 and back, whatever they are given: right for 16 bits,
but in float64 a sum that was taken in another order is then off by 1e-7, which hides what is looked for. Models that do
so are noticed by calling them once. The casts are left out below autograd, where a backward pass and what is computed
again in it are seen too; that makes every operator slower, so other models are spared it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.training.data.trees import forward
from weft.training.step.evaluating import evaluating


def unrounded(model: nn.Module, inputs: Any) -> AbstractContextManager[object]:
    """Where a model of float64 casts to float32, it does not inside; found by calling it with these inputs."""
    noticing = _Noticing()
    try:
        with evaluating(model), noticing:
            forward(model, inputs)
    except Exception:
        return nullcontext()  # whoever trains it will meet the same, and say so
    return _Unrounded() if noticing.has_cast else nullcontext()  # type: ignore[no-untyped-call]


class _Noticing(TorchFunctionMode):
    has_cast = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            asked = (*args[1:], *(kwargs or {}).values())
            is_cast = func is torch.Tensor.float or any(one is torch.float32 for one in asked)
            self.has_cast = self.has_cast or is_cast
        return func(*args, **(kwargs or {}))


class _Unrounded(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
