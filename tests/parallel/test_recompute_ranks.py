"""Recomputation under a plan, on two ranks: the same steps to the bit, the same traffic, statistics that move once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from oracle import Batch, Seen, cut, data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from oracle import train_parallel as train
from ranks import ranks
from torch import nn

from weft.errors import ModelError
from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import Plan, Recompute

POLICIES = ["selective", "full"]


def with_policy(plan: Plan, policy: str) -> Plan:
    return dataclasses.replace(plan, recompute=Recompute(policy=policy))


def run(model: nn.Module, plan: Plan, parts: Sequence[Sequence[Batch]]) -> tuple[nn.Module, list[Seen], int]:
    """A copy of the model trained from seed 7, and the bytes that one rank sent."""
    trainer = make_trainer(copy.deepcopy(model), plan)
    torch.manual_seed(7 + trainer.data_rank)
    seen = train(trainer, parts)
    return trainer.named_model, seen, trainer.mesh.traffic["data"].sent_bytes


def assert_bitwise(mine: list[Seen], theirs: list[Seen]) -> None:
    for here, there in zip(mine, theirs, strict=True):
        assert here.loss == there.loss
        for name, weight in there.weights.items():
            assert torch.equal(here.weights[name], weight), name
            gradient, expected = here.gradients[name], there.gradients[name]
            assert gradient is not None and expected is not None and torch.equal(gradient, expected), name


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_with_dropout_are_the_same_to_the_bit(policy: str, dtype: torch.dtype) -> None:
    model = small_gpt(hidden=16, heads=4, kv_heads=2, dropout=0.2).to(dtype)
    parts = [cut(token_batch(sum(sizes), seed=step), sizes) for step, sizes in enumerate([(4, 4), (5, 2), (0, 3)])]
    plan = data_plan(2, microbatches=2, clip_norm=0.5)
    _, plain, plain_bytes = run(model, plan, parts)
    _, mine, num_bytes = run(model, with_policy(plan, policy), parts)
    assert_bitwise(mine, plain)
    assert num_bytes == plain_bytes


@ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_synchronised_statistics_move_once(policy: str) -> None:
    """Also where a rank has no samples; what is gathered a second time is all that is sent besides."""
    model, microbatches = small_convnet().double(), 2
    parts = [cut(image_batch(sum(sizes), seed=step), sizes) for step, sizes in enumerate([(4, 4), (5, 2), (0, 3)])]
    plan = data_plan(2, microbatches=microbatches)
    plain_model, plain, plain_bytes = run(model, plan, parts)
    mine_model, mine, num_bytes = run(model, with_policy(plan, policy), parts)
    assert_bitwise(mine, plain)
    buffers = dict(plain_model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in mine_model.named_buffers())
    norms = [module for module in mine_model.blocks.modules() if isinstance(module, nn.BatchNorm2d)]
    gathered = sum(sent_bytes("all-gather", 2 * 8 * (2 * norm.num_features + 1), 2) for norm in norms)
    assert num_bytes - plain_bytes == len(parts) * microbatches * gathered


@ranks(2)
def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match=r'\[recompute\] policy = "selective" needs a model with a list of blocks'):
        make_trainer(nn.Linear(4, 3), with_policy(data_plan(2), "selective"))
