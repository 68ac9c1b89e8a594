"""Hooks on parameters that say when their gradients are complete: the part that all syncs share which send early.

A gradient is *ready* when no other will be added to it before it leaves. What is done with it then is the subclass's.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from weft.errors import ModelError


class GradientHooks(ABC):
    """Watches the gradients of parameters, in the backward passes it is told of."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names = tuple(names)
        self._index = {name: index for index, name in enumerate(names)}
        self._ignores = False
        self._ready: list[bool] = []
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))

    def _disarm(self) -> None:
        self._armed = [False] * len(self._names)

    def arm(self) -> None:
        self._armed = [True] * len(self._names)

    def arm_parameters(self, names: Collection[str]) -> None:
        for index in self._indices(names):
            self._armed[index] = True

    def complete(self, names: Collection[str]) -> None:
        for index in self._indices(names):
            if not self._ready[index]:
                self._set_absent(index)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    @abstractmethod
    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a parameter's gradient."""

    @abstractmethod
    def _set_ready(self, index: int) -> None:
        """A gradient is ready, for the first time in this step."""

    def _set_absent(self, index: int) -> None:
        """No gradient, or no other one, will come for a parameter."""
        self._set_ready(index)

    def _refuse_second(self, index: int) -> NoReturn:
        raise ModelError(
            f'"{self._names[index]}" got a second gradient in one backward pass after its first was sent; reentrant '
            "checkpointing of shared layers does that, so call torch.utils.checkpoint with use_reentrant=False"
        )

    def _indices(self, names: Collection[str]) -> list[int]:
        return [self._index[name] for name in names if name in self._index]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Autograd keeps the hook where the garbage collector does not see it: it must not keep the trainer alive.
        reference = weakref.ref(self)

        def gradient_ready(parameter: torch.Tensor) -> None:
            sync = reference()
            if sync is not None:
                sync._take(index, parameter)

        return gradient_ready
