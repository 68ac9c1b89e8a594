"""From digits that are to be shared out to the region that follows, or the reason why there is none.

Everything that was noted when the model was followed has a say: layers at both ends, parameters that reach along the
digits, whole tensors used on shares, sizes in the model's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from weft.parallel.tensor.discovery.choice import Choice, Refusal
from weft.parallel.tensor.discovery.features import Digit, digits, length
from weft.parallel.tensor.discovery.layer_rules import is_transposed
from weft.parallel.tensor.discovery.records import UNKNOWN, Facts, Layer
from weft.parallel.tensor.discovery.region_sizes import Sizes
from weft.plan.partition.tensor import Cut, Region, Section, entries, region_problems, region_shares


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


def make_candidate(facts: Facts, choice: Choice) -> Candidate:
    """The region in which these digits are shared out; a Refusal if it cannot be."""
    return _Maker(facts, choice).make()


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
            raise Refusal(f"they cannot be split: {problems[0]}")
        self._check_rows(region)
        sizes = Sizes(self.facts, self.choice, region)
        sizes.check()
        counts = sizes.counts(self.columns.values(), self.rows.values(), self.held.values())
        region = replace(region, counts=counts, resized=sizes.resized())
        if self.is_output and (self.held or self.partial or len(self.columns) > 1 or region.resized):
            # Whoever needs the whole output puts it together right behind the layer.
            raise Refusal("they are returned by the model after work that would have to know of the shares")
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
                raise Refusal(f'they come to "{layer.name}", which cannot be split: {layer.refused}')
            if layer.tied and not (layer.name in self.columns and self._is_returned()):
                raise Refusal(f'they come to "{layer.name}", whose weight is that of {" and ".join(layer.tied)}')
        both = [name for name in self.columns if name in self.rows]
        if both:
            raise Refusal(f'they both enter and leave "{both[0]}"')

    def _is_returned(self) -> bool:
        output = self.facts.record.output
        return output is not None and any(self.choice.is_in(dim) for dim in output)

    def _check_ends(self) -> None:
        if self._is_returned():
            assert self.facts.record.output is not None
            *others, last = self.facts.record.output
            is_last = len(digits(last)) == 1 and digits(last)[0] in self.choice.chosen
            if self.rows or len(self.columns) != 1 or not is_last or any(self.choice.is_in(dim) for dim in others):
                raise Refusal("they are returned by the model, not as its last dim, or not there alone")
            (layer,) = self.columns.values()
            if not isinstance(layer.module, nn.Linear) or digits(layer.outputs) != digits(last):
                raise Refusal("they are returned by the model, and not just as they were made")
            num_outputs, num_inputs = layer.module.weight.shape
            if num_outputs < num_inputs and not layer.tied:
                raise Refusal(f"they are returned by the model, and {num_outputs} features are too few to be worth it")
            self.is_output = True
        elif not self.rows:
            raise Refusal("they come to no layer that could add the shares up")

    def _add_whole_ones(self) -> None:
        """What is whole and used on shares: its gradients must be added up, and it may be used nowhere else."""
        record, choice = self.facts.record, self.choice
        roots = 0
        for number in {n for digit in choice.everything for n in self.facts.uses[digit]}:
            use = record.uses[number]
            if choice.found_in(use.made) - choice.found_in((use.carried,)):
                roots |= use.roots
        if roots & UNKNOWN:
            raise Refusal("they meet something whole that cannot be followed")
        for bit in _bits(roots):
            layer, held = self.facts.by_bit.get(bit), self.facts.held_by_bit.get(bit)
            if held is not None and held.name not in self.held:
                self.partial.add(held.name)
            if layer is not None and layer.name not in self.columns:
                if layer.refused or layer.tied or layer.name in self.rows or isinstance(layer.module, nn.Embedding):
                    raise Refusal(f'they meet what "{layer.name}" makes, which is whole and learns')
                self.columns[layer.name] = layer
        for layer in (*self.columns.values(), *self.rows.values()):
            if any(name in self.partial for name in layer.names.values()):
                raise Refusal(f'they are made by "{layer.name}", which is used on shares')
            roots |= layer.bit if layer.name in self.columns else 0
        for end in record.ends:
            if end.roots & roots and not choice.found_in((end.layout,)):
                names = [n for n in self.columns if end.roots & record.layers[n].bit] or sorted(self.partial)
                raise Refusal(f'they meet something ("{names[0]}") that is also needed whole')

    def _check_rows(self, region: Region) -> None:
        """What is added up must not be there several times."""
        each, out_of = region_shares(region, self.facts.tensor)
        weights = {layer.names["weight"] for layer in self.rows.values()}
        for cut in region.cuts:
            held = sum(stop - start for share in each for start, stop in entries(cut, share, out_of))
            if cut.name in weights and held != sum(section.length for section in cut.sections):
                raise Refusal(f'they come to "{cut.name}" with parts that several ranks would have')

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
            cuts[name] = Cut(name=name, dim=0 if is_transposed(layer.module) else 1, sections=contracted)
        for held in self.held.values():
            found = [(dim, self.choice.sections(each)) for dim, each in enumerate(held.layout)]
            cut_dims = [(dim, sections) for dim, sections in found if sections is not None]
            if len(cut_dims) != 1:
                raise Refusal(f'they meet themselves in "{held.name}"')
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


def _bits(roots: int) -> Iterable[int]:
    while roots:
        bit = roots & -roots
        yield bit
        roots ^= bit


def _output_dims(layer: Layer) -> dict[str, int]:
    """The dim of output features of each of a layer's parameters."""
    is_second = is_transposed(layer.module) or isinstance(layer.module, nn.Embedding)
    dims = {"weight": 1 if is_second else 0}
    return dims if layer.module._parameters.get("bias") is None else dims | {"bias": 0}
