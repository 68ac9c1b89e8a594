"""The assignment of a model's units to pipeline stages, from its dataflow and the blocks to cut before.

    stage 0                     stage 1                     stage 2
    embedding  block 0  block 1 | block 2  block 3          | block 4  norm  head
               └── boundary 0: all that later stages need ──┘└── boundary 1 ...

The cuts place the blocks. Any other unit goes to the first stage that has all its inputs. A value that is needed
beyond the next stage (a skip connection) travels with the activations through every stage between. A parameter that
several stages use (a tied embedding) is on each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import ModelError
from weft.parallel.tracing.dataflow import WRITTEN, Call, Flow, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages that batches of one shape pass through."""

    flow: Flow
    num_stages: int
    stage_of: Mapping[int, int]
    """Stage of each call, by the call's place in the flow."""
    calls: tuple[tuple[Call, ...], ...]
    """Calls of each stage, in order."""
    boundaries: tuple[tuple[Value, ...], ...]
    """Values sent from stage s to stage s + 1, in the order of their messages."""
    parameters: tuple[frozenset[str], ...]
    """Names of the parameters that each stage uses outside its units."""

    def differentiable(self, boundary: int) -> list[Value]:
        """Values of a boundary whose gradients are sent back."""
        return [value for value in self.boundaries[boundary] if self.flow.forms[value].requires_grad]


def stage_of_blocks(blocks: Sequence[str], cuts: Sequence[int]) -> dict[str, int]:
    """The stage of every block, given the numbers of the blocks to cut before."""
    return {name: bisect_right(cuts, number) for number, name in enumerate(blocks)}


def assign_stages(flow: Flow, block_stages: Mapping[str, int], num_stages: int) -> Stages:
    """Assign each call of a flow to a stage; a model that would send activations to an earlier stage is refused."""
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
        flow=flow,
        num_stages=num_stages,
        stage_of=stage_of,
        calls=calls,
        boundaries=boundaries,
        parameters=tuple(frozenset(found) for found in names),
    )


def _written_by_units(stage_of: Mapping[int, int], needs: Sequence[frozenset[Value]]) -> Iterator[str]:
    """Problems of in-place writes by units, which happen on one stage only; the model's own code runs on all."""
    for stage, inside in enumerate(needs):
        for value in sorted(inside):
            if value.leaf == WRITTEN:
                yield (
                    f'"{value.unit}" on stage {stage_of[value.place]} writes into its arguments, which stage {stage} '
                    "uses afterwards; let it return a new tensor, or cut so that both are on one stage"
                )


def _sharing_memory(flow: Flow, boundaries: Sequence[tuple[Value, ...]]) -> Iterator[str]:
    """Problems of values that share memory, which they no longer do once they have been sent."""
    for stage, values in enumerate(boundaries):
        by_memory: dict[int, Value] = {}
        for value in values:
            other = by_memory.setdefault(flow.written[value], value) if value in flow.written else value
            if other != value:
                yield (
                    f'the outputs of "{other.unit}" and "{value.unit}" share memory, are written into, and are both '
                    f"needed after stage {stage}; clone one of them, or cut elsewhere"
                )


def stages_of_units(stages: Stages, units: Sequence[str], block_stages: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """The stages on which each unit is called; a unit that is never called goes with the block registered before it."""
    found: dict[str, set[int]] = {unit: set() for unit in units}
    for stage, calls in enumerate(stages.calls):
        for call in calls:
            found[call.unit].add(stage)
    seen_block = -1
    for unit in units:
        seen_block = block_stages.get(unit, seen_block)
        if not found[unit]:
            found[unit].add(max(seen_block, 0))
    return {unit: frozenset(inside) for unit, inside in found.items()}
