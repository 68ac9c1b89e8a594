"""Stages one after the other in one process: what they hand on makes the model's own output, wherever it is cut."""

from __future__ import annotations

import copy
import functools
from itertools import combinations
from typing import Any

import pytest
import torch
from pipelines import HIDDEN, Stack
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.errors import ModelError
from weft.parallel.pipeline.cut_model import CutModel, cut, outline
from weft.parallel.tracing.dataflow import Value
from weft.parallel.tracing.placeholder import Placeholder
from weft.plan.plan import Axes, Plan


class Everything(Stack):
    """A skip, an in-place write, a parameter of its own, a unit used by hand and one used on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.shared = nn.Parameter(torch.randn(HIDDEN)), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = self.shared(block(x + self.shift))
            x *= 2.0
        first += 1.0
        return self.head(x + first) + (x @ self.stem.weight)[:, :5]


def cut_for(model: nn.Module, cuts: tuple[int, ...], inputs: Any, rank: int) -> CutModel:
    plan = Plan(axes=Axes(pipeline=len(cuts) + 1))
    whole = outline(
        copy.deepcopy(model), find_blueprint(model), plan, inputs, call=lambda m, x: m(x), device=torch.device("cpu")
    )
    made = cut(whole, cuts, rank=rank, num_ranks=len(cuts) + 1)
    made.wrap_units()
    return made


def through_all(model: nn.Module, cuts: tuple[int, ...], inputs: Tensor) -> tuple[Tensor, list[CutModel]]:
    parts = [cut_for(model, cuts, inputs, rank) for rank in range(len(cuts) + 1)]
    known: dict[Value, Tensor] = {}
    output: Any = None
    for stage, part in enumerate(parts):
        stages = part.stages_for(inputs)
        received = {value: known[value] for value in stages.boundaries[stage - 1]} if stage else {}
        call = functools.partial(part.model, inputs)
        made, output = part.runner.run(stage, call, stages=stages, received=received)
        known |= made
    return output, parts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cuts", [cuts for num in (1, 2, 3) for cuts in combinations((1, 2, 3), num)])
def test_stages_one_after_the_other_are_the_model(cuts: tuple[int, ...]) -> None:
    model, inputs = Everything(), torch.randn(3, HIDDEN)
    output, parts = through_all(model, cuts, inputs)
    torch.testing.assert_close(output, model(inputs))
    names = [{name for name, _ in part.model.named_parameters()} for part in parts]
    assert set().union(*names) == {name for name, _ in model.named_parameters()}
    held_twice = {name for one, other in combinations(names, 2) for name in one & other}
    assert held_twice == {"shift", "shared.weight", "shared.bias", "stem.weight"} == set(parts[0].holders)
    for rank, part in enumerate(parts):
        assert all(rank in part.holders.get(name, (rank,)) for name in names[rank])


def test_gradients_flow_through_what_is_written_into() -> None:
    model, inputs = Everything(), torch.randn(3, HIDDEN)
    output, parts = through_all(model, (2,), inputs)
    output.sum().backward()
    model(inputs).sum().backward()
    for name in ("blocks.0.up.weight", "stem.bias"):
        found = parts[0].model.get_parameter(name).grad
        torch.testing.assert_close(found, model.get_parameter(name).grad)


def test_units_of_other_stages_show_their_attributes_and_cannot_be_called() -> None:
    part = cut_for(Stack(), (2,), torch.randn(2, HIDDEN), rank=1)
    assert isinstance(part.model.stem.weight, Placeholder)
    assert part.model.stem.out_features == HIDDEN and len(part.model.blocks) == 4
    with pytest.raises(ModelError, match='this rank does not hold "stem"'):
        part.model(torch.randn(2, HIDDEN))
    with pytest.raises(AttributeError):
        _ = part.model.stem.nothing


class Moody(Stack):
    """Takes a way that depends on the values of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        happy = bool((x > 0).all())
        x = self.stem(x)
        for block in self.blocks if happy else self.blocks[:3]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("first", "then", "reason"), [(1.0, -1.0, "did not call"), (-1.0, 1.0, '"blocks.3" 1 times')])
def test_another_way_for_the_same_shapes_is_refused(first: float, then: float, reason: str) -> None:
    inputs = torch.full((2, HIDDEN), first)
    part = cut_for(Moody(), (1,), inputs, rank=1)
    stages = part.stages_for(inputs)
    received = {value: torch.zeros(2, HIDDEN) for value in stages.boundaries[0]}
    with pytest.raises(ModelError, match=reason):
        part.runner.run(1, lambda: part.model(torch.full((2, HIDDEN), then)), stages=stages, received=received)
