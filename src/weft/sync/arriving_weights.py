"""A worker's weights while they arrive, layer by layer: the next forward pass begins with the first ones.

    servers        | begin | embedding | block 1 | block 2 | head |
    next step              | ......... | embedding | block 1 | block 2 | head |

Servers send a clock's weights in the order of the forward pass, and the step before ends when all have begun to. Until
it is waited for, a parameter is a NaN of a shape that fits nothing, and intercepted
(`parallel/zero/intercepted_parameter.py`), as after a step of ZeRO-1 (`overlapped_gather.py`): *every* use, by any code
(a layer, an average of weights between two steps, `state_dict()`, a copy of the model), waits first and gets the new
values. Blocks, and layers outside of them, wait before they are called.

Ranks of a worker that has several do not begin early: they would wait in a collective for one that loses a connection.

Memory to which other objects refer (a kept `parameter.data`, `detach()` or `state_dict()`) can be read without a use of
the parameter. References are counted, and what has more of them than weft's own is waited for at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import PLACEHOLDER_NUMEL, FlatParameters, Piece
from weft.parallel.zero.intercepted_parameter import intercepting_class, set_class
from weft.parallel.zero.overlapped_gather import WaitBefore, num_references, used_by
from weft.sync.push_when_complete import BucketKey

Views = list[list[torch.Tensor | None]]
"""By server and part."""
WaitForBuckets = Callable[[Collection[BucketKey]], None]


class ArrivingUnit(ABC):
    """Parameters that are waited for together."""

    def __init__(self, named: Mapping[str, nn.Parameter], wait: WaitForBuckets) -> None:
        self.names, self.parameters = frozenset(named), tuple(named.values())
        self.buckets: frozenset[BucketKey] = frozenset()
        """Those that its weights come in."""
        self.own_references: list[int] = []
        """How often weft itself refers to the memory of weights while they are withdrawn, by tensor."""
        self._wait, self._waiting = wait, threading.RLock()
        """Weights may be read from several threads."""
        self._is_due = self._is_withheld = False
        self._intercepting_class = intercepting_class(self._before_use)
        self._has_plain_parameters = all(type(one) is nn.Parameter for one in self.parameters)

    @abstractmethod
    def references(self) -> list[int]:
        """How often the memory of weights is referred to."""

    @abstractmethod
    def begin(self) -> None:
        """Weights are written, from now on, where they are now."""

    @abstractmethod
    def withdraw(self) -> None:
        """Let parameters be placeholders."""

    @abstractmethod
    def lend(self) -> None:
        """Let parameters be their weights."""

    @abstractmethod
    def publish(self) -> None:
        """All weights are here: let the model compute with them."""

    def expect(self) -> bool:
        """Weights are on their way; False if they must be waited for at once."""
        self._is_due = True
        if not self._has_plain_parameters:
            return False
        self.withdraw()
        if any(found > own for found, own in zip(self.references(), self.own_references, strict=True)):
            self.lend()
            return False
        set_class(self.parameters, self._intercepting_class)
        self._is_withheld = True
        return True

    def wait(self) -> None:
        """Weights are those of this clock when this returns."""
        with self._waiting:
            if not self._is_due:
                return
            self._wait(self.buckets)
            with torch._C.DisableTorchFunctionSubclass():  # other threads still find them intercepted
                if self._is_withheld:
                    self.lend()
                self.publish()
            if self._is_withheld:
                set_class(self.parameters, nn.Parameter)
            self._is_withheld = self._is_due = False

    def _before_use(self) -> bool:
        self.wait()
        return True


class OwnUnit(ArrivingUnit):
    """Parameters that are written to themselves: those of a block, or one outside of blocks."""

    def begin(self) -> None:
        self._memory = [one.data for one in self.parameters]
        self._placeholders = [one.new_full((1,), float("nan")).expand(PLACEHOLDER_NUMEL) for one in self._memory]
        self.own_references = [num_references(torch.empty(1)) for _ in self._memory]

    def references(self) -> list[int]:
        return [num_references(one) for one in self._memory]

    def withdraw(self) -> None:
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder

    def lend(self) -> None:
        for parameter, memory in zip(self.parameters, self._memory, strict=True):
            parameter.data = memory

    def publish(self) -> None:
        for parameter in self.parameters:  # a graph that was made with other weights must not be used any more
            torch.autograd.graph.increment_version(parameter)


class FlatUnit(ArrivingUnit):
    """Parameters in a flat buffer, which may be copies of what servers send."""

    def __init__(self, flat: FlatParameters, wait: WaitForBuckets) -> None:
        super().__init__(dict(zip(flat.names, flat.parameters, strict=True)), wait)
        self._flat = flat
        flat.withdraw()
        self._alone = self.references()
        flat.lend()

    def begin(self) -> None:
        self.own_references = self._alone

    def references(self) -> list[int]:
        return [num_references(self._flat.whole)]

    def withdraw(self) -> None:
        self._flat.withdraw()

    def lend(self) -> None:
        self._flat.lend()

    def publish(self) -> None:
        self._flat.take_master()
        if self._flat.whole.is_cuda:  # for code on any stream
            torch.cuda.current_stream(self._flat.whole.device).synchronize()


class ArrivingWeights:
    """All weights of a worker's rank, and the hooks that wait for them."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        pieces: Sequence[Piece],
        flats: Sequence[FlatParameters],
        wait: WaitForBuckets,
    ) -> None:
        """`pieces`: what servers have, which is in `flats`, if there are any. `wait`: returns when buckets are here."""
        self._modules = tuple(model.modules())
        units: list[ArrivingUnit] = [FlatUnit(flat, wait) for flat in flats if flat.trainable]
        self.units = tuple(units or (OwnUnit(named, wait) for named in _together(model, blocks, pieces)))
        inside = {module for block in blocks for module in model.get_submodule(block).modules()}
        for block in blocks:
            self._wait_before(model.get_submodule(block), recurse=True)
        for module in self._modules:
            if module not in inside:
                self._wait_before(module, recurse=False)

    def begin(self, buckets: Mapping[str, Collection[BucketKey]], make_views: Callable[[], Views]) -> Views:
        """Before the first weights. `buckets`: those that each piece comes in. `make_views`: makes the views of pieces
        that weights are written to, and returns them."""
        for unit in self.units:
            unit.begin()
            unit.buckets = frozenset(bucket for name in unit.names for bucket in buckets.get(name, ()))
        before = [unit.references() for unit in self.units]
        views = make_views()
        for unit, then in zip(self.units, before, strict=True):
            added = [now - one for now, one in zip(unit.references(), then, strict=True)]
            unit.own_references = [own + more for own, more in zip(unit.own_references, added, strict=True)]
        return views

    def expect(self) -> None:
        """The weights of a clock are on their way."""
        is_compiled = any(module._compiled_call_impl is not None for module in self._modules)  # with its hooks
        at_once = [unit for unit in self.units if not unit.expect() or is_compiled]
        for unit in at_once:
            unit.wait()

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def _wait_before(self, module: nn.Module, *, recurse: bool) -> None:
        own = used_by(module, recurse=recurse)
        used = [unit for unit in self.units if not own.isdisjoint(unit.parameters)]
        if used:
            why = "waits for its parameters, which come from servers"
            add_hook(module, "forward_pre", WaitBefore(used), by="served", why=why, prepend=True)


def _together(model: nn.Module, blocks: Sequence[str], pieces: Sequence[Piece]) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters of each block that are used there alone, and each of the others by itself."""
    places: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        block = next((one for one in blocks if f"{name}.".startswith(f"{one}.")), "")
        for parameter in module.parameters(recurse=False):
            places.setdefault(parameter, set()).add(block)
    of_block: dict[str, dict[str, nn.Parameter]] = {}
    for piece in pieces:
        (block, *others) = places[piece.tensor]
        key = piece.name if others or not block else block
        of_block.setdefault(key, {})[piece.name] = piece.tensor
    yield from of_block.values()
