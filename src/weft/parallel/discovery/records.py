"""What following a model finds out: its layers, and everything that a split of them must respect.

Nothing here is decided. Digits (`features.py`) say of every tensor what stands where; these records say which layers
made and used them, which parameters reach along them, and what sizes the model's code gave to functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from weft.parallel.discovery.features import Dim, Layout
from weft.parallel.discovery.lengths import Check

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
