"""Where each part of a model lives: from what flows through it and the blocks to cut before, to stages.

    stage 0                     stage 1                     stage 2
    embedding  block 0  block 1 | block 2  block 3          | block 4  norm  head
               └── boundary 0: all that later stages need ──┘└── boundary 1 ...

Blocks go where the cuts say. Any other unit goes to the first stage that has all it needs. A value that is needed
further on than on the next stage (a skip connection) travels with the activations, through every stage between. A
parameter that several stages need (a tied embedding) is on each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import ModelError
from weft.parallel.tracing.dataflow import WRITTEN, Call, Flow, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How one flow is shared out."""

    num_stages: int
    stage_of: Mapping[int, int]
    """Of every call, by its place."""
    calls: tuple[tuple[Call, ...], ...]
    """Of every stage."""
    needs: tuple[frozenset[Value], ...]
    """Of every stage: values of earlier ones that it uses."""
    boundaries: tuple[tuple[Value, ...], ...]
    """Between stage s and s + 1: what travels, in a fixed order."""
    parameters: tuple[frozenset[str], ...]
    """Of every stage: names of the parameters it uses, those of its units left out."""


def stage_of_blocks(blocks: Sequence[str], cuts: Sequence[int]) -> dict[str, int]:
    """The stage of every block, given the numbers of the blocks to cut before."""
    return {name: bisect_right(cuts, number) for number, name in enumerate(blocks)}


def share_out(flow: Flow, block_stages: Mapping[str, int], num_stages: int) -> Stages:
    """Give every call of a flow its stage; a model that would send something backwards is refused."""
    stage_of: dict[int, int] = {}
    problems: list[str] = []
    for call in flow.calls:
        after = max((stage_of[value.place] for value in call.needs), default=0)
        stage_of[call.place] = stage = block_stages.get(call.unit, after)
        if stage < after:
            later = max(call.needs, key=lambda value: stage_of[value.place]).unit
            problems.append(
                f'block "{call.unit}" is on stage {stage} and is called with what "{later}" on stage {after} made; a '
                "pipeline only goes forward: cut elsewhere, so that both are on one stage, or train without a pipeline"
            )
    last = num_stages - 1
    output_stage = max((stage_of[value.place] for value in flow.output_needs), default=-1)
    if not problems and output_stage != last:
        problems.append(
            f"the model's output is made on stage {output_stage} of {num_stages}, not on the last: blocks after it are "
            "not used by the output; cut before them, or leave them out"
        )
    if problems:
        raise ModelError(problems)
    calls = tuple(tuple(call for call in flow.calls if stage_of[call.place] == s) for s in range(num_stages))
    used: list[set[Value]] = [set().union(*(call.needs for call in inside)) for inside in calls]
    names: list[set[str]] = [set().union(*(call.parameters for call in inside)) for inside in calls]
    used[last] |= flow.output_needs
    names[last] |= flow.output_parameters
    needs = tuple(frozenset(v for v in used[s] if stage_of[v.place] < s) for s in range(num_stages))
    boundaries = tuple(
        tuple(sorted({v for t in range(s + 1, num_stages) for v in needs[t] if stage_of[v.place] <= s}))
        for s in range(last)
    )
    if problems := [*_written_by_units(stage_of, needs), *_sharing_memory(flow, boundaries)]:
        raise ModelError(problems)
    return Stages(
        num_stages=num_stages,
        stage_of=stage_of,
        calls=calls,
        needs=needs,
        boundaries=boundaries,
        parameters=tuple(frozenset(found) for found in names),
    )


def _written_by_units(stage_of: Mapping[int, int], needs: Sequence[frozenset[Value]]) -> Iterator[str]:
    """What the model's code writes happens on every stage that needs it; what a unit writes, only where it runs."""
    for stage, inside in enumerate(needs):
        for value in sorted(inside):
            if value.leaf == WRITTEN:
                yield (
                    f'"{value.unit}" on stage {stage_of[value.place]} writes into its arguments, which stage {stage} '
                    "uses afterwards; let it return a new tensor, or cut so that both are on one stage"
                )


def _sharing_memory(flow: Flow, boundaries: Sequence[tuple[Value, ...]]) -> Iterator[str]:
    """Values that share memory do so no more on the next stage: what is written into one would not be in the other."""
    for stage, values in enumerate(boundaries):
        by_memory: dict[int, Value] = {}
        for value in values:
            other = by_memory.setdefault(flow.written[value], value) if value in flow.written else value
            if other != value:
                yield (
                    f'the outputs of "{other.unit}" and "{value.unit}" share memory, are written into, and are both '
                    f"needed after stage {stage}; clone one of them, or cut elsewhere"
                )


def owners(stages: Stages, units: Sequence[str], block_stages: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """The stages each unit is on: where it is called; where it never is, with the blocks around it."""
    found: dict[str, set[int]] = {unit: set() for unit in units}
    for stage, calls in enumerate(stages.calls):
        for call in calls:
            found[call.unit].add(stage)
    seen_block = -1
    for unit in units:  # in the order of registration
        seen_block = block_stages.get(unit, seen_block)
        if not found[unit]:
            found[unit].add(max(seen_block, 0))
    return {unit: frozenset(inside) for unit, inside in found.items()}
