"""The numbers in a model's attributes and code that a region changes, and how they scale on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from weft.parallel.tensor.discovery.choice import Choice, Refusal
from weft.parallel.tensor.discovery.features import Dim, length
from weft.parallel.tensor.discovery.records import Layer, RecordedCall, RecordIndex, StateTensor
from weft.parallel.tensor.discovery.symbolic_sizes import Compute, Local, local_value, plain
from weft.plan.partition.tensor import Count, Range, Region, Resized, Size, SizedCall, region_shares, share_of

_ESSENTIAL = ("num_groups", "groups", "nf")
"""Attributes that code computes with; others are informative."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Number of a rank's units, given the number of all."""

    shared: Range
    out_of: int

    def __call__(self, num_units: int) -> int:
        return len(range(*share_of(num_units, self.shared, self.out_of)))


class Sizes:
    """The numbers that change if a choice of digits is split."""

    def __init__(self, index: RecordIndex, choice: Choice, region: Region) -> None:
        self.index, self.choice = index, choice
        each, out_of = region_shares(region, index.tensor)
        self.numbers = {section.num_units for cut in region.cuts for section in cut.sections}
        self.units = [Lengths(share, out_of) for share in each]
        self.locals = [choice.local(units) for units in self.units]

    def check(self) -> None:
        """Refuse code whose results from sizes differ between ranks."""
        for number in {n for digit in self.choice.everything for n in self.index.checks[digit]}:
            check = self.index.record.checks[number]
            if any(_computed(check.compute, local) != check.expected for local in self.locals):
                raise Refusal(f'the code of "{check.module}" relies on their number')

    def counts(
        self, columns: Iterable[Layer], rows: Iterable[Layer], state: Iterable[StateTensor]
    ) -> tuple[Count, ...]:
        """Attributes of layers and norms that count split features."""
        counted: list[tuple[str, str, Dim]] = []
        for layer in columns:
            is_grouped = isinstance(layer.module, _ConvNd) and layer.module.groups > 1
            names = ("out_features", "out_channels", "nf", "embedding_dim", *(("groups", "in_channels") * is_grouped))
            counted += [(layer.name, name, layer.outputs) for name in names]
        for layer in rows:
            counted += [(layer.name, name, layer.inputs) for name in ("in_features", "in_channels", "nx")]
        for one in state:
            owner = one.name.rpartition(".")[0]
            if isinstance(self.index.record.modules[owner], _NormBase | nn.GroupNorm | nn.PReLU):
                names = ("num_features", "num_groups", "num_channels", "num_parameters")
                counted += [(owner, name, one.layout[0]) for name in names]
        found: dict[tuple[str, str], Count] = {}
        for owner, name, dim in counted:
            value = plain(getattr(self.index.record.modules[owner], name, None))
            count = self._count(owner, name, value, dim) if isinstance(value, int) else None
            if count is not None:
                found[owner, name] = count
        return tuple(found.values())

    def _count(self, module: str, attribute: str, value: int, dim: Dim) -> Count | None:
        """A number that scales as a dim does."""
        given = [value * length(dim)] * len(self.locals)
        needed = [local(dim) * value for local in self.locals]
        units = self._matching_units(value, given, needed)
        if units is None and attribute in _ESSENTIAL:
            raise Refusal(f'they change "{module}.{attribute}" in no proportion')
        if units is None or units == (1, 1):
            return None
        return Count(module=module, attribute=attribute, num_units=units[0], per_units=units[1])

    def resized(self) -> tuple[Resized, ...]:
        found = []
        for module in sorted({name for digit in self.choice.everything for name in self.index.modules[digit]}):
            passes = [tuple(self._call(call, module) for call in calls) for calls in self.index.record.calls[module]]
            if any(call.sizes for calls in passes for call in calls):
                if any(calls != passes[0] for calls in passes):
                    raise Refusal(f'the code of "{module}" passes their number differently from call to call')
                found.append(Resized(module=module, calls=passes[0]))
        return tuple(found)

    def _call(self, call: RecordedCall, module: str) -> SizedCall:
        sizes = []
        for size in call.sizes:
            given = [local_value(size.value, local) for local in self.locals]
            needed = [sum(local(dim) for dim in size.dims) for local in self.locals]
            units = self._matching_units(plain(size.value), given, needed)
            if units is None:
                raise Refusal(
                    f'the code of "{module}" passes {call.function} a number that is in no proportion to them'
                )
            if units != (1, 1):
                sizes.append(Size(place=size.place, num_units=units[0], per_units=units[1]))
        return SizedCall(function=call.function, sizes=tuple(sizes))

    def _matching_units(self, value: int, given: Sequence[int], needed: Sequence[int]) -> tuple[int, int] | None:
        """Units, and units per which they are counted, that scale what each rank is given to what it needs.

        (1, 1) if nothing changes; None if no units explain it.
        """
        if list(given) == list(needed):
            return 1, 1
        known = sorted(self.numbers, key=lambda number: (value % number != 0, -number))
        for per in (1, *known):
            for number in known:
                if all(
                    one * units(number) * per == other * number * units(per)
                    for one, other, units in zip(given, needed, self.units, strict=True)
                ):
                    return number, per
        return None


def _computed(compute: Compute, local: Local) -> Any:
    try:
        return compute(local)
    except ArithmeticError as error:
        return error
