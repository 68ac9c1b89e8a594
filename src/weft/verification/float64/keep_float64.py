"""Context in which a float64 model's own casts to float32 are no-ops: for comparisons only.

Norms, softmaxes and rotary tables of many models cast to float32 and back, whatever they are given: right for 16 bits,
but in float64 a sum in another order is then off by 1e-7, which hides real errors. Models that do so are detected by
calling them once. The casts are left out below autograd, so that backward passes and recomputation are covered; that
makes every operator slower, so it is done for no other models.
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


def keep_float64(model: nn.Module, inputs: Any) -> AbstractContextManager[object]:
    """A context without casts of float64 tensors to float32, if calling the model with these inputs shows any."""
    detector = _CastDetector()
    try:
        with evaluating(model), detector:
            forward(model, inputs)
    except Exception:
        return nullcontext()  # training it will raise the same error, with its message
    return _KeepFloat64() if detector.has_cast else nullcontext()  # type: ignore[no-untyped-call]


class _CastDetector(TorchFunctionMode):
    has_cast = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            asked = (*args[1:], *(kwargs or {}).values())
            is_cast = func is torch.Tensor.float or any(one is torch.float32 for one in asked)
            self.has_cast = self.has_cast or is_cast
        return func(*args, **(kwargs or {}))


class _KeepFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
