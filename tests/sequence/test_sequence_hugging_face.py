"""Hugging Face models whose tokens lie on several ranks give one process's answer, with padding and documents too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from meshes import verify
from oracle import ADAMW, sequence_plan, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import ModelError
from weft.plan.plan import Plan, Recompute

SIZES: dict[str, Any] = dict(
    vocab_size=17, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=8, pad_token_id=3, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=6)
KINDS = {
    "Llama": ("ForCausalLM", GROUPED),
    "Mistral": ("ForCausalLM", GROUPED),
    "GPT2": ("LMHeadModel", SIZES | {"n_positions": 8, "attn_pdrop": 0.0}),
    "Bert": ("ForMaskedLM", SIZES),
}
RING, ULYSSES, BOTH = sequence_plan(ring=2), sequence_plan(ulysses=2), sequence_plan(ring=2, ulysses=2)


def make_model(kind: str, **changes: Any) -> Any:
    purpose, sizes = KINDS[kind]
    return getattr(transformers, kind + purpose)(getattr(transformers, f"{kind}Config")(**sizes | changes))


def padded(tokens: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The last sample without its first tokens, the first without its last."""
    mask = torch.ones_like(tokens)
    mask[0, 5:], mask[-1, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}, targets.masked_fill(mask == 0, -100)


def packed(tokens: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    positions = torch.cat([torch.arange(3), torch.arange(tokens.shape[1] - 3)])
    return {"input_ids": tokens, "position_ids": positions.repeat(len(tokens), 1)}, targets


def shortened(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """To a length that no number of ranks divides."""
    return tokens[:, :7], targets[:, :7]


def plain(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, targets


def verified(model: nn.Module, plan: Plan, change: Any = plain) -> None:
    batches = [change(*token_batch(size, seed=seed)) for seed, size in enumerate((4, 3))]
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("plan", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("change", [shortened, padded, packed])
def test_two_ranks(plan: Plan, change: Any) -> None:
    verified(make_model("Llama", use_cache=False), plan, change)


@ranks(2)
def test_full_attention_and_learned_positions() -> None:
    verified(make_model("Bert"), RING, padded)


@ranks(2)
@pytest.mark.parametrize(("kind", "policy"), [("Llama", "full"), ("GPT2", "selective")])
def test_recomputed(kind: str, policy: str) -> None:
    verified(make_model(kind), replace(RING, recompute=Recompute(policy=policy)), padded)


class Logits(nn.Module):
    """A model inside a module of the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


@ranks(2)
def test_inside_another_module() -> None:
    verified(Logits(make_model("Llama")), RING, shortened)


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("change", [padded, packed])
def test_four_ranks(change: Any) -> None:
    verified(make_model("Llama", use_cache=False), BOTH, change)


@pytest.mark.sampled(long=4)
@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        sequence_plan(ring=2, tensor=2),
        sequence_plan(ulysses=2, tensor=2, split_tokens=True),
        sequence_plan(ring=2, data=2, shard="parameters"),
        sequence_plan(ring=2, pipeline=2, microbatches=2),
        sequence_plan(ring=4, layout="contiguous", variant="ring-self-attention"),
    ],
    ids=["tensor", "tensor-tokens", "sharded", "pipeline", "ring-self-attention"],
)
@pytest.mark.parametrize("change", [shortened, padded, packed])
def test_beside_other_axes(plan: Plan, change: Any) -> None:
    verified(make_model("Llama", use_cache=False), plan, change)


@ranks(2)
def test_dropout_of_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="gives attention dropout = 0.1"):
        verified(make_model("Llama", attention_dropout=0.1), RING)
