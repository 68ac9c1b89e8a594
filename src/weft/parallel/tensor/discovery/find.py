"""How an ordinary model splits over the tensor axis, found from the flow of its features.

A model is followed once, on the meta device (`trace.py`); of every layer it is then known where each digit of
its features goes, and what is done to it on the way (`features.py`). Digits that reach other layers untouched can be
shared out; each set of digits that must be shared out together is a candidate (`candidates.py`). A layer can
have one role only, so of candidates that are in each other's way those are taken that split most parameters.

    regions = discover(model, lambda twin: twin(tokens), tensor=4)
    for line in explain(model, lambda twin: twin(tokens), tensor=4): print(line)      # what stays whole, and why

Whether a split pays is not asked here, only whether it is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.blueprint import find_blueprint
from weft.parallel.tensor.discovery.candidates import Candidate, make_candidate
from weft.parallel.tensor.discovery.choice import Choice, Refusal
from weft.parallel.tensor.discovery.features import Digit, Dim, digits, leaves
from weft.parallel.tensor.discovery.follow import follow
from weft.parallel.tensor.discovery.packing import take_best
from weft.parallel.tensor.discovery.records import Facts, Layer, Record
from weft.plan.partition.tensor import Count, Cut, Region, Section, region_problems

MAX_CHOICES = 32
"""Ways to share out the parts of a fused layer that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What splits, and why the rest does not."""

    regions: tuple[Region, ...]
    reasons: dict[str, str]
    """Of layers that stay whole."""


def discover(
    model: nn.Module, call: Callable[[nn.Module], Any], *, tensor: int, whole_between: Collection[str] = ()
) -> tuple[Region, ...]:
    """What of a model can be shared out over so many ranks. `call` calls a model with an example.

    `whole_between`: names of modules that give nothing but whole tensors to others, stages of a pipeline say.
    """
    return find(model, call, tensor=tensor, whole_between=whole_between).regions


def explain(model: nn.Module, call: Callable[[nn.Module], Any], *, tensor: int) -> list[str]:
    """A line for each layer that stays whole: why."""
    return [f"{name}: {reason}" for name, reason in find(model, call, tensor=tensor).reasons.items()]


def find(
    model: nn.Module, call: Callable[[nn.Module], Any], *, tensor: int, whole_between: Collection[str] = ()
) -> Found:
    """Follow a model and choose."""
    record = follow(model, call, whole_between=whole_between)
    facts = Facts(record, tensor)
    reasons: dict[str, str] = {}
    nearly: set[str] = set()  # layers of which something is not mixed, but cannot be split for another reason
    candidates: dict[frozenset[Digit], Candidate] = {}
    layers = sorted((layer for layer in record.layers.values() if layer.given), key=lambda layer: layer.order)
    for layer in layers:
        for digit in dict.fromkeys(leaves(layer.outputs)):
            if any(digit in known for known in candidates):
                continue
            try:
                made = _candidate(facts, digit)
                candidates[made.digits] = made
            except Refusal as refusal:
                if layer.name not in reasons or (digit.reason is None and layer.name not in nearly):
                    reasons[layer.name] = f"{_described(layer.outputs, digit)} {refusal}"
                if digit.reason is None:
                    nearly.add(layer.name)
    reasons |= {
        name: f"its weight is that of {' and '.join(record.layers[name].tied)}, which cannot be split alike"
        for candidate in candidates.values()
        for name in candidate.layers
        if record.layers[name].tied
    }
    everything = [one for one in candidates.values() if not _is_tied(one, record)]
    everything += _vocabularies(facts, list(candidates.values()))
    taken = take_best(everything, record.layouts, _blocks(model))
    split = {name for candidate in taken for name in candidate.layers}
    possible = {name for candidate in everything for name in candidate.layers}
    whole = {
        layer.name: "other splits of the layers around it share out more parameters"
        if layer.name in possible
        else reasons.get(layer.name, "nothing is known against it, nor for it")
        for layer in layers
        if layer.name not in split
    }
    regions = [region for candidate in sorted(taken, key=lambda one: one.order) for region in candidate.regions]
    return Found(regions=tuple(regions), reasons=whole)


def _described(dim: Dim, digit: Digit) -> str:
    """A digit in words."""
    sizes = [one.size for one in digits(dim)]
    if sizes == [digit.size]:
        return f"its {digit.size} features:"
    return f"the {digit.size} of its {' · '.join(map(str, sizes))} features:"


def _candidate(facts: Facts, digit: Digit) -> Candidate:
    """Share out a digit, with whatever else then must be; a Refusal if that is not possible."""
    if digit.reason is not None:
        raise Refusal(digit.reason)
    if digit.size < facts.tensor:
        return _further(facts, digit)
    found: list[Candidate] = []
    refusals: list[Refusal] = []
    for chosen in itertools.islice(_choices(facts, frozenset({digit}), frozenset()), MAX_CHOICES):
        try:
            found.append(make_candidate(facts, Choice(chosen=chosen)))
        except Refusal as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return max(found, key=lambda candidate: candidate.num_parameters)


def _choices(facts: Facts, chosen: frozenset[Digit], left: frozenset[Digit]) -> Iterator[frozenset[Digit]]:
    """Ways to share out something of each part of fused layers, or nothing of it; parts `left` are decided."""
    part = next((part for part in _parts(facts, chosen) if part not in left), None)
    if part is None:
        yield chosen
        return
    for leaf in leaves((part,)):
        if leaf.reason is None and leaf.size >= facts.tensor:
            yield from _choices(facts, chosen | {leaf}, left)
    yield from _choices(facts, chosen, left | {part})


def _parts(facts: Facts, chosen: frozenset[Digit]) -> Iterator[Digit]:
    """Parts in which nothing is shared out yet, of digits in whose other parts something is."""
    for layer in (layer for digit in chosen for layer in facts.columns[digit]):
        waiting = list(digits(layer.outputs))
        while waiting:
            digit = waiting.pop(0)
            if any(leaf in chosen for leaf in leaves((digit,))):
                waiting += [inner for part in digit.parts for inner in digits((part,))]
                yield from (part.now for part in digit.parts if chosen.isdisjoint(leaves((part,))))


def _further(facts: Facts, outer: Digit) -> Candidate:
    """Too few units: share out those inside each of them too, and let ranks repeat what has only the outer ones."""
    tried = set()
    for layer in facts.columns[outer]:
        found = digits(layer.outputs)
        for one, other in zip(found, found[1:], strict=False):
            is_free = other.reason is None and not other.parts and other not in tried
            if one is outer and is_free and one.size * other.size >= facts.tensor:
                tried.add(other)
                return make_candidate(facts, Choice(chosen=frozenset({outer}), within=other, outer=outer))
    raise Refusal(f"{outer.size} are too few for {facts.tensor} ranks")


def _is_tied(candidate: Candidate, record: Record) -> bool:
    return any(record.layers[name].tied for name in candidate.layers)


def _vocabularies(facts: Facts, candidates: list[Candidate]) -> list[Candidate]:
    """Embeddings by their rows, with the layers that have the same weight."""
    found: list[Candidate] = []
    layers = facts.record.layers
    done: set[str] = set()
    for layer in layers.values():
        if not layer.is_given_ids or layer.name in done:
            continue
        group = layer.tied or (layer.name,)
        done |= set(group)
        members = [layers[name] for name in group]
        heads = [one for one in candidates if one.layers <= set(group) and one.regions[0].is_output]
        num_rows, width = layer.module.weight.shape  # type: ignore[misc]
        is_worth_it = num_rows >= width or bool(heads)
        fits = all(one.is_given_ids or any(one.name in head.layers for head in heads) for one in members)
        is_counted = any(facts.checks[digit] or facts.modules[digit] for digit in leaves(layer.rows))
        if not (is_worth_it and fits) or is_counted or any(one.refused for one in members):
            continue
        regions = [_rows_of(one) for one in members if one.is_given_ids]
        if region_problems(regions[0], facts.tensor):
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


def _rows_of(layer: Layer) -> Region:
    name = layer.names["weight"]
    num_rows = layer.module.weight.shape[0]  # type: ignore[index]
    return Region(
        rows=(layer.name,),
        cuts=(Cut(name=name, dim=0, sections=(Section(num_units=num_rows),)),),  # type: ignore[arg-type]
        counts=(Count(module=layer.name, attribute="num_embeddings", num_units=num_rows),),  # type: ignore[arg-type]
    )


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Repeated modules, each of which had better keep its splits to itself."""
    return tuple(name for name in find_blueprint(model).blocks if list(model.get_submodule(name).children()))
