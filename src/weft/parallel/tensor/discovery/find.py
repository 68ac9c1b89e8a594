"""Discovery: how an ordinary model splits over the tensor axis, found from the dataflow of its features.

A model is followed once (`trace.py`). Digits of features that reach other layers unmixed can be split; each set of
digits that must be split together is a candidate (`candidates.py`), and among candidates in conflict those that split
most parameters are taken (`packing.py`). Only correctness is decided here, not whether a split pays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.blueprint import find_blueprint
from weft.parallel.tensor.discovery.candidates import Candidate, CandidateMaker
from weft.parallel.tensor.discovery.choice import Choice, Refusal
from weft.parallel.tensor.discovery.features import Digit, Dim, digits, leaves
from weft.parallel.tensor.discovery.follow import follow
from weft.parallel.tensor.discovery.packing import take_best
from weft.parallel.tensor.discovery.records import RecordIndex
from weft.plan.partition.tensor import Count, Cut, Region, Section, region_problems

MAX_CHOICES = 32
"""Most ways to split the parts of a fused layer that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The regions of a model, and why its other layers stay whole."""

    regions: tuple[Region, ...]
    reasons: dict[str, str]
    """Reasons by name of the layers that stay whole."""


def find(
    model: nn.Module, call: Callable[[nn.Module], Any], *, tensor: int, whole_between: Collection[str] = ()
) -> Found:
    """Find the regions of a model for `tensor` ranks. `call` calls a model with an example.

    `whole_between`: modules whose inputs and outputs must be whole, such as stages of a pipeline.
    """
    record = follow(model, call, whole_between=whole_between)
    index = RecordIndex(record, tensor)
    reasons: dict[str, str] = {}
    nearly: set[str] = set()  # layers with an unmixed digit that cannot be split for another reason
    candidates: dict[frozenset[Digit], Candidate] = {}
    layers = sorted((layer for layer in record.layers.values() if layer.called_with), key=lambda layer: layer.order)
    for layer in layers:
        for digit in dict.fromkeys(leaves(layer.outputs)):
            if any(digit in known for known in candidates):
                continue
            try:
                made = _candidate(index, digit)
                candidates[made.digits] = made
            except Refusal as refusal:
                if layer.name not in reasons or (digit.reason is None and layer.name not in nearly):
                    reasons[layer.name] = f"{_described(layer.outputs, digit)} {refusal}"
                if digit.reason is None:
                    nearly.add(layer.name)
    reasons |= {
        name: f"its weight is that of {' and '.join(record.layers[name].tied)}, which cannot be split the same way"
        for candidate in candidates.values()
        for name in candidate.layers
        if record.layers[name].tied
    }
    everything = [one for one in candidates.values() if not any(record.layers[name].tied for name in one.layers)]
    everything += _vocabularies(index, list(candidates.values()))
    blocks = [name for name in find_blueprint(model).blocks if list(model.get_submodule(name).children())]
    taken = take_best(everything, record.layouts, blocks)
    split = {name for candidate in taken for name in candidate.layers}
    possible = {name for candidate in everything for name in candidate.layers}
    whole = {
        layer.name: "other splits of the layers around it split more parameters"
        if layer.name in possible
        else reasons.get(layer.name, "no reason was recorded")
        for layer in layers
        if layer.name not in split
    }
    regions = [region for candidate in sorted(taken, key=lambda one: one.order) for region in candidate.regions]
    return Found(regions=tuple(regions), reasons=whole)


def _described(dim: Dim, digit: Digit) -> str:
    sizes = [one.size for one in digits(dim)]
    if sizes == [digit.size]:
        return f"its {digit.size} features:"
    return f"the {digit.size} of its {' · '.join(map(str, sizes))} features:"


def _candidate(index: RecordIndex, digit: Digit) -> Candidate:
    """The best candidate that splits a digit; raises Refusal if there is none."""
    if digit.reason is not None:
        raise Refusal(digit.reason)
    if digit.size < index.tensor:
        return _further(index, digit)
    found: list[Candidate] = []
    refusals: list[Refusal] = []
    for chosen in itertools.islice(_choices(index, frozenset({digit}), frozenset()), MAX_CHOICES):
        try:
            found.append(CandidateMaker(index, Choice(chosen=chosen)).make())
        except Refusal as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return max(found, key=lambda candidate: candidate.num_parameters)


def _choices(index: RecordIndex, chosen: frozenset[Digit], left: frozenset[Digit]) -> Iterator[frozenset[Digit]]:
    """Ways to split one digit, or none, in each part of fused layers; parts `left` stay whole."""
    part = next((part for part in _parts(index, chosen) if part not in left), None)
    if part is None:
        yield chosen
        return
    for leaf in leaves((part,)):
        if leaf.reason is None and leaf.size >= index.tensor:
            yield from _choices(index, chosen | {leaf}, left)
    yield from _choices(index, chosen, left | {part})


def _parts(index: RecordIndex, chosen: frozenset[Digit]) -> Iterator[Digit]:
    """Parts in which nothing is chosen, of digits in whose other parts something is."""
    for layer in (layer for digit in chosen for layer in index.columns[digit]):
        waiting = list(digits(layer.outputs))
        while waiting:
            digit = waiting.pop(0)
            if any(leaf in chosen for leaf in leaves((digit,))):
                waiting += [inner for part in digit.parts for inner in digits((part,))]
                yield from (part.representative for part in digit.parts if chosen.isdisjoint(leaves((part,))))


def _further(index: RecordIndex, outer: Digit) -> Candidate:
    """Split the digit inside one that is too small as well; ranks replicate tensors that have only the outer one."""
    for layer in index.columns[outer]:
        for one, other in itertools.pairwise(digits(layer.outputs)):
            is_free = other.reason is None and not other.parts
            if one is outer and is_free and one.size * other.size >= index.tensor:
                return CandidateMaker(index, Choice(chosen=frozenset({outer}), outer=outer, within=other)).make()
    raise Refusal(f"{outer.size} are too few for {index.tensor} ranks")


def _vocabularies(index: RecordIndex, candidates: list[Candidate]) -> list[Candidate]:
    """Embeddings split by rows, together with the layers tied to them."""
    found: list[Candidate] = []
    layers = index.record.layers
    done: set[str] = set()
    for layer in layers.values():
        if not layer.takes_model_input or layer.name in done:
            continue
        group = layer.tied or (layer.name,)
        done |= set(group)
        members = [layers[name] for name in group]
        heads = [one for one in candidates if one.layers <= set(group) and one.regions[0].is_output]
        num_rows, width = layer.module._parameters["weight"].shape  # type: ignore[union-attr]
        is_worth_it = num_rows >= width or bool(heads)
        fits = all(one.takes_model_input or any(one.name in head.layers for head in heads) for one in members)
        is_counted = any(index.checks[digit] or index.modules[digit] for digit in leaves(layer.rows))
        if not (is_worth_it and fits) or is_counted or any(one.refused for one in members):
            continue
        regions = [
            Region(
                rows=(one.name,),
                cuts=(Cut(name=one.names["weight"], dim=0, sections=(Section(num_units=num_rows),)),),
                counts=(Count(module=one.name, attribute="num_embeddings", num_units=num_rows),),
            )
            for one in members
            if one.takes_model_input
        ]
        if region_problems(regions[0], index.tensor):
            continue
        regions += [region for head in heads for region in head.regions]
        found.append(
            Candidate(
                regions=tuple(regions),
                layers=frozenset(group),
                names=frozenset(cut.name for region in regions for cut in region.cuts),
                digits=frozenset(digit for head in heads for digit in head.digits),
                num_parameters=num_rows * width,
                order=layer.order,
            )
        )
    return found
