"""Copies of a model that run side by side, each on its own samples, and meet where one must look at those of all.

BatchNorm normalises by the statistics of the whole batch, and a loss may gather it (`weft.gather_batch`), also where
data ranks have parts of it. A rank's own gradient then depends on all samples, and no pass over its own ones alone
gives it. Here every part has a thread and parameters of its own, whose values are the model's: where the parts meet,
all wait, and one thread joins what they have. A backward pass from the sum of their losses leaves in each copy exactly
the gradient that its rank computes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from weft.parallel.wrapping.wrap import wrap_forward
from weft.training.loss import gather_batch

Result = TypeVar("Result")


class OthersNeededError(BaseException):
    """A loss gathers the batch, and the other parts are not there. No `except Exception` of the loss may hide it."""


class _Alone:
    def gather(self, tensor: Tensor) -> Tensor:
        raise OthersNeededError


@contextmanager
def alone() -> Iterator[None]:
    """Context in which a loss that gathers the batch raises `OthersNeededError`."""
    with mock.patch.object(gather_batch, "_current", _Alone()):
        yield


class Lockstep:
    """A model and copies of it, one per part of the batch."""

    def __init__(self, model: nn.Module, num_parts: int) -> None:
        """The model itself is the first."""
        self.models = [model, *(copy.deepcopy(model) for _ in range(num_parts - 1))]
        for other in self.models[1:]:
            for parameter, first in zip(other.parameters(), model.parameters(), strict=True):
                parameter.data = first.data
        self._place = threading.local()
        self._barrier = threading.Barrier(1)
        self._given: dict[int, Tensor] = {}
        self._taken: dict[int, Tensor] = {}
        self._join: Callable[[Sequence[Tensor]], Sequence[Tensor]]
        for modules in zip(*(one.modules() for one in self.models), strict=True):
            if isinstance(modules[0], _BatchNorm):
                self._let_meet(modules)

    def _let_meet(self, norms: Sequence[nn.Module]) -> None:
        """The first of these norms sees what all of them are given."""
        whole = norms[0].forward

        def join(given: Sequence[Tensor]) -> Sequence[Tensor]:
            output = cast(Tensor, whole(torch.cat(list(given))))
            return list(torch.split(output, [len(one) for one in given]))

        for norm in norms:
            why = "normalises the samples of all parts together"
            wrap_forward(norm, lambda tensor: self._meet(tensor, join), by="verify", why=why)

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all parts, in their order; called by a loss."""
        return self._meet(tensor, lambda given: [torch.cat(list(given))] * len(given))

    def _meet(self, tensor: Tensor, join: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Tensor:
        place: int = self._place.number
        self._given[place], self._join = tensor, join
        self._barrier.wait()
        return self._taken[place]  # all have taken theirs before the next is made: they must meet again first

    @torch.enable_grad()
    def _join_all(self) -> None:
        places = sorted(self._given)
        joined = self._join([self._given[place] for place in places])
        self._given, self._taken = {}, dict(zip(places, joined, strict=True))

    def run(self, call: Callable[[int, nn.Module], Result], places: Sequence[int]) -> list[Result]:
        """Call with each of these parts' number and model at once; what they return, in their order."""
        self._barrier = threading.Barrier(max(len(places), 1), action=self._join_all)
        results: dict[int, Result] = {}
        errors: list[BaseException] = []
        modes: list[Any] = list(_get_current_dispatch_mode_stack())  # they belong to a thread

        def run_one(place: int) -> None:
            self._place.number = place
            try:
                with ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    results[place] = call(place, self.models[place])
            except threading.BrokenBarrierError:
                return  # another one has failed
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        with mock.patch.object(gather_batch, "_current", self):
            threads = [threading.Thread(target=run_one, args=(place,)) for place in places]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return [results[place] for place in places]
