"""What would escape a comparison, or be blamed on the wrong thing: tensors no rank has, and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import verify
from oracle import SGD, data_plan, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.verification import compare as comparing
from weft.verification import examine as examining
from weft.verification.compare import LocalTensor
from weft.verification.verdict import Verification


def run(model: nn.Module) -> Verification:
    batches = [token_batch(8, seed=seed) for seed in range(2)]
    return verify(model, data_plan(2), loss="cross-entropy", optimizer=SGD, batches=batches, device="cpu")


def without(what: str, name: str) -> Callable[..., Iterator[LocalTensor]]:
    real = comparing.local_tensors
    return lambda *args, **kwargs: (
        local for local in real(*args, **kwargs) if (local.key.what, local.key.name) != (what, name)
    )


@ranks(2)
@pytest.mark.parametrize(
    ("what", "name"), [("weight", "norm.weight"), ("gradient", "norm.weight"), ("buffer", "rotary.table_2TE")]
)
def test_what_no_rank_holds_is_missing(what: str, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (comparing, examining):
            patch.setattr(module, "local_tensors", without(what, name))
        outcome = run(small_gpt())
    first = outcome.first
    assert not outcome.ok and first is not None
    assert (first.what, first.name, first.cause.kind, first.ranks) == (what, name, "missing", (0, 1)), first


class Drops(nn.Module):
    """By a function, which nobody can switch off from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(F.dropout(self.embedding(tokens), 0.5, self.training))


@ranks(2)
def test_a_model_that_draws_random_numbers_is_named_as_the_cause() -> None:
    torch.manual_seed(3)
    outcome = run(Drops())
    assert not outcome.ok and outcome.first is not None and outcome.first.cause.kind == "random"
