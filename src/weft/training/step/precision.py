"""Mixed precision around the model: casts of inputs and outputs, and the loss scale under fp16.

Parameters are cast where they are stored (`parallel/zero/flat_parameters.py`). Here floating-point inputs are cast to
the same format, and outputs back to float32, so that no loss is computed in 16 bits. fp16 holds nothing below 6e-8,
where most gradients of a large model are: the loss is multiplied by a scale before the backward pass, and gradients are
divided by it after. An overflow halves the scale and skips the step; a run of finite steps doubles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.dtypes import HALF_DTYPES
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.plan import Plan
from weft.training.data.trees import forward, map_output, map_tensors

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
        self.value = value
        self._is_dynamic = is_dynamic
        self._num_good = 0

    @classmethod
    def of(cls, plan: Plan) -> LossScale:
        """The scale of a plan; 1 unless it computes in fp16."""
        if plan.precision.compute != "fp16":
            return cls(1.0, is_dynamic=False)
        planned = plan.precision.loss_scale
        return cls(_FIRST_SCALE, is_dynamic=True) if planned == "dynamic" else cls(float(planned), is_dynamic=False)

    def update(self, *, is_finite: bool) -> None:
        """Adapt a dynamic scale to whether the last step's gradients were finite."""
        if not self._is_dynamic:
            return
        if not is_finite:
            self.value, self._num_good = max(self.value / 2, 1.0), 0
            return
        self._num_good += 1
        if self._num_good == _GROWTH_INTERVAL:
            self.value, self._num_good = min(self.value * 2, _LARGEST_SCALE), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": self._num_good}

    def load_state(self, state: dict[str, float]) -> None:
        if self._is_dynamic:
            self.value, self._num_good = float(state["value"]), int(state["num_good"])
