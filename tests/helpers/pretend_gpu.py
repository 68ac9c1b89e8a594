"""A GPU that is only pretended, to find on any machine where the host would wait for a real one.

Under `pretended_gpu()` every tensor tells weft that it is on a GPU, so its code takes the paths it takes there. Inside,
`no_waits()` refuses what makes a host wait: to read a tensor's value, to make a tensor of Python values, and to assign
a number to one entry of a tensor (torch copies it from the host; a slice is filled by the device). `AsyncScalars` of a
step before may be read: the device goes on with the step launched since. It cannot see copies of host tensors, nor
kernels that wait by themselves: `benchmarks/host_syncs.py` does, on a real GPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.training.step.async_scalars import AsyncScalars

READS = ("tolist", "item", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu")
aten = torch.ops.aten
WAITING_OPERATORS = frozenset(
    {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default, aten.equal.default}
)


OF_THE_HOST = frozenset({"find"})
"""Functions that read values of host tensors only: they look at `device`, which is not pretended."""


class HostWaitError(AssertionError):
    """The host would have waited for a GPU."""


class _RefuseReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_OPERATORS and not _is_of_the_host():
            raise HostWaitError(f"{func} reads a value")
        return func(*args, **(kwargs or {}))


def _is_of_the_host() -> bool:
    return any(frame.name in OF_THE_HOST for frame in traceback.extract_stack(limit=12))


@contextmanager
def pretended_gpu() -> Iterator[None]:
    def is_cuda(_: Tensor) -> bool:
        return sys._getframe(1).f_globals.get("__name__", "").startswith("weft.")  # torch itself must not be misled

    stream = mock.Mock(name="the only stream")
    with (
        mock.patch.object(Tensor, "is_cuda", property(is_cuda)),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
    ):
        yield


@contextmanager
def no_waits() -> Iterator[None]:
    def refuse(owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def raising(*args: Any, **kwargs: Any) -> Any:
            if _is_of_the_host():
                return original(*args, **kwargs)
            raise HostWaitError(what)

        return mock.patch.object(owner, name, raising)

    assign = Tensor.__setitem__

    def assign_checked(self: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor) and self[index].dim() == 0:
            raise HostWaitError(f"{value!r} is assigned to one entry")
        assign(self, index, value)

    made: list[AsyncScalars] = []
    make, read = AsyncScalars.__init__, AsyncScalars.read

    def note(self: AsyncScalars, *numbers: Any) -> None:
        make(self, *numbers)
        made.append(self)

    def find(self: AsyncScalars) -> list[float]:
        if made and self is made[-1]:
            raise HostWaitError("scalars of the step that was just launched are read")
        return read(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(AsyncScalars, "is_ready", False))
        stack.enter_context(mock.patch.object(AsyncScalars, "__init__", note))
        stack.enter_context(mock.patch.object(AsyncScalars, "read", find))
        for name in READS:
            stack.enter_context(refuse(Tensor, name, f"Tensor.{name} reads a value"))
        stack.enter_context(mock.patch.object(Tensor, "__setitem__", assign_checked))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(refuse(torch, name, f"torch.{name} copies from the host"))
        stack.enter_context(_RefuseReads())
        yield
