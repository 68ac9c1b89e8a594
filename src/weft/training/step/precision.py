"""Mixed precision around the model: casts of inputs and outputs, and the loss scale under fp16.

Parameters are cast where they are stored (`parallel/zero/flat_parameters.py`). Here floating-point inputs are cast to
the same format, and outputs back to float32, so that no loss is computed in 16 bits. fp16 holds nothing below 6e-8,
where most gradients of a large model are: the loss is multiplied by a scale before the backward pass, and gradients are
divided by it after. An overflow halves the scale and skips the step; a run of finite steps doubles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.dtypes import HALF_DTYPES
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.plan import Plan
from weft.training.data.trees import forward, map_output, map_tensors
from weft.training.step.async_scalars import scalar_on_device

_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_GROWTH_INTERVAL = 2000
"""Finite steps after which the scale doubles."""


class Caller:
    """Calls a model in the dtype that its parameters compute in."""

    def __init__(self, model: Callable[..., Any], plan: Plan, *, widens: bool) -> None:
        """`widens`: outputs are cast to float32; the built-in loss does that itself, compiled."""
        self._model = model
        self._compute = None if plan.precision.compute == "model" else torch_dtype(plan.precision.compute)
        self._widens = widens

    def __call__(self, inputs: Any) -> Any:
        if self._compute is None:
            return forward(self._model, inputs)
        narrow = map_tensors(lambda one: one.to(self._compute) if one.is_floating_point() else one, inputs)
        output = forward(self._model, narrow)
        if not self._widens:
            return output
        return map_output(lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor, output)


class LossScale:
    """The factor that the loss is multiplied by before the backward pass, and gradients are divided by after."""

    def __init__(self, value: float, *, is_dynamic: bool) -> None:
        self.factor: float | torch.Tensor = value
        """A tensor once `update_on_device` has been called; a new one every time, so that old ones do not change."""
        self.is_dynamic = is_dynamic
        self._num_good: int | torch.Tensor = 0

    @classmethod
    def of(cls, plan: Plan) -> LossScale:
        """The scale of a plan; 1 unless it computes in fp16."""
        if plan.precision.compute != "fp16":
            return cls(1.0, is_dynamic=False)
        planned = plan.precision.loss_scale
        return cls(_FIRST_SCALE, is_dynamic=True) if planned == "dynamic" else cls(float(planned), is_dynamic=False)

    @property
    def value(self) -> float:
        """The factor as a number, which may have to be waited for."""
        return float(self.factor)

    def update(self, *, is_finite: bool) -> None:
        """Adapt a dynamic scale to whether the last step's gradients were finite."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.factor, self._num_good = max(self.value / 2, 1.0), 0
            return
        self._num_good = int(self._num_good) + 1
        if self._num_good == _GROWTH_INTERVAL:
            self.factor, self._num_good = min(self.value * 2, _LARGEST_SCALE), 0

    def update_on_device(self, overflow: torch.Tensor) -> None:
        """`update` without waiting: `overflow` is 1.0 on the device if the gradients were not finite, else 0.0."""
        if not self.is_dynamic:
            return
        device = overflow.device
        factor = scalar_on_device(self.factor, device, torch.float32).clone()
        num_good = scalar_on_device(self._num_good, device, torch.int32).clone()
        torch._amp_update_scale_(factor, num_good, overflow, 2.0, 0.5, _GROWTH_INTERVAL)
        self.factor, self._num_good = factor.clamp_(1.0, _LARGEST_SCALE), num_good

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": int(self._num_good)}

    def load_state(self, state: dict[str, float]) -> None:
        if self.is_dynamic:
            self.factor, self._num_good = float(state["value"]), int(state["num_good"])
