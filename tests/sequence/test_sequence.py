"""Sequence parallelism gives one process's answer: GPTs of every shape, whole and padded sequences, every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import verify
from oracle import ADAMW, Batch, make_trainer, sequence_plan, small_gpt
from ranks import ranks

from weft.plan.plan import Plan
from weft.verification.verdict import Verification

LAYERNORMS = {"norm": "layer", "bias": True, "positions": "learned"}
SPLITS = {"ring": {"ring": 2}, "ulysses": {"ulysses": 2}}
BOTH = {"ring 4": {"ring": 4}, "ulysses 4": {"ulysses": 4}, "2 x 2": {"ring": 2, "ulysses": 2}}


def text(num_samples: int, num_tokens: int, seed: int = 0, *, ignored: bool = True) -> Batch:
    """Tokens and those after them, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(17, (num_samples, num_tokens + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    if ignored and num_samples:
        targets[0, : num_tokens // 2] = -100
    return drawn[:, :-1].clone(), targets


def verified(plan: Plan, *, num_tokens: int = 8, **changes: Any) -> Verification:
    return verify(
        small_gpt(**{"context": 16, **changes}),
        plan,
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[text(3, num_tokens, 0), text(2, num_tokens, 1)],
        device="cpu",
    ).require()


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        LAYERNORMS,
        {"tied": False, "heads": 4, "kv_heads": 2},
        {"heads": 4, "kv_heads": 1, "tied": False},
        {"hidden": 12, "heads": 3, "mlp_hidden": 7, "positions": "learned"},
    ],
)
def test_two_ranks(changes: dict[str, Any], split: str) -> None:
    verified(sequence_plan(**SPLITS[split], clip_norm=0.5), **changes)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("split", BOTH)
@pytest.mark.parametrize("changes", [{"heads": 4, "kv_heads": 2}, {"hidden": 24, "heads": 6, "kv_heads": 2}])
def test_four_ranks(changes: dict[str, Any], split: str) -> None:
    verified(sequence_plan(**BOTH[split]), **changes)


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("num_tokens", [1, 7, 13, 16])
def test_any_length(num_tokens: int) -> None:
    """Also as long as the model's context, and shorter than the number of ranks."""
    verified(sequence_plan(ring=2, ulysses=2), num_tokens=num_tokens, positions="learned")
    verified(sequence_plan(ring=4, layout="contiguous"), num_tokens=num_tokens)


@ranks(2)
def test_lengths_may_change_from_step_to_step() -> None:
    verify(
        small_gpt(context=16),
        sequence_plan(ring=2, microbatches=2),
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[text(2, 8), text(3, 5), text(2, 16)],
        device="cpu",
    ).require()


@ranks(2)
def test_evaluation_and_generation_are_those_of_one_process() -> None:
    alone = small_gpt(context=16).double()
    trainer = make_trainer(small_gpt(context=16).double(), sequence_plan(ring=2))
    alone.load_state_dict(trainer.model.state_dict())
    batches = [text(3, 9, seed=5), text(2, 4, seed=6)]
    with torch.no_grad():
        terms = [
            (torch.nn.functional.cross_entropy(alone(x).flatten(0, 1), y.flatten(), reduction="sum"), (y != -100).sum())
            for x, y in batches
        ]
    expected = float(sum(total for total, _ in terms) / sum(count for _, count in terms))
    assert abs(trainer.evaluate(batches) - expected) < 1e-12
    written = trainer.generate([1, 2, 3], num_tokens=6, context=16, temperature=0.0)
    single = make_trainer(alone, sequence_plan(ring=2))
    assert written == single.generate([1, 2, 3], num_tokens=6, context=16, temperature=0.0)


@ranks(2)
def test_a_loss_of_the_users_own_is_given_this_ranks_tokens() -> None:
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits.shape[:2] == targets.shape == (2, 4)
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return flat, (targets != -100).sum()

    trainer = make_trainer(small_gpt().double(), sequence_plan(ulysses=2), loss=loss)
    named = make_trainer(small_gpt().double(), sequence_plan(ulysses=2))
    named.model.load_state_dict(trainer.model.state_dict())
    for seed in range(2):
        assert abs(float(trainer.step(*text(2, 8, seed))) - float(named.step(*text(2, 8, seed)))) < 1e-12


@ranks(4)
def test_dropout_differs_between_tokens_and_repeats() -> None:
    """Ranks that have other tokens draw other masks; the same seed draws them again."""

    def losses() -> list[float]:
        torch.manual_seed(7)
        trainer = make_trainer(small_gpt(dropout=0.5).double(), sequence_plan(ring=2, tensor=2))
        return [float(trainer.step(*text(2, 8, seed))) for seed in range(3)]

    first, second = losses(), losses()
    assert first == second
    torch.manual_seed(7)
    plain = make_trainer(small_gpt().double(), sequence_plan(ring=2, tensor=2))
    assert [float(plain.step(*text(2, 8, seed))) for seed in range(3)] != first
