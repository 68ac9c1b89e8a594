"""Everything that following a model records: its layers, and the constraints on splitting them.

Nothing is decided here. Digits (`features.py`) track the features in every tensor; these records say which layers made
and used them, which other parameters have them, and which sizes the model's code passed to functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from weft.parallel.tensor.discovery.features import Digit, Dim, Layout, leaves
from weft.parallel.tensor.discovery.symbolic_sizes import Check, SymbolicInt

UNKNOWN = 1
"""The source of tensors made by code that was not seen. Sources are sets of bits, one per layer and parameter."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """A layer that might be split: linear, convolution or embedding."""

    name: str
    module: nn.Module
    bit: int
    """Its bit in sets of sources."""
    order: int = 0
    """Position of its first call; 0 if it was not called."""
    called_with: tuple[int, ...] = ()
    """Ids of its input tensors, one per call."""
    inputs: Dim = ()
    """The features that it contracts."""
    outputs: Dim = ()
    """The features that it makes."""
    rows: Dim = ()
    """The rows of an embedding."""
    keeps_groups: bool = False
    """True if it is a grouped convolution on the groups of another layer."""
    takes_model_input: bool = False
    """True if it is an embedding of the model's own inputs."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of its parameters in the model."""
    tied: tuple[str, ...] = ()
    """Layers with the same weight, including this one."""
    refused: str | None = None
    """The reason why it can never be split."""


@dataclass(slots=True, kw_only=True)
class StateTensor:
    """A parameter or buffer; the dims of a layer's own weight and bias are blocked here."""

    name: str
    layout: Layout
    bit: int
    """Its bit in sets of sources; 0 for a buffer, which gets no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A tensor with a gradient, where it is used."""

    sources: int
    layout: Layout
    made: tuple[Layout, ...] = ()
    """Layouts of a function's results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSize:
    """A size that the code passed to a function."""

    place: tuple[int | str, ...]
    value: int
    """The value passed, perhaps a `SymbolicInt`."""
    dims: tuple[Dim, ...]
    """The dims of whose lengths it is the sum."""


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """A call of a function that takes sizes."""

    function: str
    sizes: list[GivenSize] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Record:
    """All that was recorded."""

    modules: dict[str, nn.Module]
    layers: dict[str, Layer] = field(default_factory=dict)
    state: list[StateTensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    """Layouts of all tensors with more than one splittable digit."""
    uses: list[Use] = field(default_factory=list)
    """Operands of functions."""
    ends: list[Use] = field(default_factory=list)
    """Tensors that are not followed further: inputs of layers, outputs of the model, operands of unknown functions."""
    checks: list[Check] = field(default_factory=list)
    calls: dict[str, list[list[RecordedCall]]] = field(default_factory=dict)
    """Calls per module and forward pass of it."""
    output: Layout | None = None
    """Layout of the model's output, if that is one tensor."""


T = TypeVar("T")


class RecordIndex:
    """A record's entries by the splittable digits in them. Uses, layouts and checks are indices into its lists."""

    def __init__(self, record: Record, tensor: int) -> None:
        self.record = record
        self.tensor = tensor
        layers = record.layers.values()
        self.columns = _index((layer, (layer.outputs,)) for layer in layers)
        self.rows = _index((layer, (layer.inputs,)) for layer in layers)
        self.state = _index((state, state.layout) for state in record.state)
        self.uses = _index((n, (dim for layout in use.made for dim in layout)) for n, use in enumerate(record.uses))
        self.layouts = _index(enumerate(record.layouts))
        self.checks = _index((number, check.dims) for number, check in enumerate(record.checks))
        self.modules: dict[Digit, set[str]] = defaultdict(set)
        """Modules whose code passes sizes that depend on a digit."""
        for module, passes in record.calls.items():
            for size in (size for calls in passes for call in calls for size in call.sizes):
                symbolic = size.value.dims if isinstance(size.value, SymbolicInt) else ()
                for leaf in (leaf for dim in (*symbolic, *size.dims) for leaf in leaves(dim)):
                    self.modules[leaf].add(module)


def _index(entries: Iterable[tuple[T, Iterable[Dim]]]) -> dict[Digit, list[T]]:
    index: dict[Digit, list[T]] = defaultdict(list)
    for entry, dims in entries:
        for leaf in {leaf for dim in dims for leaf in leaves(dim) if leaf.reason is None}:
            index[leaf].append(entry)
    return index
