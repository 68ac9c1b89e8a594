"""Tensor parallelism gives one process's answer: GPTs of every shape on 2 and 4 ranks, tokens whole or split."""

from __future__ import annotations

from typing import Any

import pytest
from meshes import verify
from oracle import ADAMW, small_gpt, tensor_plan, token_batch
from ranks import ranks

from weft.plan.plan import Plan
from weft.verification.verdict import Verification

LAYERNORMS = {"norm": "layer", "bias": True, "positions": "learned"}


def verified(plan: Plan, *, sizes: tuple[int, ...] = (4, 3), **changes: Any) -> Verification:
    return verify(
        small_gpt(**changes),
        plan,
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[token_batch(size, seed=seed) for seed, size in enumerate(sizes)],
        device="cpu",
    ).require()


@pytest.mark.sampled(2, long=3)
@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        LAYERNORMS,
        {"tied": False, "heads": 4, "kv_heads": 2},
        {"heads": 4, "kv_heads": 1, "tied": False},
        {"hidden": 12, "heads": 3, "mlp_hidden": 7, "positions": "learned"},
    ],
)
def test_two_ranks(changes: dict[str, Any], sequence: bool) -> None:
    verified(tensor_plan(2, sequence=sequence, clip_norm=0.5), **changes)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("changes", [{"heads": 4}, {"hidden": 24, "heads": 6, "kv_heads": 2}])
def test_four_ranks(changes: dict[str, Any], sequence: bool) -> None:
    verified(tensor_plan(4, sequence=sequence, clip_norm=0.5), **changes)
