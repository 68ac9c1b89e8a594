"""A condition on a model's tensors that must hold in every pass, checked without making the host wait in every pass."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class DeviceAssertion:
    """Checks a condition on the host once per kind of tensor; from then on a GPU checks it, and stops if it fails."""

    def __init__(self, message: str) -> None:
        """`message`: what is wrong where the condition does not hold, and what to do."""
        self._message = message
        self._checked_kinds: set[Hashable] = set()

    def holds(self, condition: Tensor, kind: Hashable) -> bool:
        """`condition`: one bool. Once it has held for this kind on a GPU, always True: the GPU itself checks it."""
        if condition.is_cuda and kind in self._checked_kinds:
            torch._assert_async(condition, self._message)
            return True
        is_held = bool(condition)
        if is_held:
            self._checked_kinds.add(kind)
        return is_held
