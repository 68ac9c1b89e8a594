"""Random numbers that a model draws in its code, without a module or a rate to see: alike under every plan."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import cut_evenly, make_trainer
from pipelines import Stack, pipeline_plan, vector_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import ModelError
from weft.plan.plan import Plan


class Hidden(nn.Module):
    """Draws by functions, with rates that stand in its code."""

    def __init__(self, *, on_host: bool) -> None:
        super().__init__()
        self.layer, self.on_host = nn.Linear(12, 12), on_host

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer(x), 0.5, self.training)
        return x * (1 + np.random.random() + random.random()) if self.on_host else x


class Outside(Stack):
    """Also draws from numpy between its blocks, as masks of spans are."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * (1 + np.random.random()))


def make_model(*, on_host: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Outside() if on_host else Stack()
    model.blocks = nn.ModuleList(Hidden(on_host=on_host) for _ in range(4))
    return model.double()


def run(plan: Plan, file: Path, on_host: bool, writes: bool = False) -> None:
    """Three steps from one seed: write their losses to a file, or compare with what is there."""
    model = make_model(on_host=on_host)
    torch.manual_seed(2)
    np.random.seed(dist.get_rank() if dist.is_initialized() else 17)
    before = np.random.get_state()[1].tolist()
    batches = [vector_batch(size, seed=size) for size in (8, 6, 8)]
    trainer = make_trainer(model, plan, example=batches[0][0][:2])
    losses = [float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])) for batch in batches]
    assert np.random.get_state()[1].tolist() == before
    if writes:
        torch.save(losses, file)
    assert losses == pytest.approx(torch.load(file), rel=1e-10)


ON_TWO = ranks(2)(run)


@pytest.mark.parametrize("on_host", [False, True])
def test_plans_draw_alike(tmp_path: Path, on_host: bool) -> None:
    file = tmp_path / "one process"
    run(pipeline_plan(1, microbatches=2), file, on_host, writes=True)
    if not on_host:
        run(pipeline_plan(1, microbatches=2, recompute="full"), file, on_host)
    ON_TWO(plan=pipeline_plan(2, microbatches=2), file=file, on_host=on_host)


def test_draws_on_the_host_are_not_recomputed() -> None:
    inputs, targets = vector_batch(4)
    trainer = make_trainer(make_model(on_host=True), pipeline_plan(1, microbatches=1, recompute="full"))
    with pytest.raises(ModelError, match="draws from the global random numbers of numpy or Python"):
        trainer.step(inputs, targets)


@ranks(2)
def test_blocks_left_out_at_random_have_no_stages() -> None:
    model = make_model(on_host=False)
    model.layerdrop = 0.1
    with pytest.raises(ModelError, match="layerdrop = 0.1.*every batch takes the same way through the stages"):
        make_trainer(model, pipeline_plan(2, microbatches=2), example=vector_batch(4)[0])
