"""Compiled and recomputed blocks exchange the input that several layers share once, as blocks that run eagerly do."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracle import make_trainer, tensor_plan, token_batch
from ranks import ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

from weft.plan.plan import Compile, Recompute

HIDDEN = 16
FUNCTION_WARNING = "ignore:.*should not be instantiated"
GRAD_WARNING = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""Dynamo looks at it when it makes a fake tensor of a block's input."""


class Attention(nn.Module):
    """Queries, keys and values by layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.attention, self.norm, self.norm_first = Attention(), nn.LayerNorm(HIDDEN), norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            return x + self.attention(self.norm(x))
        return self.norm(x + self.attention(x))


class Model(nn.Module):
    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, HIDDEN)
        self.blocks = nn.ModuleList(Block(norm_first=norm_first) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.filterwarnings(GRAD_WARNING, FUNCTION_WARNING)
@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_shared_input_is_exchanged_once(norm_first: bool, policy: str, sequence: bool) -> None:
    tokens, targets = token_batch(4)
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        for compiled in (False, True):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            plan = replace(
                tensor_plan(2, sequence=sequence), recompute=Recompute(policy=policy), compile=Compile(blocks=compiled)
            )
            trainer = make_trainer(Model(norm_first=norm_first).double(), plan, example=tokens)
            losses = [float(trainer.step(tokens, targets)) for _ in range(2)]
            before = trainer.mesh.traffic["tensor"].num_calls
            losses.append(float(trainer.step(tokens, targets)))
            seen[compiled] = (trainer.mesh.traffic["tensor"].num_calls - before, losses)
    assert not counters["graph_break"]
    assert seen[True][1] == pytest.approx(seen[False][1], rel=1e-12)
    assert seen[True][0] <= seen[False][0]
