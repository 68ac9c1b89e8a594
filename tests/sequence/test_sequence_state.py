"""Sequence parallelism around the steps: checkpoints under any plan, divergence, compiled blocks, number formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import verify
from oracle import ADAMW, data_plan, make_trainer, sequence_plan, small_gpt, token_batch, train_on_tokens
from ranks import ranks
from torch import nn

from weft.errors import DivergenceError
from weft.plan.plan import Compile, Plan, Precision
from weft.training.trainer import Trainer


def gpt_trainer(plan: Plan, model: nn.Module | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    made = small_gpt(heads=4, kv_heads=2, dropout=0.0).double() if model is None else model
    return make_trainer(made, plan, **{"optimizer": ADAMW, "example": token_batch(2)[0], **changes})


PLANS = {
    "ring 4": sequence_plan(ring=4, clip_norm=0.3),
    "2 x 2, zero 2": sequence_plan(ring=2, ulysses=2, shard="gradients", clip_norm=0.3),
    "ulysses 2, data 2, zero 3": sequence_plan(ulysses=2, data=2, shard="parameters", clip_norm=0.3),
    "ring 2, tensor 2": sequence_plan(ring=2, tensor=2, clip_norm=0.3),
    "ring 2, pipeline 2": sequence_plan(ring=2, pipeline=2, microbatches=2, cuts=(1,), clip_norm=0.3),
    "data 4": data_plan(4, clip_norm=0.3),
}
PAIRS = [
    ("ring 4", "ulysses 2, data 2, zero 3"),
    ("2 x 2, zero 2", "ring 2, tensor 2"),
    ("ring 2, pipeline 2", "2 x 2, zero 2"),
    ("data 4", "ring 4"),
    ("ring 2, tensor 2", "data 4"),
]


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_checkpoint_goes_on_under_another_plan(pair: tuple[str, str], tmp_path: Path) -> None:
    first = gpt_trainer(PLANS[pair[0]])
    train_on_tokens(first, 2)
    first.save(tmp_path / "here")
    expected = train_on_tokens(first, 2)
    other = gpt_trainer(PLANS[pair[1]], small_gpt(heads=4, kv_heads=2).double())
    other.load(tmp_path / "here")
    assert train_on_tokens(other, 2) == pytest.approx(expected, rel=1e-10)


@ranks(4)
def test_the_same_plan_resumes_to_the_bit(tmp_path: Path) -> None:
    plan = PLANS["2 x 2, zero 2"]
    first = gpt_trainer(plan, small_gpt(heads=4, dropout=0.2).double())
    train_on_tokens(first, 2)
    first.save(tmp_path / "here")
    expected = train_on_tokens(first, 2)
    again = gpt_trainer(plan, small_gpt(heads=4, dropout=0.2).double())
    again.load(tmp_path / "here")
    assert train_on_tokens(again, 2) == expected


@ranks(4)
def test_a_rank_that_drifts_is_named() -> None:
    trainer = gpt_trainer(sequence_plan(ring=2, ulysses=2))
    train_on_tokens(trainer, 1)
    if trainer.mesh.world.rank == 3:
        with torch.no_grad():
            trainer.model.norm.weight[0] += 1e-9
    with pytest.raises(DivergenceError, match="norm.weight on rank 3 differs"):
        trainer.check_divergence()


@ranks(2)
@pytest.mark.parametrize("split", [{"ring": 2}, {"ulysses": 2}])
def test_16_bits_are_close_to_32(split: dict[str, int]) -> None:
    wide = gpt_trainer(sequence_plan(**split), small_gpt(heads=4))
    plan = replace(sequence_plan(**split), precision=Precision(compute="bf16"))
    narrow = gpt_trainer(plan, small_gpt(heads=4))
    assert train_on_tokens(narrow, 4) == pytest.approx(train_on_tokens(wide, 4), rel=0.02)


@pytest.mark.long
@ranks(2)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("split", [{"ring": 2}, {"ulysses": 2}, {"ring": 2, "variant": "ring-self-attention"}])
def test_compiled_blocks_give_the_same(split: dict[str, Any]) -> None:
    plan = replace(sequence_plan(**split), compile=Compile(blocks=True))
    verify(
        small_gpt(heads=4, kv_heads=2, context=16),
        plan,
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[token_batch(4, seed=seed) for seed in range(2)],
        device="cpu",
    ).require()
