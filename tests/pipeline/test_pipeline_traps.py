"""Things that once gave a wrong answer in a pipeline, or none: each stays a test."""

from __future__ import annotations

import pytest
import torch
from meshes import verify
from oracle import SGD, make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import DataError, ModelError


class Table(nn.Module):
    """Returns a view of its own parameter: a gradient that comes for it may become the parameter's, memory and all."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self) -> Tensor:
        return self.rows.unsqueeze(0)


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.embedding = Table(), nn.Embedding(17, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 17)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows, x = self.table(), self.embedding(tokens_BT)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x * rows)


class Counting(WithTable):
    """Its own code keeps state, outside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens_BT)


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("transport", [None, "c10d"])
def test_a_gradient_keeps_its_memory(schedule: str, transport: str | None) -> None:
    plan = pipeline_plan(4, schedule=schedule, microbatches=6, transport=transport)
    batches = [token_batch(12, seed=seed) for seed in range(3)]
    verify(WithTable(), plan, loss="cross-entropy", optimizer=SGD, batches=batches, device="cpu").require()


@ranks(2)
def test_state_outside_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match='writes into its buffer "calls", which every stage'):
        make_trainer(Counting(), pipeline_plan(2, microbatches=2), example=token_batch(2)[0])


@ranks(2)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_versions_of_a_model_in_16_bits_are_refused(schedule: str) -> None:
    model = small_gpt(tied=False).bfloat16()
    with pytest.raises(ModelError, match="needs a master copy beside them"):
        make_trainer(model, pipeline_plan(2, schedule=schedule, microbatches=2), example=token_batch(2)[0])


@ranks(2)
def test_a_batch_without_targets_is_refused_on_every_stage_through_sockets() -> None:
    inputs, targets = token_batch(4)
    trainer = make_trainer(small_gpt(), pipeline_plan(2, microbatches=2, transport="c10d"), example=inputs[:2])
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(inputs, torch.full_like(targets, -100))
    assert float(trainer.step(inputs, targets)) > 0
