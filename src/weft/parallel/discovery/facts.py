"""What was noted when a model was followed, by the digits concerned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from weft.parallel.discovery.features import Digit, Dim, leaves
from weft.parallel.discovery.lengths import Length
from weft.parallel.discovery.records import Held, Layer, Record

T = TypeVar("T")


class Facts:
    """An index of a record. Lists of numbers are places in the record's."""

    def __init__(self, record: Record, tensor: int) -> None:
        self.record = record
        self.tensor = tensor
        self.columns: dict[Digit, list[Layer]] = defaultdict(list)
        self.rows: dict[Digit, list[Layer]] = defaultdict(list)
        self.held: dict[Digit, list[Held]] = defaultdict(list)
        self.modules: dict[Digit, set[str]] = defaultdict(set)
        self.uses: dict[Digit, list[int]] = defaultdict(list)
        self.layouts: dict[Digit, list[int]] = defaultdict(list)
        self.checks: dict[Digit, list[int]] = defaultdict(list)
        for layer in record.layers.values():
            _enter(self.columns, (layer.outputs,), layer)
            _enter(self.rows, (layer.inputs,), layer)
        for held in record.held:
            _enter(self.held, held.layout, held)
        for number, use in enumerate(record.uses):
            _enter(self.uses, (dim for layout in use.made for dim in layout), number)
        for number, layout in enumerate(record.layouts):
            _enter(self.layouts, layout, number)
        for number, check in enumerate(record.checks):
            _enter(self.checks, check.dims, number)
        for module, passes in record.calls.items():
            for size in (size for calls in passes for call in calls for size in call.sizes):
                for leaf in (leaf for dim in _dims_of(size.value, size.dims) for leaf in leaves(dim)):
                    self.modules[leaf].add(module)
        self.by_bit = {layer.bit: layer for layer in record.layers.values()}
        self.held_by_bit = {held.bit: held for held in record.held if held.bit}


def _dims_of(value: int, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*value.dims, *dims) if isinstance(value, Length) else dims


def _enter(index: dict[Digit, list[T]], dims: Iterable[Dim], what: T) -> None:
    for leaf in {leaf for dim in dims for leaf in leaves(dim) if leaf.reason is None}:
        index[leaf].append(what)
