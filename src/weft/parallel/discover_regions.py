"""From digits that are to be shared out to the region that follows, or the reason why there is none.

Everything that was noted when the model was followed has a say: layers at both ends, parameters that reach along the
digits, whole tensors used on shares, sizes in the model's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from weft.parallel.discover_choice import Choice, Refusal, matching_units
from weft.parallel.discover_lengths import local_value, plain
from weft.parallel.discover_records import Held, Layer, NotedCall, Record
from weft.parallel.discover_trace import UNKNOWN
from weft.parallel.features import Digit, Dim, digits, leaves, length
from weft.plan.splits import Count, Cut, Region, Resized, Section, Size, SizedCall, region_problems, share_of, shares

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Candidate:
    """A way to split some layers; whether it is taken depends on the others."""

    regions: tuple[Region, ...]
    layers: frozenset[str]
    """That have a role in it."""
    names: frozenset[str]
    """Of parameters and buffers that it cuts, or whose gradients it adds up."""
    digits: frozenset[Digit]
    num_parameters: int
    """That each rank has a share of."""
    order: int


class Facts:
    """What was noted, by the digits concerned."""

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
        self.held_by_bit = {held.bit: held for held in record.held}

    def region(self, choice: Choice) -> Candidate:
        """The region in which these digits are shared out; a Refusal if it cannot be."""
        return _Maker(self, choice).make()


def _dims_of(value: int, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*getattr(value, "dims", ()), *dims)


def _enter(index: dict[Digit, list[T]], dims: Iterable[Dim], what: T) -> None:
    for leaf in {leaf for dim in dims for leaf in leaves(dim) if leaf.reason is None}:
        index[leaf].append(what)


class _Maker:
    """Builds one region."""

    def __init__(self, facts: Facts, choice: Choice) -> None:
        self.facts = facts
        self.choice = choice
        self.columns = self._layers(facts.columns)
        self.rows = self._layers(facts.rows)
        self.held = {held.name: held for digit in choice.everything for held in facts.held[digit]}
        self.partial: set[str] = set()
        self.is_output = False

    def _layers(self, index: dict[Digit, list[Layer]]) -> dict[str, Layer]:
        found = {layer.name: layer for digit in self.choice.everything for layer in index[digit]}
        return dict(sorted(found.items(), key=lambda item: item[1].order))

    def make(self) -> Candidate:
        record = self.facts.record
        self._check_digits()
        self._check_ends()
        for number in {n for digit in self.choice.everything for n in self.facts.layouts[digit]}:
            self.choice.check(record.layouts[number])
        self._add_whole_ones()
        cuts = self._cuts()
        region = Region(
            columns=self._column_groups(),
            rows=tuple(self.rows),
            cuts=tuple(cuts.values()),
            partial=tuple(sorted(self.partial)),
            is_output=self.is_output,
        )
        problems = region_problems(region, self.facts.tensor)
        if problems:
            raise Refusal(f"cannot be split: {problems[0]}")
        sizes = _Sizes(self, region)
        sizes.check()
        region = Region(
            columns=region.columns,
            rows=region.rows,
            cuts=region.cuts,
            partial=region.partial,
            counts=sizes.counts(),
            resized=sizes.resized(),
            is_output=region.is_output,
        )
        layers = [*self.columns.values(), *self.rows.values()]
        partial_layers = {one.name for one in record.layers.values() if self.partial & set(one.names.values())}
        return Candidate(
            regions=(region,),
            layers=frozenset({layer.name for layer in layers} | partial_layers),
            names=frozenset({*cuts, *self.partial}),
            digits=self.choice.everything,
            num_parameters=self._num_parameters(cuts),
            order=min(layer.order for layer in layers),
        )

    def _check_digits(self) -> None:
        for digit in self.choice.everything:
            if digit.reason is not None:
                raise Refusal(digit.reason)
        for layer in (*self.columns.values(), *self.rows.values()):
            if layer.refused is not None:
                raise Refusal(f'comes to "{layer.name}", which cannot be split: {layer.refused}')
            if layer.tied and not (layer.name in self.columns and self._is_returned()):
                raise Refusal(f'comes to "{layer.name}", whose weight is that of {" and ".join(layer.tied)}')
        both = [name for name in self.columns if name in self.rows]
        if both:
            raise Refusal(f'both enters and leaves "{both[0]}"')

    def _is_returned(self) -> bool:
        output = self.facts.record.output
        return output is not None and self.choice.is_in(output)

    def _check_ends(self) -> None:
        if self._is_returned():
            output = digits(self.facts.record.output)
            if self.rows or len(self.columns) != 1 or len(output) != 1 or output[0] not in self.choice.chosen:
                raise Refusal("is returned by the model, and goes elsewhere too")
            (layer,) = self.columns.values()
            if not isinstance(layer.module, nn.Linear):
                raise Refusal("is returned by the model")
            num_outputs, num_inputs = layer.module.weight.shape
            if num_outputs < num_inputs and not layer.tied:
                raise Refusal(f"is returned by the model, and {num_outputs} features are too few to be worth it")
            self.is_output = True
        elif not self.rows:
            raise Refusal("comes to no layer that could add the shares up")

    def _add_whole_ones(self) -> None:
        """What is whole and used on shares: its gradients must be added up, and it may be used nowhere else."""
        record, choice = self.facts.record, self.choice
        roots = 0
        for number in {n for digit in choice.everything for n in self.facts.uses[digit]}:
            use = record.uses[number]
            if choice.found_in(use.made) - choice.found_in((use.carried,)):
                roots |= use.roots
        if roots & UNKNOWN:
            raise Refusal("meets something whole that cannot be followed")
        for bit in _bits(roots):
            layer, held = self.facts.by_bit.get(bit), self.facts.held_by_bit.get(bit)
            if held is not None and held.name not in self.held:
                self.partial.add(held.name)
            if layer is not None and layer.name not in self.columns:
                if layer.refused or layer.tied or layer.name in self.rows or isinstance(layer.module, nn.Embedding):
                    raise Refusal(f'meets what "{layer.name}" makes, which is whole and learns')
                self.columns[layer.name] = layer
        for layer in (*self.columns.values(), *self.rows.values()):
            if any(name in self.partial for name in layer.names.values()):
                raise Refusal(f'is made by "{layer.name}", which is used on shares')
            roots |= layer.bit if layer.name in self.columns else 0
        for end in record.ends:
            if end.roots & roots and not choice.found_in((end.layout,)):
                names = [n for n in self.columns if end.roots & record.layers[n].bit] or sorted(self.partial)
                raise Refusal(f'meets something ("{names[0]}") that is also needed whole')

    # What is cut

    def _cuts(self) -> dict[str, Cut]:
        cuts: dict[str, Cut] = {}
        for layer in self.columns.values():
            for name, dim in _output_dims(layer).items():
                sections = self.choice.sections(layer.outputs) or (Section(num_units=1, unit=length(layer.outputs)),)
                full = layer.names[name]
                cuts[full] = Cut(name=full, dim=dim, sections=sections)
        for layer in self.rows.values():
            name = layer.names["weight"]
            contracted = self.choice.sections(layer.inputs)
            assert contracted is not None
            cuts[name] = Cut(name=name, dim=0 if _is_transposed(layer.module) else 1, sections=contracted)
        for held in self.held.values():
            found = [(dim, self.choice.sections(each)) for dim, each in enumerate(held.layout)]
            cut_dims = [(dim, sections) for dim, sections in found if sections is not None]
            if len(cut_dims) != 1:
                raise Refusal(f'meets itself in "{held.name}"')
            cuts[held.name] = Cut(name=held.name, dim=cut_dims[0][0], sections=cut_dims[0][1])
        return cuts

    def _column_groups(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[tuple[int, ...], list[str]] = {}
        for layer in self.columns.values():
            if not layer.is_passed:
                groups.setdefault(layer.given, []).append(layer.name)
        return tuple(tuple(names) for names in groups.values())

    def _num_parameters(self, cuts: dict[str, Cut]) -> int:
        """That are shared out, not repeated."""
        total = 0
        for layer in (*self.columns.values(), *self.rows.values()):
            for name, full in layer.names.items():
                parameter = layer.module._parameters[name]
                if full in cuts and parameter is not None:
                    sections = cuts[full].sections
                    shared = sum(section.length for section in sections if section.num_units >= self.facts.tensor)
                    total += parameter.numel() // parameter.shape[cuts[full].dim] * shared
        return total


class _Sizes:
    """Numbers in attributes and code that a region changes."""

    def __init__(self, maker: _Maker, region: Region) -> None:
        tensor = maker.facts.tensor
        self.maker = maker
        self.facts, self.choice = maker.facts, maker.choice
        out_of = region.num_units(tensor)
        each = shares(out_of, tensor)
        self.numbers = {section.num_units for cut in region.cuts for section in cut.sections}
        self.locals = [self.choice.local(share, out_of) for share in each]
        self.lengths = [lambda number, share=share: _length(share_of(number, share, out_of)) for share in each]
        row_weights = {layer.names["weight"] for layer in maker.rows.values()}
        for cut in region.cuts:
            if cut.name in row_weights and any(s.num_units % out_of for s in cut.sections):
                raise Refusal(f'comes to "{cut.name}" with parts that several ranks would have')

    def check(self) -> None:
        """What the code found out about sizes must hold on all ranks."""
        for number in {n for digit in self.choice.everything for n in self.facts.checks[digit]}:
            check = self.facts.record.checks[number]
            if any(check.compute(local) != check.expected for local in self.locals):
                raise Refusal(f'has a size that the code of "{check.module}" relies on')

    def counts(self) -> tuple[Count, ...]:
        found: list[Count] = []
        names: dict[str, list[tuple[str, Dim]]] = {}
        for layer in self.maker.columns.values():
            groups = ["groups", "in_channels"] if isinstance(layer.module, _ConvNd) and layer.module.groups > 1 else []
            known = ("out_features", "out_channels", "nf", "embedding_dim", *groups)
            names.setdefault(layer.name, []).extend((name, layer.outputs) for name in known)
        for layer in self.maker.rows.values():
            names.setdefault(layer.name, []).extend((n, layer.inputs) for n in ("in_features", "in_channels", "nx"))
        for held in self.maker.held.values():
            owner = held.name.rpartition(".")[0]
            module = self.facts.record.modules[owner]
            if isinstance(module, _NormBase | nn.GroupNorm | nn.PReLU):
                names[owner] = [
                    (n, held.layout[0]) for n in ("num_features", "num_groups", "num_channels", "num_parameters")
                ]
        for owner, attributes in names.items():
            for attribute, dim in attributes:
                value = plain(getattr(self.facts.record.modules[owner], attribute, None))
                if isinstance(value, int):
                    found += self._count(owner, attribute, value, dim)
        return tuple(found)

    def _count(self, module: str, attribute: str, value: int, dim: Dim) -> list[Count]:
        """A number that shrinks as a dim does."""
        size = length(dim)
        given, needed = [value * size] * len(self.locals), [local(dim) * value for local in self.locals]
        units = matching_units(value, given, needed, self.numbers, self.lengths)
        if units is None:
            if attribute in ("num_groups", "groups"):
                raise Refusal(f'changes "{module}.{attribute}" in no proportion')
            return []
        return (
            [Count(module=module, attribute=attribute, num_units=units[0], per_units=units[1])] if units[0] > 1 else []
        )

    def resized(self) -> tuple[Resized, ...]:
        found = []
        for module in sorted({name for digit in self.choice.everything for name in self.facts.modules[digit]}):
            if module in self.facts.record.layers:
                continue  # whose sizes are attributes
            passes = [tuple(self._call(call, module) for call in calls) for calls in self.facts.record.calls[module]]
            if any(call.sizes for calls in passes for call in calls):
                if any(calls != passes[0] for calls in passes):
                    raise Refusal(f'has a size that the code of "{module}" gives otherwise from call to call')
                found.append(Resized(module=module, calls=passes[0]))
        return tuple(found)

    def _call(self, call: NotedCall, module: str) -> SizedCall:
        sizes = []
        for size in call.sizes:
            given = [local_value(size.value, local) for local in self.locals]
            needed = [sum(local(dim) for dim in size.dims) for local in self.locals]
            units = matching_units(plain(size.value), given, needed, self.numbers, self.lengths)
            if units is None:
                raise Refusal(f'has a size that the code of "{module}" gives to {call.function} in no proportion')
            if units != (1, 1):
                sizes.append(Size(place=size.place, num_units=units[0], per_units=units[1]))
        return SizedCall(function=call.function, sizes=tuple(sizes))


def _length(share: tuple[int, int]) -> int:
    return share[1] - share[0]


def _bits(roots: int) -> Iterable[int]:
    while roots:
        bit = roots & -roots
        yield bit
        roots ^= bit


def _is_transposed(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear | _ConvNd | nn.Embedding)


def _output_dims(layer: Layer) -> dict[str, int]:
    """The dim of output features of each of a layer's parameters."""
    is_second = _is_transposed(layer.module) or isinstance(layer.module, nn.Embedding)
    dims = {"weight": 1 if is_second else 0}
    return dims if layer.module._parameters.get("bias") is None else dims | {"bias": 0}
