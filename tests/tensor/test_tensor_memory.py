"""Memory per rank of a sharded model follows the formulas: its weights, and activations kept for the backward pass.

Of a block with dropout in 16 bits, a flash kernel, s tokens, b samples and h features a rank keeps, over t ranks:

    one rank            34 s b h
    split layers        (10 + 24 / t) s b h
    split tokens too    34 / t s b h

with a byte for each entry of the two masks of dropout, which torch keeps in two on a CPU: 36 and 12 there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import kept_bytes, make_trainer, tensor_plan
from ranks import ranks

from weft.models.gpt import GPT, gpt2_124m
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

TOKENS, SAMPLES, HIDDEN, HEADS = 32, 4, 256, 4


def trained_by(plan: Plan, num_layers: int) -> Trainer:
    sizes = {"context": TOKENS, "num_layers": num_layers, "hidden": HIDDEN, "heads": HEADS}
    config = replace(gpt2_124m(), vocab_size=64, dropout=0.1, **sizes)
    return make_trainer(GPT(config).bfloat16(), plan)


def check(tensor: int, *, sequence: bool, parts: float) -> None:
    plan = tensor_plan(tensor, sequence=sequence)
    two, one = (trained_by(plan, number).model for number in (2, 1))
    inputs = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    block = kept_bytes(two, lambda: two(inputs)) - kept_bytes(one, lambda: one(inputs))
    assert block == pytest.approx(parts * TOKENS * SAMPLES * HIDDEN, rel=0.02)


def test_one_rank() -> None:
    check(1, sequence=False, parts=36)


@ranks(2)
@pytest.mark.parametrize(("sequence", "parts"), [(False, 12 + 24 / 2), (True, 36 / 2)])
def test_two_ranks(sequence: bool, parts: float) -> None:
    check(2, sequence=sequence, parts=parts)


@ranks(4)
@pytest.mark.parametrize(("sequence", "parts"), [(False, 12 + 24 / 4), (True, 36 / 4)])
def test_four_ranks(sequence: bool, parts: float) -> None:
    check(4, sequence=sequence, parts=parts)


@ranks(4)
def test_weights_and_moments_are_shared_out() -> None:
    """12 h² + 13 h numbers per block: a rank has a quarter of the matrices and of the biases of column layers."""
    trainers = [trained_by(tensor_plan(4), num_layers) for num_layers in (1, 2)]
    sizes = [sum(parameter.numel() for parameter in trainer.model.parameters()) for trainer in trainers]
    matrices, column_biases, whole = 12 * HIDDEN**2, (3 + 4) * HIDDEN, (1 + 1 + 4) * HIDDEN
    assert sizes[1] - sizes[0] == matrices // 4 + column_biases // 4 + whole
