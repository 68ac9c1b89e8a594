"""Before the first step, a cut model is compared with the whole one: what it finds, when it is left out, what stays."""

from __future__ import annotations

import logging
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from meshes import kept_mesh
from oracle import SGD, pipeline_plan
from pipelines import HIDDEN, Block, Stack, vector_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import ModelError
from weft.training.parallelize import parallelize
from weft.training.setup import probe_stages
from weft.training.trainer import Trainer


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as libraries write them: no graph forward, a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class CheckpointedOutside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = OwnCheckpoint.apply(block, x)
        return self.head(x)


class CheckpointedInside(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = InsideForward(block)


class InsideForward:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, x: Tensor) -> Tensor:
        return OwnCheckpoint.apply(lambda given: Block.forward(self.block, given), x)


class Reading(Block):
    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        before = self.shared.setdefault("first", x)
        return super().forward(x) + 0.1 * before


class Sharing(Stack):
    """The first block of a pass keeps its input, which later blocks add: on a later stage that is another block."""

    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Tensor] = {}
        self.shared, self.blocks = shared, nn.ModuleList(Reading(shared) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.shared.clear()
        return super().forward(x)


def train(model: nn.Module, schedule: str = "1f1b") -> Trainer:
    plan = pipeline_plan(2, schedule=schedule, microbatches=2, cuts=(2,))
    inputs, _ = vector_batch(2)
    return parallelize(model, plan, loss="cross-entropy", optimizer=SGD, example=inputs, mesh=kept_mesh(plan))


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "2bw"])
def test_a_backward_pass_outside_of_the_schedules_is_refused(schedule: str) -> None:
    with pytest.raises(
        ModelError, match=r"(?s)computes something else than the whole one.*the gradient of .* is off by"
    ):
        train(CheckpointedOutside().double(), schedule)


@ranks(2)
def test_values_that_blocks_share_across_a_cut_are_refused() -> None:
    with pytest.raises(ModelError, match="cut into the stages of .* pipeline = 2, the model computes something else"):
        train(Sharing().double())


@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_backward_pass_of_its_own_inside_a_block_trains(schedule: str) -> None:
    torch.manual_seed(2)
    whole = CheckpointedInside().double()
    torch.manual_seed(2)
    trainer = train(CheckpointedInside().double(), schedule)
    inputs, targets = vector_batch(4)
    nn.functional.cross_entropy(whole(inputs), targets).backward()
    SGD(whole.parameters()).step()
    trainer.step(inputs, targets)
    true = dict(whole.named_parameters())
    for name, parameter in trainer.named_model.named_parameters():
        torch.testing.assert_close(parameter, true[name], rtol=1e-10, atol=1e-12, msg=name)


@ranks(2)
def test_a_model_that_is_too_large_is_not_tried_and_that_is_said() -> None:
    with mock.patch.dict(probe_stages._MOST_OPERATIONS, cpu=10.0), unittest.TestCase().assertLogs("weft") as logged:
        logging.getLogger("weft").info("other ranks say nothing")
        trainer = train(CheckpointedOutside().double())
    said = [line for line in logged.output if "was not tried: one sample takes about" in line]
    assert len(said) == (trainer.mesh.world.rank == 0)


@ranks(2)
def test_the_probe_leaves_random_states_and_buffers_as_they_were() -> None:
    model = Stack().double()
    model.blocks[0] = nn.Sequential(Block(), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)).double()
    mean, state = model.blocks[0][1].running_mean, torch.get_rng_state()
    train(model)
    assert torch.equal(state, torch.get_rng_state())
    assert not mean.any()
