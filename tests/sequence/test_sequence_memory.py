"""Activation memory per rank falls as 1 / P: all that a block keeps for the backward pass, attention included.

Of a block with dropout in 32 bits, s tokens, b samples and h features that is 72 s b h bytes on one rank (twice the 34
of `test_tensor_memory.py`, and two bytes for each entry of two masks), and 4 for every token and head, by which
attention merges blocks. Ulysses keeps attention's output twice, by heads and by tokens: 4 s b h more.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from oracle import kept_bytes, make_trainer, sequence_plan
from ranks import ranks

from weft.models.gpt import GPT, gpt2_124m
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

SAMPLES, HIDDEN, HEADS = 2, 128, 4


def trained_by(plan: Plan, num_layers: int, num_tokens: int) -> Trainer:
    sizes = {"context": num_tokens, "num_layers": num_layers, "hidden": HIDDEN, "heads": HEADS}
    config = replace(gpt2_124m(), vocab_size=64, dropout=0.1, **sizes)
    # In float32, because parameters of 16 bits, shared by several ranks, would have copies beside them.
    return make_trainer(GPT(config), plan, example=torch.zeros(SAMPLES, num_tokens, dtype=torch.int64))


def pass_through(trainer: Trainer, num_tokens: int) -> None:
    """A forward pass of a whole sequence."""
    inputs = torch.zeros(SAMPLES, num_tokens, dtype=torch.int64)
    if trainer.sample_split is None:
        trainer.model(inputs)
        return
    cut = trainer.sample_split.cut_inputs(inputs)
    with trainer.sample_split.replacements:
        trainer.sample_split.enter(cut)
        trainer.model(**cut, **cut.beside)


def block_bytes(plan: Plan, num_tokens: int) -> int:
    two, one = (trained_by(plan, number, num_tokens) for number in (2, 1))
    kept = [kept_bytes(t.model, functools.partial(pass_through, t, num_tokens)) for t in (two, one)]
    return kept[0] - kept[1]


ONE_RANK, TWICE = 72, 4
"""Bytes per entry."""


def check(plan: Plan, parts: float) -> None:
    for num_tokens in (32, 96):
        entries = num_tokens * SAMPLES * HIDDEN
        merging = 4 * num_tokens * SAMPLES * HEADS
        expected = (parts * entries + merging) / plan.axes.sequence
        assert block_bytes(plan, num_tokens) == pytest.approx(expected, rel=0.02), num_tokens


def test_one_rank() -> None:
    check(sequence_plan(), ONE_RANK)


@ranks(2)
def test_two_ranks() -> None:
    check(sequence_plan(ring=2), ONE_RANK)
    check(sequence_plan(ulysses=2), ONE_RANK + TWICE)


@pytest.mark.long
@ranks(4)
def test_four_ranks() -> None:
    check(sequence_plan(ring=4), ONE_RANK)
    check(sequence_plan(ulysses=4), ONE_RANK + TWICE)
    check(sequence_plan(ring=2, ulysses=2), ONE_RANK + TWICE)


@ranks(2)
def test_rows_of_scores_grow_with_the_square() -> None:
    """Ring self-attention as first published keeps every weight of attention, and its output twice."""
    plan = sequence_plan(ring=2, variant="ring-self-attention")
    more = (4 * 96 * 96 * SAMPLES * HEADS + TWICE * 96 * SAMPLES * HIDDEN) / 2
    assert block_bytes(plan, 96) - block_bytes(sequence_plan(ring=2), 96) == pytest.approx(more, rel=0.02)
