"""ZeRO-1 and 2 after an update: parameters are gathered while the next step begins, each waited for at its first use.

    update | gather 0 | gather 1 ~~~~~~~~~| gather 2 ~~~~~~~~~|
    next forward      | embedding | block 0 | block 1 | block 2 |

The step does not wait for its gathers, which start in the order of use. Until its gather is waited for, a parameter is
a NaN of a shape that fits nothing, as under ZeRO-3, and intercepted (`intercepted_parameter.py`): *every* use, by any
code (a layer, an average of weights between two steps, `state_dict()`, a copy of the model), waits first and then gets
the new values. So code outside of weft never reads old values, or a mixture of old and new ones:

- On a GPU the reading stream waits for the gather, and the training stream then waits for the reading stream. On the
  host, waiting blocks.
- Memory of parameters to which other objects refer (a kept `parameter.data`, `detach()` or `state_dict()`) can be read
  without a use of the parameter. References are counted, and a flat buffer that has more of them than weft's own is
  waited for at once.
- Blocks, and layers outside of them, wait before they are called: compiled code must not see the intercepting class,
  and kernels of an extension may read parameters without a call of a torch function.
- Where the user compiled a module in place, with its hooks, all gathers are waited for at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import nn

from weft.comm.collectives import Pending
from weft.comm.under_way import wait_before_leaving
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.intercepted_parameter import intercepting_class, set_class


class OverlappedGather:
    """The gather of one flat buffer after every update."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._pending: Pending | None = None
        self._waiting = threading.RLock()
        """Weights may be read from several threads."""
        self._stream: torch.cuda.Stream | None = None
        self._intercepting_class = intercepting_class(self._before_use)
        self._has_plain_parameters = all(type(parameter) is nn.Parameter for parameter in flat.parameters)
        flat.withdraw()
        self._num_own_references = num_references(flat.whole)
        flat.lend()
        wait_before_leaving(self)

    def is_of(self, parameters: Collection[nn.Parameter]) -> bool:
        """True if some of these lie in the flat buffer."""
        return any(parameter in parameters for parameter in self._flat.parameters)

    def start(self) -> None:
        """Begin to gather what the optimizer updated."""
        self.wait()
        flat = self._flat
        flat.take_master()
        if flat.group.size == 1:
            return
        flat.withdraw()
        can_wait = self._has_plain_parameters and num_references(flat.whole) == self._num_own_references
        pending = flat.start_refresh()
        if not can_wait:
            pending.wait()
            flat.lend()
            return
        self._pending = pending
        if flat.whole.is_cuda:
            self._stream = torch.cuda.current_stream(flat.whole.device)
        set_class(flat.parameters, self._intercepting_class)

    def wait(self) -> None:
        """Parameters are whole when this returns; on a GPU, for what this stream and the training one do from now."""
        with self._waiting:
            if self._pending is None:
                return
            self._pending.wait()
            with torch._C.DisableTorchFunctionSubclass():  # other threads still find them intercepted
                self._flat.lend()
            set_class(self._flat.parameters, nn.Parameter)
            self._pending = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                self._stream.wait_stream(current)

    def _before_use(self) -> bool:
        self.wait()
        return True


class OverlappedGathers:
    """The gathers of all flat buffers after every update, and the hooks that wait for them."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], flats: Sequence[FlatParameters]) -> None:
        """`flats` in the order of use."""
        self._modules = tuple(model.modules())
        self._gathers = tuple(OverlappedGather(flat) for flat in flats)
        if all(flat.group.size == 1 for flat in flats):
            return
        inside = {module for block in blocks for module in model.get_submodule(block).modules()}
        for block in blocks:
            self._wait_before(model.get_submodule(block), recurse=True)
        for module in self._modules:
            if module not in inside:
                self._wait_before(module, recurse=False)

    def start(self) -> None:
        """Begin all gathers, after an update."""
        for gather in self._gathers:
            gather.start()
        if any(module._compiled_call_impl is not None for module in self._modules):  # with its hooks
            self.wait()

    def wait(self) -> None:
        for gather in self._gathers:
            gather.wait()

    def _wait_before(self, module: nn.Module, *, recurse: bool) -> None:
        own = used_by(module, recurse=recurse)
        used = [one for one in self._gathers if one.is_of(own)]
        if not used:
            return
        why = "waits for its parameters, which are gathered after an update"
        add_hook(module, "forward_pre", WaitBefore(used), by="zero", why=why, prepend=True)


class Awaited(Protocol):
    """Parameters that are waited for together."""

    def wait(self) -> None:
        """Return when they are here."""


class WaitBefore:
    """A hook that waits for parameters; in a copied or saved module, which has its own, it does nothing."""

    def __init__(self, awaited: Sequence[Awaited] = ()) -> None:
        self._awaited = awaited

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for one in self._awaited:
                one.wait()

    def __reduce__(self) -> tuple[type[WaitBefore], tuple[()]]:
        return WaitBefore, ()


def used_by(module: nn.Module, *, recurse: bool) -> set[nn.Parameter]:
    """The parameters that a call of a module uses: its own, and those of lists and dicts in it, which are never called.
    `recurse`: those of all modules in it."""
    found = set(module.parameters(recurse=recurse))
    for inside in module.children():
        if isinstance(inside, nn.ParameterList | nn.ParameterDict):
            found |= set(inside.parameters())
    return found


def num_references(tensor: torch.Tensor) -> int:
    """The number of tensors, arrays and storages, in Python or elsewhere, that share a tensor's memory."""
    storage = tensor.untyped_storage()
    # All storages in Python are one object, which counts once.
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)
