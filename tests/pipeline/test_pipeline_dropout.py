"""Dropout in a pipeline: the same for any number of stages, recomputed or not, and never the same at two places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import cut_evenly, make_trainer, small_gpt, token_batch
from pipelines import Stack, pipeline_plan, vector_batch
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.plan.plan import Plan

gpt: Callable[..., nn.Module] = functools.partial(small_gpt, num_layers=4)


def run_with_dropout(plan: Plan, file: Path, writes: bool = False) -> None:
    """Three steps with dropout from one seed: write losses and weights to a file, or compare with what is there."""
    torch.manual_seed(1)
    model = gpt(dropout=0.1).double()
    torch.manual_seed(2)
    batches = [token_batch(size, seed=size) for size in (13, 6, 13)]
    trainer = make_trainer(model, plan, example=batches[0][0])
    losses = [float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])) for batch in batches]
    weights = {name: parameter.detach() for name, parameter in trainer.named_model.named_parameters()}
    if writes:
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save((losses, weights), file)
        return
    true_losses, true_weights = torch.load(file)
    assert losses == pytest.approx(true_losses, rel=1e-10)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=1e-9, atol=1e-11, msg=lambda text: name + text)  # noqa: B023


ON_RANKS = {world: ranks(world)(run_with_dropout) for world in (2, 3, 4)}


@pytest.mark.long
def test_dropout_is_the_same_for_any_number_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "one process"
    run_with_dropout(pipeline_plan(1, microbatches=4), file, writes=True)
    run_with_dropout(pipeline_plan(1, microbatches=4, recompute="full"), file)
    ON_RANKS[2](plan=pipeline_plan(2, microbatches=4, schedule="zero-bubble"), file=file)
    ON_RANKS[2](plan=pipeline_plan(2, microbatches=4, schedule="interleaved", recompute="full"), file=file)
    ON_RANKS[3](plan=pipeline_plan(3, microbatches=4, recompute="full"), file=file)
    ON_RANKS[4](plan=pipeline_plan(4, microbatches=4, schedule="gpipe", recompute="selective"), file=file)


@pytest.mark.long
def test_dropout_is_the_same_for_any_number_of_stages_of_two_data_ranks(tmp_path: Path) -> None:
    file = tmp_path / "two data ranks"
    ON_RANKS[2](plan=pipeline_plan(1, microbatches=4, data=2), file=file, writes=True)
    ON_RANKS[4](plan=pipeline_plan(2, microbatches=4, data=2, recompute="full", schedule="zero-bubble"), file=file)


class Noise(nn.Module):
    """Notes the dropout it drew."""

    def __init__(self, seen: list[tuple[bool, ...]]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(12, 12), seen

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(torch.ones(64), 0.5, self.training)
        self.seen.append(tuple((dropped > 0).tolist()))
        return self.layer(x) * dropped[:12]


@ranks(2)
@pytest.mark.parametrize("data", [1, 2])
def test_no_two_places_draw_the_same(data: int) -> None:
    """Blocks, microbatches, steps and data ranks all differ; the user's own random state is unchanged."""
    seen: list[tuple[bool, ...]] = []
    model = Stack(drop=nn.Dropout(0.5))
    model.blocks = nn.ModuleList(Noise(seen) for _ in range(4))
    trainer = make_trainer(
        model, pipeline_plan(2 // data, data=data, microbatches=3), example=vector_batch(4)[0].float()
    )
    torch.manual_seed(dist.get_rank())
    for number in range(3):
        inputs, targets = vector_batch(6, seed=number)
        trainer.step(inputs.float(), targets)
        if number == 0:
            seen.clear()  # the first batch of a shape is followed, and that draws too
            state = torch.get_rng_state()  # the first step draws where dropout comes from
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [mask for part in gathered(seen) for mask in part]
    assert len(drawn) == 2 * 3 * 4 * data
    assert len(set(drawn)) == len(drawn)
