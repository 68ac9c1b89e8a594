"""Bytes of live tensors at each moment of a computation, counted by storage.

Works on fake tensors, which have sizes and lifetimes but no memory, so a model of any size can be profiled anywhere.
A kernel's own workspace, freed before it returns, is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Operator = Any
Listener = Callable[[Operator, torch.Tensor], None]


class LiveBytes(TorchDispatchMode):
    """Counts every storage made while it is active, until it is freed; others are never counted."""

    def __init__(self, *, others: Iterable[torch.Tensor], made: Listener) -> None:
        """`others` exist already; `made` is called with each tensor that an operator makes in a new storage."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        """Largest `live_bytes` since the last `restart_peak`."""
        self.accumulating = False
        """True during the backward pass: see `_is_accumulation`."""
        self._made = made
        self._num_seen = 0
        self._others = [tensor.untyped_storage() for tensor in others]
        self._number_of: dict[int, int | None] = {id(storage): None for storage in self._others}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """A number for the tensor's storage that no other storage ever has; None for one that is not counted."""
        return self._number_of.get(id(tensor.untyped_storage()))

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self._number_of:
                self._watch(tensor.untyped_storage())
                if not (self.accumulating and _is_accumulation(func, args)):
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                self._made(func, tensor)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            self.live_bytes -= num_bytes
            del self._number_of[key], self._watched[key]

        self._number_of[key] = self._num_seen
        self._watched[key] = weakref.ref(storage, gone)
        self._num_seen += 1
        self.live_bytes += num_bytes


def _is_accumulation(func: Operator, args: tuple[Any, ...]) -> bool:
    """Autograd adding up two gradients of one tensor, which it does in place for all but fake tensors.

    The sum counts from the next operator on, when its first summand is gone.
    """
    if func is not torch.ops.aten.add.Tensor:
        return False
    first, second = args[:2]
    return isinstance(second, torch.Tensor) and first.shape == second.shape
