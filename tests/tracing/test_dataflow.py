"""The dataflow of a model: sources, writes and random numbers are seen, and the model is not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import HIDDEN, Block, Stack
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.errors import ModelError
from weft.parallel.pipeline.stages import assign_stages, stage_of_blocks, stages_of_units
from weft.parallel.tracing.dataflow import WRITTEN, Flow, Value, find_units, follow
from weft.parallel.tracing.meta_copy import make_meta_copy
from weft.parallel.tracing.placeholder import Placeholder

CPU = torch.device("cpu")


def flow_of(model: nn.Module, *inputs: Any) -> Flow:
    units = find_units(model, find_blueprint(model))
    batch = inputs or (torch.randn(2, HIDDEN),)
    return follow(make_meta_copy(model, units, CPU), units, lambda meta_copy: meta_copy(*batch), CPU)


def needs(flow: Flow, unit: str, number: int = 0) -> set[str]:
    return {value.unit for value in flow.by_name[unit, number].needs}


def test_a_chain_of_blocks_is_seen_as_one() -> None:
    flow = flow_of(Stack())
    assert [call.unit for call in flow.calls] == ["stem", *(f"blocks.{k}" for k in range(4)), "head"]
    assert [needs(flow, call.unit) for call in flow.calls] == [
        set(), {"stem"}, {"blocks.0"}, {"blocks.1"}, {"blocks.2"}, {"blocks.3"}
    ]  # fmt: skip
    assert {value.unit for value in flow.output_needs} == {"head"}
    assert not flow.is_random and not flow.written
    form = flow.forms[Value(1, "blocks.0", 0)]
    assert (form.shape, form.dtype, form.requires_grad) == ((2, HIDDEN), torch.float32, True)


class Canvas(Stack):
    """The stem's output reaches the head through views of a tensor that is written into."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        canvas = torch.zeros(x.shape[0], 3, HIDDEN)
        canvas[:, 0].copy_(first)
        one, two = canvas.unbind(1)[1:]
        one += x
        torch.mul(x, first, out=two)
        logits: Tensor = self.head(canvas.sum(1))
        return logits


def test_what_is_written_through_views_is_followed() -> None:
    flow = flow_of(Canvas())
    assert needs(flow, "head") == {"stem", "blocks.3"}
    assert not flow.written, "the canvas is no unit's output"


class Writer(Block):
    writes = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_() if self.writes else x)


def test_a_unit_that_writes_into_its_argument_is_needed_by_whoever_uses_that_later() -> None:
    class Late(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = x = self.blocks[0](self.stem(x))
            before = first * 2
            for block in self.blocks[1:]:
                x = block(x)
            logits: Tensor = self.head(x + before) + self.head(x + first)
            return logits

    model = Late()
    model.blocks = nn.ModuleList(Writer() for _ in range(4))
    model.blocks[1].writes = True
    flow = flow_of(model)
    assert needs(flow, "head") == {"blocks.0", "blocks.3"}
    assert flow.by_name["head", 1].needs - flow.by_name["head", 0].needs == {Value(2, "blocks.1", WRITTEN)}
    assert flow.written.keys() == {Value(1, "blocks.0", 0)}
    with pytest.raises(ModelError, match='"blocks.1" on stage 0 writes into its arguments, which stage 1 uses'):
        assign_stages(flow, stage_of_blocks([f"blocks.{k}" for k in range(4)], [2]), 2)


def test_the_models_own_parameters_and_units_used_by_hand_are_seen() -> None:
    class Own(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x) * self.scale
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.stem.weight)

    flow = flow_of(Own())
    assert flow.by_name["blocks.0", 0].parameters == {"scale"}
    assert flow.output_parameters == {"stem.weight"}
    block_stages = stage_of_blocks([f"blocks.{k}" for k in range(4)], [1, 3])
    stages = assign_stages(flow, block_stages, 3)
    assert stages.parameters == ({"scale"}, set(), {"stem.weight"})
    on = stages_of_units(stages, find_units(Own(), find_blueprint(Own())), block_stages)
    assert (on["stem"], on["blocks.2"], on["head"]) == ({0}, {1}, {2}), "the head is never called"


def test_following_changes_neither_model_nor_random_states_nor_buffers() -> None:
    class Counts(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = F.dropout(x, 0.5)
            for block in self.blocks:
                x = block(x + torch.rand(HIDDEN))
            logits: Tensor = self.head(x)
            return logits

    model, inputs = Counts(), torch.randn(2, HIDDEN)
    state = torch.get_rng_state()
    flow = flow_of(model, inputs)
    assert flow.is_random
    assert float(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not parameter.is_meta for parameter in model.parameters())


class Masked(Block):
    """Makes a mask without asking for a device, and keeps another that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(HIDDEN, HIDDEN), 1)
        return super().forward(x * self.kept).masked_fill(mask[0] > 0, 0.0) * torch.tensor(2.0)


def test_a_block_may_make_tensors_of_its_own() -> None:
    model = Stack()
    model.blocks = nn.ModuleList(Masked() for _ in range(2))
    assert flow_of(model).forms[Value(1, "blocks.0", 0)].shape == (2, HIDDEN)


@pytest.mark.parametrize("samples", [0, 1])
def test_batch_norms_are_followed_with_any_number_of_samples(samples: int) -> None:
    """Other data ranks may have more."""
    model = Stack(head=nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 5)))
    assert [call.unit for call in flow_of(model, torch.randn(samples, HIDDEN)).calls][-1] == "head"


def test_a_placeholder_has_everything_but_values() -> None:
    placeholder = Placeholder(torch.empty(2, 3, device="meta"), CPU)
    assert placeholder.shape == (2, 3) and placeholder.device == CPU and placeholder.dtype == torch.float32
    joined = torch.cat([placeholder, torch.ones(1, 3)])
    assert isinstance(joined, Placeholder) and joined.shape == (3, 3) and joined.device == CPU
    assert placeholder.to(device="cpu").to("cpu", torch.float64).T.shape == (3, 2)
    assert (torch.ones(3) + placeholder).sum(0).shape == (3,)
    with pytest.raises(ModelError, match="value of another stage"):
        bool(placeholder.sum() > 0)


def test_a_unit_that_returns_something_opaque_is_refused() -> None:
    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Boxed(Block):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    model = Stack()
    model.blocks = nn.ModuleList(Boxed() for _ in range(2))
    with pytest.raises(ModelError, match='"blocks.0" returns a Box, in which weft cannot see tensors'):
        flow_of(model)
