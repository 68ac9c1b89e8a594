"""One call of a torch function, as seen by the rules that follow features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weft.parallel.tensor.discovery.features import Dim, Layout, block, length, unify
from weft.parallel.tensor.discovery.records import GivenSize, Layer, RecordedCall
from weft.parallel.tensor.discovery.symbolic_sizes import local_value, plain

if TYPE_CHECKING:
    from weft.parallel.tensor.discovery.trace import Tracer


@dataclass(slots=True, kw_only=True)
class Operation:
    """A function, its arguments and its result."""

    func: Callable[..., Any]
    name: str
    """Its name without underscores."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    tracer: Tracer
    layouts: dict[int, Layout]
    """Layouts of the operands, by id."""
    call: RecordedCall | None = None
    """Receives the sizes passed, if the function takes any."""
    layer: Layer | None = None
    """The layer whose own computation this is; set by rules."""
    written: Layout | None = None
    """Layout of the entries written to, if they are not returned; set by rules."""
    known: set[int] = field(default_factory=set)
    """Ids of arguments that a rule has accounted for."""

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def tensor(self, place: int, name: str) -> torch.Tensor | None:
        value = self.get(place, name)
        return value if isinstance(value, torch.Tensor) else None

    def layout(self, tensor: torch.Tensor) -> Layout:
        return self.layouts[id(tensor)]

    def operand(self, place: int) -> Layout:
        """The layout of a tensor argument; the first may be given by name."""
        return self.layouts[id(self.args[place] if place < len(self.args) else self.tensors()[place])]

    @property
    def first(self) -> Layout:
        return self.layouts[id(self.get(0, "input", self.kwargs.get("self")))]

    def tensors(self) -> list[torch.Tensor]:
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, torch.Tensor)]

    def dim(self, value: Any, num_dims: int | None = None) -> int:
        """A dim counted from the front."""
        return int(value) % (len(self.first) if num_dims is None else num_dims)

    def dims(self, value: Any) -> set[int]:
        """The dims that an argument names; None names all."""
        if value is None:
            return set(range(len(self.first)))
        return {self.dim(one) for one in (value if isinstance(value, tuple | list) else (value,))}

    def why(self, what: str) -> str:
        """A reason that names the function and the module."""
        where = f' in "{self.tracer.module}"' if self.tracer.module else ""
        return f"{self.name}{where} {what}"

    def block(self, dim: Dim, what: str = "needs all of them") -> None:
        block(dim, self.why(what))

    def unify(self, a: Dim, b: Dim) -> None:
        unify(a, b, self.why("combines them in another order"))

    def sized(self, place: tuple[int | str, ...], value: Any, dims: Sequence[Dim]) -> None:
        """The argument at a place is the sum of the lengths of some dims."""
        self.known.add(id(value))
        if self.call is not None:
            self.call.sizes.append(GivenSize(place=place, value=value, dims=tuple(dims)))
        else:
            self.tracer.note(
                tuple(dims), lambda local: local_value(value, local) == sum(local(dim) for dim in dims), True
            )

    def sized_each(self, given: Iterable[tuple[tuple[int | str, ...], Any]], dims: Iterable[Dim]) -> None:
        """Arguments with their places are the lengths of dims; -1 stands for a length that torch infers."""
        for (place, value), dim in zip(given, dims, strict=False):
            if plain(value) != -1:
                self.sized(place, value, (dim,))

    def equal(self, dims: Sequence[Dim]) -> None:
        """Dims of one length must have one length on every rank."""
        self.tracer.note(tuple(dims), lambda local: len({local(dim) for dim in dims}) == 1, True)

    def sizes(self, place: int, name: str) -> list[tuple[tuple[int | str, ...], Any]]:
        """Sizes given one by one or as a list, each with its place."""
        if name in self.kwargs:
            return [((name, index), value) for index, value in enumerate(self.kwargs[name])]
        if len(self.args) <= place:
            return []
        if isinstance(self.args[place], tuple | list):
            return [((place, index), value) for index, value in enumerate(self.args[place])]
        return [((place + index,), value) for index, value in enumerate(self.args[place:])]

    def broadcast(self, *layouts: Layout) -> Layout:
        """The layout of tensors combined entry by entry, of which some have one entry along some dims."""
        made: list[Dim] = []
        for back in range(1, max(map(len, layouts)) + 1):
            full = [layout[-back] for layout in layouts if len(layout) >= back and length(layout[-back]) > 1]
            for other in full[1:]:
                self.unify(full[0], other)
            made.append(full[0] if full else ())
        return tuple(reversed(made))
