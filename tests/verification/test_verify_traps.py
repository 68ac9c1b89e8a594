"""What would escape a comparison, or be blamed on the wrong thing: tensors no rank has, and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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
from weft.verification.silence import Silence
from weft.verification.verdict import Verification


def run(model: nn.Module) -> Verification:
    batches = [token_batch(8, seed=seed) for seed in range(2)]
    return verify(model, data_plan(2), loss="cross-entropy", optimizer=SGD, batches=batches, device="cpu")


def without(what: str, name: str) -> Callable[..., Iterator[LocalTensor]]:
    real = comparing.local_tensors
    return lambda *args, **kwargs: (
        local for local in real(*args, **kwargs) if (local.key.what, local.key.name) != (what, name)
    )


@pytest.mark.sampled(2)
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
    """Draws by functions, which no attribute switches off: as OPT and T5 drop, as layers and spans are left out."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.embedding, self.head, self.draw = nn.Embedding(17, 8), nn.Linear(8, 17), draw
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.draw == "layer drop" and torch.rand([]) < 0.5:
                continue
            if self.draw == "numpy" and np.random.random() < 0.5:
                continue
            if self.draw == "spans":
                x = x.index_fill(1, torch.from_numpy(np.random.choice(np.arange(4), 2, replace=False)), 0.0)
            if self.draw == "path":
                x = x * x.new_empty(len(x), 1, 1).bernoulli_(0.5)
            if self.draw == "attention":
                x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            if self.draw == "normal":
                x = x + torch.empty_like(x).normal_()
            x = x + block(F.dropout(x, 0.5, self.training))
        return self.head(x)


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("draw", ["layer drop", "numpy", "spans", "path", "attention"])
def test_functions_that_draw_are_silenced(draw: str) -> None:
    torch.manual_seed(3)
    outcome = run(Drops(draw))
    assert outcome.ok, outcome.first
    assert "dropout" in outcome.notes[0]
    drawn = Drops(draw).double()
    tokens = token_batch(8)[0]
    assert not torch.equal(drawn(tokens), drawn(tokens))  # afterwards all functions are the originals again


@ranks(2)
def test_a_model_that_draws_random_numbers_is_named_as_the_cause() -> None:
    torch.manual_seed(3)
    outcome = run(Drops("normal"))
    assert not outcome.ok and outcome.first is not None and outcome.first.cause.kind == "random"


def test_a_compiler_that_first_looked_while_functions_were_silent_knows_them_afterwards() -> None:
    rules = pytest.importorskip("torch._dynamo.trace_rules")
    rules.clear_lru_cache()
    with Silence(nn.Linear(1, 1)).replacements:
        rules.get_torch_obj_rule_map()
    assert torch.dropout in rules.get_torch_obj_rule_map()
