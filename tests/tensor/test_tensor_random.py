"""Dropout under tensor parallelism: one mask for replicated activations, one per rank for its own shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import make_trainer, small_gpt, tensor_plan, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.models.gpt import CausalAttention
from weft.plan.plan import Plan, Recompute


class Noted(nn.Module):
    """Drops, and notes which of its entries it dropped."""

    def __init__(self, rate: float, seen: list[Tensor]) -> None:
        super().__init__()
        self.drop_rate = rate
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(torch.ones_like(x), self.drop_rate, self.training)
        self.seen.append(dropped.detach() == 0)
        return x * dropped


class DroppingAttention(CausalAttention):
    """Attention whose results are dropped, head by head: that is inside a region."""

    def __init__(self, inside: Noted) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        return self.inside(super().forward(q_BHTD, k_BGTD, v_BGTD))


def train(plan: Plan) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Masks of what is outside regions and inside, and the weights after two steps."""
    outside: list[Tensor] = []
    inside: list[Tensor] = []
    torch.manual_seed(3)
    model = small_gpt(heads=4).double()
    for block in model.blocks:
        block.dropout = Noted(0.3, outside)
        block.attention.attend = DroppingAttention(Noted(0.3, inside))
    torch.manual_seed(4 + (dist.get_rank() if dist.is_initialized() else 0))
    trainer = make_trainer(model, plan)
    for seed in range(2):
        trainer.step(*token_batch(3, seed=seed))
    trainer.check_divergence()
    return outside, inside, {name: p.detach() for name, p in model.named_parameters()}


def masks_of_all_ranks(masks: list[Tensor]) -> list[list[Tensor]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, masks)
    return found


def alike(masks: list[Tensor]) -> list[bool]:
    """For every mask: do the two ranks have the same."""
    return [torch.equal(one, other) for one, other in zip(*masks_of_all_ranks(masks), strict=True)]


@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_masks_are_common_outside_regions_and_own_inside(sequence: bool) -> None:
    outside, inside, _ = train(tensor_plan(2, sequence=sequence))
    assert len(outside) == 2 * 2 * 2 and len(inside) == 2 * 2
    assert not any(alike(inside))
    assert alike(outside) == [not sequence] * len(outside)
    ours = [mask.flatten().tolist() for mask in outside]
    assert all(ours.count(mask) == 1 for mask in ours), "two places drop alike"


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks_drop_the_same(policy: str, sequence: bool) -> None:
    plan = tensor_plan(2, sequence=sequence)
    kept, recomputed = train(plan)[2], train(replace(plan, recompute=Recompute(policy=policy)))[2]
    for name, weight in kept.items():
        torch.testing.assert_close(weight, recomputed[name], rtol=1e-12, atol=1e-12)
