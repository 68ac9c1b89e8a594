"""What following a model finds out: its layers, and everything that a split of them must respect.

Nothing here is decided. Digits (`features.py`) say of every tensor what stands where; these records say which layers
made and used them, which parameters reach along them, and what sizes the model's code gave to functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from weft.parallel.tensor.discovery.features import Digit, Dim, Layout, leaves
from weft.parallel.tensor.discovery.symbolic_sizes import Check, Length

UNKNOWN = 1
"""Root of what was made by something that was not seen."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """A layer that might be split: linear, convolution or embedding."""

    name: str
    module: nn.Module
    bit: int
    """That stands for it among roots."""
    order: int = 0
    """Of its first call."""
    given: tuple[int, ...] = ()
    """What tells the tensors it is given from others, one for each call."""
    inputs: Dim = ()
    """The features that it contracts."""
    outputs: Dim = ()
    """The features that it makes."""
    rows: Dim = ()
    """What an embedding looks up."""
    is_passed: bool = False
    """A convolution by groups that is given the groups of another layer."""
    is_given_ids: bool = False
    """An embedding that looks up what the model itself is given."""
    names: dict[str, str] = field(default_factory=dict)
    """First names of its parameters in the model."""
    tied: tuple[str, ...] = ()
    """Layers that have the same weight, this one among them."""
    refused: str | None = None
    """Why it cannot be split whatever else."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A parameter or buffer that is no layer's."""

    name: str
    layout: Layout
    bit: int
    """That stands for it among roots; 0: a buffer, which does not learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A tensor that learns, as operand of a function that made something."""

    roots: int
    carried: Layout
    made: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A tensor that learns, where it was followed to: a layer, the model's output, a function nobody knows."""

    roots: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSize:
    """A size that the code gave to a function, and what it is the size of."""

    place: tuple[int | str, ...]
    value: int
    """As it was given: perhaps a `Length`."""
    dims: tuple[Dim, ...]
    """The sum of these."""


@dataclass(slots=True, kw_only=True)
class NotedCall:
    """A call of a function that takes sizes."""

    function: str
    sizes: list[GivenSize] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Record:
    """All of it."""

    modules: dict[str, nn.Module]
    layers: dict[str, Layer] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    """Of all tensors in which two things might be shared out at once."""
    uses: list[Use] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    calls: dict[str, list[list[NotedCall]]] = field(default_factory=dict)
    """Of each module, in each of its forward passes."""
    output: Layout | None = None
    """Of what the model returns, if that is one tensor."""


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
