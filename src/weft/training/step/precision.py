"""Mixed precision around the model: what goes in and comes out, and the scale of the loss under fp16.

Parameters are cast where they are stored (`parallel/zero/flat_parameters.py`). Here floating-point inputs are cast to
the same format, and outputs back to float32, so that a loss is never taken in 16 bits. fp16 holds nothing below 6e-8,
where most gradients of a large model are: the loss is multiplied by a scale before the backward pass, and gradients are
divided by it after. A scale that makes a gradient overflow halves, and the step is skipped; after a run of good steps
it doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.parallel.zero.grouping import torch_dtype
from weft.plan.plan import Plan
from weft.training.data.trees import map_output, map_tensors
from weft.training.step.loss import forward

_HALF = (torch.float16, torch.bfloat16)
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_GROWTH_INTERVAL = 2000
"""Good steps after which a larger scale is tried."""


class Caller:
    """Calls a model in the format its parameters compute in."""

    def __init__(self, model: Callable[..., Any], plan: Plan, *, widens: bool) -> None:
        """`widens`: outputs are given back in float32; the built-in loss does that by itself, and compiled."""
        self._model = model
        self._compute = None if plan.precision.compute == "model" else torch_dtype(plan.precision.compute)
        self._widens = widens

    def __call__(self, inputs: Any) -> Any:
        if self._compute is None:
            return forward(self._model, inputs)
        output = forward(self._model, map_tensors(self._narrow, inputs))
        return widen(output) if self._widens else output

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor


def widen(output: Any) -> Any:
    """The same output with its 16-bit tensors in float32, in the containers it came in."""
    return map_output(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, output)


class LossScale:
    """What the loss is multiplied by, and gradients are divided by."""

    def __init__(self, value: float, *, is_dynamic: bool) -> None:
        self.value = value
        self._is_dynamic = is_dynamic
        self._num_good = 0

    @classmethod
    def of(cls, plan: Plan) -> LossScale:
        """The scale a plan asks for; 1 unless it computes in fp16."""
        if plan.precision.compute != "fp16":
            return cls(1.0, is_dynamic=False)
        planned = plan.precision.loss_scale
        return cls(_FIRST_SCALE, is_dynamic=True) if planned == "dynamic" else cls(float(planned), is_dynamic=False)

    def update(self, *, is_finite: bool) -> None:
        """Learn whether the last step's gradients were finite."""
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
