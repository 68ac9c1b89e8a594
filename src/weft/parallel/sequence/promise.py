"""Something that a model's tensors must fulfil in every pass, checked without making the host wait at every one."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Promise:
    """A condition on values. The host looks at it once per kind of tensor; from then on a GPU stops where it fails."""

    def __init__(self, broken: str) -> None:
        """`broken`: what is wrong where it does not hold."""
        self._broken = broken
        self._held: set[Hashable] = set()

    def holds(self, found: Tensor, kind: Hashable) -> bool:
        """`found`: the condition, one bool. On a GPU that has seen this kind, always True: the GPU itself checks it."""
        if found.is_cuda and kind in self._held:
            torch._assert_async(found, self._broken)
            return True
        is_held = bool(found)
        if is_held:
            self._held.add(kind)
        return is_held
