"""Numbers in a model's attributes and code that a region changes: what each rank has in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from weft.parallel.tensor.discovery.choice import Choice, Refusal, matching_units
from weft.parallel.tensor.discovery.features import Dim, length
from weft.parallel.tensor.discovery.records import Facts, Held, Layer, NotedCall
from weft.parallel.tensor.discovery.symbolic_sizes import Compute, Local, local_value, plain
from weft.plan.partition.tensor import Count, Range, Region, Resized, Size, SizedCall, share_of, shares

_ESSENTIAL = ("num_groups", "groups", "nf")
"""Attributes that code computes with; others are for show."""


class Sizes:
    """What becomes of numbers if a choice is made."""

    def __init__(self, facts: Facts, choice: Choice, region: Region) -> None:
        self.facts, self.choice = facts, choice
        out_of = region.num_units(facts.tensor)
        each = shares(out_of, facts.tensor)
        self.numbers = {section.num_units for cut in region.cuts for section in cut.sections}
        self.locals = [choice.local(share, out_of) for share in each]
        self.lengths = [_units(share, out_of) for share in each]

    def check(self) -> None:
        """What the code found out about sizes must hold on all ranks."""
        for number in {n for digit in self.choice.everything for n in self.facts.checks[digit]}:
            check = self.facts.record.checks[number]
            if any(_computed(check.compute, local) != check.expected for local in self.locals):
                raise Refusal(f'the code of "{check.module}" relies on their number')

    def counts(self, columns: Iterable[Layer], rows: Iterable[Layer], held: Iterable[Held]) -> tuple[Count, ...]:
        """Attributes of layers and norms that count what is shared out."""
        counted: list[tuple[str, str, Dim]] = []
        for layer in columns:
            is_grouped = isinstance(layer.module, _ConvNd) and layer.module.groups > 1
            names = ("out_features", "out_channels", "nf", "embedding_dim", *(("groups", "in_channels") * is_grouped))
            counted += [(layer.name, name, layer.outputs) for name in names]
        for layer in rows:
            counted += [(layer.name, name, layer.inputs) for name in ("in_features", "in_channels", "nx")]
        for one in held:
            owner = one.name.rpartition(".")[0]
            if isinstance(self.facts.record.modules[owner], _NormBase | nn.GroupNorm | nn.PReLU):
                names = ("num_features", "num_groups", "num_channels", "num_parameters")
                counted += [(owner, name, one.layout[0]) for name in names]
        found: dict[tuple[str, str], Count] = {}
        for owner, name, dim in counted:
            value = plain(getattr(self.facts.record.modules[owner], name, None))
            count = self._count(owner, name, value, dim) if isinstance(value, int) else None
            if count is not None:
                found[owner, name] = count
        return tuple(found.values())

    def _count(self, module: str, attribute: str, value: int, dim: Dim) -> Count | None:
        """A number that shrinks as a dim does."""
        given = [value * length(dim)] * len(self.locals)
        needed = [local(dim) * value for local in self.locals]
        units = matching_units(value, given, needed, self.numbers, self.lengths)
        if units is None and attribute in _ESSENTIAL:
            raise Refusal(f'they change "{module}.{attribute}" in no proportion')
        if units is None or units == (1, 1):
            return None
        return Count(module=module, attribute=attribute, num_units=units[0], per_units=units[1])

    def resized(self) -> tuple[Resized, ...]:
        found = []
        for module in sorted({name for digit in self.choice.everything for name in self.facts.modules[digit]}):
            passes = [tuple(self._call(call, module) for call in calls) for calls in self.facts.record.calls[module]]
            if any(call.sizes for calls in passes for call in calls):
                if any(calls != passes[0] for calls in passes):
                    raise Refusal(f'the code of "{module}" gives their number otherwise from call to call')
                found.append(Resized(module=module, calls=passes[0]))
        return tuple(found)

    def _call(self, call: NotedCall, module: str) -> SizedCall:
        sizes = []
        for size in call.sizes:
            given = [local_value(size.value, local) for local in self.locals]
            needed = [sum(local(dim) for dim in size.dims) for local in self.locals]
            units = matching_units(plain(size.value), given, needed, self.numbers, self.lengths)
            if units is None:
                raise Refusal(f'the code of "{module}" gives {call.function} a number that is in no proportion to them')
            if units != (1, 1):
                sizes.append(Size(place=size.place, num_units=units[0], per_units=units[1]))
        return SizedCall(function=call.function, sizes=tuple(sizes))


def _computed(compute: Compute, local: Local) -> Any:
    try:
        return compute(local)
    except ArithmeticError as error:
        return error


def _units(share: Range, out_of: int) -> Callable[[int], int]:
    def units(number: int) -> int:
        start, stop = share_of(number, share, out_of)
        return stop - start

    return units
