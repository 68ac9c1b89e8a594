"""Sequence parallelism of models that weft has never seen: what works as it is, and what is refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import Transformer, batch
from oracle import SGD, make_trainer, sequence_plan
from ranks import ranks

from weft.errors import DataError, ModelError, WeftError
from weft.plan.plan import Plan
from weft.training.verify import verify

RING, ULYSSES = sequence_plan(ring=2), sequence_plan(ulysses=2)


def verified(model: torch.nn.Module, plan: Plan, *batches: Any) -> None:
    verify(model, plan, loss="cross-entropy", optimizer=SGD, batches=list(batches), device="cpu").require()


@ranks(2)
@pytest.mark.parametrize("plan", [RING, ULYSSES])
@pytest.mark.parametrize("way", ["causal", "full", "imported", "three dims"])
def test_attention_is_torchs(way: str, plan: Plan) -> None:
    verified(Transformer(way), plan, batch(2, 8), batch(3, 7, 1))


@ranks(2)
@pytest.mark.parametrize("where", ["module", "table"])
def test_declared_positions(where: str) -> None:
    for plan in (RING, ULYSSES, sequence_plan(ring=2, layout="contiguous", microbatches=2)):
        verified(Transformer("causal", where), plan, batch(2, 8), batch(3, 13, 1))


@ranks(4)
def test_declared_positions_in_a_pipeline() -> None:
    for where in ("module", "table"):
        verified(Transformer("full", where), sequence_plan(ring=2, pipeline=2, microbatches=2), batch(3, 7))


@ranks(2)
def test_a_model_that_recomputes_by_itself() -> None:
    verified(Transformer("causal", "table", checkpoints=True), RING, batch(2, 8), batch(3, 6, 1))


@ranks(4)
def test_masks_of_padding_are_honoured() -> None:
    is_text = torch.arange(9) < torch.tensor([[9], [4], [1]])
    for plan in (sequence_plan(ring=2, ulysses=2), sequence_plan(ring=4), sequence_plan(ulysses=2, data=2)):
        verified(Transformer("padding"), plan, batch(3, 9, is_text=is_text))


def refused(make: Callable[[], object], *parts: str, kind: type[WeftError] = ModelError) -> None:
    with pytest.raises(kind) as caught:
        make()
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"


@ranks(2)
@pytest.mark.parametrize(
    ("way", "where", "parts"),
    [
        ("causal", "hidden", ("ring = 2", "computes something else than whole", "Positions")),
        ("by hand", "none", ("computes something else than whole", "scaled_dot_product_attention")),
        ("causal", "shift", ("computes something else than whole",)),
        ("causal", "pooled", (r"\(2, 17\)", "no dim of tokens")),
        ("dropout", "none", ("drops 0.1", "attention dropout to 0")),
        ("triangle", "none", (r"mask of \(4, 4\)", "is_causal=True")),
        ("cross", "none", ("4 queries to 3 keys", "self-attention only")),
    ],
)
def test_what_would_be_wrong_is_refused(way: str, where: str, parts: tuple[str, ...]) -> None:
    refused(lambda: make_trainer(Transformer(way, where).double(), RING, example=batch(2, 8)[0]), *parts)


@ranks(2)
def test_refusals_of_inputs_and_targets() -> None:
    refused(lambda: make_trainer(Transformer(), RING), "example=inputs", "Positions")
    trainer = make_trainer(Transformer().double(), RING, example=batch(2, 8)[0])
    tokens, targets = batch(2, 8)
    refused(lambda: trainer.step(tokens, targets[:, 0]), r"\(2,\)", "8 tokens", "target of its own", kind=DataError)
    both = {"tokens": tokens, "is_text": torch.ones(2, 8, 8, dtype=torch.bool)}
    refused(lambda: trainer.step(both, targets), r"is_text.* \(2, 8, 8\)", "nowhere else", kind=DataError)
    refused(lambda: trainer.step(tokens[0], targets[0]), "no input has a dim of tokens", kind=DataError)
    refused(lambda: trainer.step(tokens[:, :7], targets[:, :7].double()), "padded to 8", "-100", kind=DataError)


@ranks(2)
def test_ranks_that_share_a_sequence_are_given_the_same_one() -> None:
    trainer = make_trainer(Transformer().double(), RING, example=batch(2, 8)[0])
    refused(
        lambda: trainer.step(*batch(2, 8, seed=trainer.mesh.world.rank)),
        "rank 1 was given another batch than rank 0",
        "trainer.data_rank",
        kind=DataError,
    )


@ranks(4)
def test_too_few_heads_for_ulysses() -> None:
    from oracle import small_gpt, token_batch

    model = small_gpt(heads=2).double()
    refused(
        lambda: make_trainer(model, sequence_plan(ulysses=4), example=token_batch(2)[0]),
        "2 heads",
        "ulysses = 4",
        "ulysses = 2, ring = 2",
    )
