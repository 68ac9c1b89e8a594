"""A user's loss in float64: tensors that it holds in float32, such as class weights, are widened as it uses them.

A comparison in float64 gives losses outputs and targets of that format, and a loss that holds weights, or a model, of
its own would fail; one that casts its input would be off by float32's rounding. Below a call of the loss every function
of torch that gets a float64 tensor gets only such, and casts back to float32 are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any_only, tree_map

from weft.training.loss.loss import LossFunction


def widened(loss: str | LossFunction) -> str | LossFunction:
    """The same loss, which also takes float64 outputs."""
    return functools.partial(_call, loss) if callable(loss) else loss


def _call(loss: LossFunction, output: Any, targets: Any) -> Any:
    with _Widen():
        return loss(output, targets)


class _Widen(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if not tree_any_only(torch.Tensor, lambda one: one.dtype == torch.float64, given):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0]
        wide_args, wide_kwargs = tree_map(_wide, given)
        return func(*wide_args, **wide_kwargs)


def _wide(one: Any) -> Any:
    if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
        return one.double()
    return torch.float64 if one is torch.float32 else one
