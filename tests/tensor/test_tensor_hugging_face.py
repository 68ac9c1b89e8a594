"""Hugging Face models split by their own plan give one process's answer on real ranks, alone and beside other axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from meshes import verify
from oracle import ADAMW, make_trainer, tensor_plan, token_batch
from ranks import ranks

from weft.errors import ModelError
from weft.plan.plan import Plan, Recompute

SIZES = dict(
    vocab_size=17, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=16, pad_token_id=3, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


def verified(kind: str, plan: Plan, **changes: Any) -> None:
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | changes))
    batches = [token_batch(size, seed=seed) for seed, size in enumerate((4, 3))]
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()


@pytest.mark.sampled(2, long=3)
@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        pytest.param("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, marks=pytest.mark.long),
        ("Qwen3", {}),
        pytest.param("Gemma", {}, marks=pytest.mark.long),
        pytest.param("Phi3", {}, marks=pytest.mark.long),
    ],
)
def test_two_ranks(kind: str, changes: dict[str, Any], sequence: bool) -> None:
    verified(kind, tensor_plan(2, sequence=sequence, clip_norm=0.5), **changes)


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("plan", [tensor_plan(4), tensor_plan(2, data=2), tensor_plan(2, data=2, shard="parameters")])
def test_four_ranks(plan: Plan) -> None:
    verified("Llama", plan)


@ranks(2)
@pytest.mark.parametrize("policy", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_attention_that_no_rank_has_a_share_of_sees_all_tokens(policy: str) -> None:
    """OLMo 2 has norms over all heads."""
    verified("Olmo2", replace(tensor_plan(2, sequence=True, clip_norm=0.5), recompute=Recompute(policy=policy)))


@ranks(2)
def test_samples_and_tokens_in_one_dim_are_refused() -> None:
    """OPT joins them before its MLP."""
    sizes = {**SIZES, "ffn_dim": 20, "word_embed_proj_dim": 24, "dropout": 0.0}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))
    with pytest.raises(ModelError, match="given a tensor of .8, 24. inside of a block.*must be .samples, tokens"):
        make_trainer(model, tensor_plan(2, sequence=True), example=token_batch(4)[0])


@ranks(2)
def test_recomputed() -> None:
    verified("Llama", replace(tensor_plan(2, sequence=True), recompute=Recompute(policy="full")))


@pytest.mark.long
@ranks(4)
def test_beside_a_pipeline() -> None:
    verified("Llama", tensor_plan(2, pipeline=2, microbatches=2))
