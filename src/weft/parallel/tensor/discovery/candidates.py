"""The region that splits some digits, or the reason why there is none.

It must respect everything that was recorded: layers at both ends, other parameters with these digits, whole tensors
combined with shards, sizes in the model's code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from weft.parallel.tensor.discovery.choice import Choice, Refusal
from weft.parallel.tensor.discovery.features import Digit, digits, length
from weft.parallel.tensor.discovery.layer_rules import is_transposed
from weft.parallel.tensor.discovery.records import UNKNOWN, Layer, RecordIndex
from weft.parallel.tensor.discovery.region_sizes import Sizes
from weft.plan.partition.tensor import Cut, Region, Section, entries, region_problems, region_shares


@dataclass(slots=True, kw_only=True, eq=False)
class Candidate:
    """A way to split some layers."""

    regions: tuple[Region, ...]
    layers: frozenset[str]
    """Layers that it splits or whose gradients it sums."""
    names: frozenset[str]
    """Parameters and buffers that it cuts or whose gradients it sums."""
    digits: frozenset[Digit]
    num_parameters: int
    """Number of parameters that are split over ranks."""
    order: int


class CandidateMaker:
    """Builds the candidate that splits a choice of digits."""

    def __init__(self, index: RecordIndex, choice: Choice) -> None:
        self.index = index
        self.choice = choice
        self.columns = self._layers(index.columns)
        self.rows = self._layers(index.rows)
        self.state = {state.name: state for digit in choice.everything for state in index.state[digit]}
        self.partial: set[str] = set()
        self.is_output = False

    def _layers(self, index: dict[Digit, list[Layer]]) -> dict[str, Layer]:
        found = {layer.name: layer for digit in self.choice.everything for layer in index[digit]}
        return dict(sorted(found.items(), key=lambda item: item[1].order))

    def make(self) -> Candidate:
        """Raises Refusal if the choice cannot be split."""
        record = self.index.record
        self._check_digits()
        self._check_ends()
        for number in {n for digit in self.choice.everything for n in self.index.layouts[digit]}:
            self.choice.check(record.layouts[number])
        self._add_whole_operands()
        cuts = self._cuts()
        region = Region(
            columns=self._column_groups(),
            rows=tuple(self.rows),
            cuts=tuple(cuts.values()),
            partial=tuple(sorted(self.partial)),
            is_output=self.is_output,
        )
        problems = region_problems(region, self.index.tensor)
        if problems:
            raise Refusal(f"they cannot be split: {problems[0]}")
        self._check_rows(region)
        sizes = Sizes(self.index, self.choice, region)
        sizes.check()
        counts = sizes.counts(self.columns.values(), self.rows.values(), self.state.values())
        region = replace(region, counts=counts, resized=sizes.resized())
        if self.is_output and (self.state or self.partial or len(self.columns) > 1 or region.resized):
            # The whole output is gathered right behind the layer.
            raise Refusal("they are returned by the model after work on shards")
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
                raise Refusal(f'they enter or leave "{layer.name}", which cannot be split: {layer.refused}')
            if layer.tied and not (layer.name in self.columns and self._is_returned()):
                raise Refusal(f'they enter or leave "{layer.name}", whose weight is that of {" and ".join(layer.tied)}')
        both = [name for name in self.columns if name in self.rows]
        if both:
            raise Refusal(f'they both enter and leave "{both[0]}"')

    def _is_returned(self) -> bool:
        output = self.index.record.output
        return output is not None and any(self.choice.is_in(dim) for dim in output)

    def _check_ends(self) -> None:
        if self._is_returned():
            assert self.index.record.output is not None
            *others, last = self.index.record.output
            is_last = len(digits(last)) == 1 and digits(last)[0] in self.choice.chosen
            if self.rows or len(self.columns) != 1 or not is_last or any(self.choice.is_in(dim) for dim in others):
                raise Refusal("they are returned by the model, not as its last dim, or not there alone")
            (layer,) = self.columns.values()
            if not isinstance(layer.module, nn.Linear) or digits(layer.outputs) != digits(last):
                raise Refusal("they are returned by the model after further work")
            num_outputs, num_inputs = layer.module.weight.shape
            if num_outputs < num_inputs and not layer.tied:
                raise Refusal(f"they are returned by the model, and {num_outputs} features are too few to be worth it")
            self.is_output = True
        elif not self.rows:
            raise Refusal("no layer sums them up")

    def _add_whole_operands(self) -> None:
        """Whole tensors combined with shards: their gradients must be summed, and they may be used nowhere else."""
        record, choice = self.index.record, self.choice
        sources = 0
        for number in {n for digit in choice.everything for n in self.index.uses[digit]}:
            use = record.uses[number]
            if choice.found_in(use.made) - choice.found_in((use.layout,)):
                sources |= use.sources
        if sources & UNKNOWN:
            raise Refusal("they are combined with a whole tensor of unknown origin")
        self.partial |= {one.name for one in record.state if one.bit & sources and one.name not in self.state}
        for layer in record.layers.values():
            if layer.bit & sources and layer.name not in self.columns:
                if layer.refused or layer.tied or layer.name in self.rows or isinstance(layer.module, nn.Embedding):
                    raise Refusal(f'they are combined with the whole output of "{layer.name}", which needs gradients')
                self.columns[layer.name] = layer
        for layer in (*self.columns.values(), *self.rows.values()):
            if any(name in self.partial for name in layer.names.values()):
                raise Refusal(f'they are made by "{layer.name}", which is used on shards')
            sources |= layer.bit if layer.name in self.columns else 0
        for end in record.ends:
            if end.sources & sources and not choice.found_in((end.layout,)):
                names = [n for n in self.columns if end.sources & record.layers[n].bit] or sorted(self.partial)
                raise Refusal(f'they are combined with "{names[0]}", which is also needed whole')

    def _check_rows(self, region: Region) -> None:
        """Refuse to sum features of which several ranks have the same."""
        each, out_of = region_shares(region, self.index.tensor)
        weights = {layer.names["weight"] for layer in self.rows.values()}
        for cut in region.cuts:
            num_held = sum(stop - start for share in each for start, stop in entries(cut, share, out_of))
            if cut.name in weights and num_held != sum(section.length for section in cut.sections):
                raise Refusal(f'they enter "{cut.name}" with parts that several ranks would have')

    def _cuts(self) -> dict[str, Cut]:
        cuts: dict[str, Cut] = {}
        for layer in self.columns.values():
            sections = self.choice.sections(layer.outputs) or (Section(num_units=1, unit=length(layer.outputs)),)
            is_second = is_transposed(layer.module) or isinstance(layer.module, nn.Embedding)
            for name, dim in (("weight", 1 if is_second else 0), ("bias", 0)):
                if name in layer.names:
                    cuts[layer.names[name]] = Cut(name=layer.names[name], dim=dim, sections=sections)
        for layer in self.rows.values():
            name = layer.names["weight"]
            contracted = self.choice.sections(layer.inputs)
            assert contracted is not None
            cuts[name] = Cut(name=name, dim=0 if is_transposed(layer.module) else 1, sections=contracted)
        for name, state in self.state.items():
            found = [(dim, self.choice.sections(each)) for dim, each in enumerate(state.layout)]
            cut_dims = [(dim, sections) for dim, sections in found if sections is not None]
            if len(cut_dims) != 1:
                raise Refusal(f'they are in two dims of "{name}"')
            cuts[name] = Cut(name=name, dim=cut_dims[0][0], sections=cut_dims[0][1])
        return cuts

    def _column_groups(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[tuple[int, ...], list[str]] = {}
        for layer in self.columns.values():
            if not layer.keeps_groups:
                groups.setdefault(layer.called_with, []).append(layer.name)
        return tuple(tuple(names) for names in groups.values())

    def _num_parameters(self, cuts: dict[str, Cut]) -> int:
        """Parameters that are split, not replicated."""
        total = 0
        for layer in (*self.columns.values(), *self.rows.values()):
            for name, parameter in layer.module.named_parameters(recurse=False):
                cut = cuts.get(layer.names[name])
                if cut is not None:
                    num_split = sum(one.length for one in cut.sections if one.num_units >= self.index.tensor)
                    total += parameter.numel() // parameter.shape[cut.dim] * num_split
        return total
