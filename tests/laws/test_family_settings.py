"""Settings of Hugging Face models that were not verified, or ended in an error of another kind, and those refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import GROUPED, PLANS, SIZES, recomputed, text_batch
from meshes import verify
from oracle import ADAMW, make_trainer, sequence_plan
from ranks import ranks

from weft.errors import ModelError
from weft.plan.plan import Plan

EXPERTS = GROUPED | dict(
    num_hidden_layers=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
)
DYNAMIC = dict(max_position_embeddings=4, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))
OPT = dict(
    vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
    word_embed_proj_dim=32, attention_dropout=0.1, layerdrop=0.5,
)  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", OPT),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2 experts": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "dynamic rotation": ("Llama", GROUPED | DYNAMIC | {"num_hidden_layers": 2}),
    "persimmon": ("Persimmon", SIZES),
    "llama": ("Llama", GROUPED | {"num_hidden_layers": 2}),
}
SELECTIVE = recomputed(sequence_plan(tensor=2), "selective")


def make_model(name: str, **changes: Any) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | changes))


@pytest.mark.sampled(2, long=3)
@ranks(2)
@pytest.mark.parametrize(
    ("name", "plan", "note"),
    [
        ("opt", PLANS["data"][1], "draws itself was left out, or a constant (dropout, rand)"),
        ("mixtral", PLANS["data"][1], "were taken group by group"),
        pytest.param("mixtral", PLANS["zero 3 selective"][1], "group by group", marks=pytest.mark.long),
        pytest.param("qwen2 experts", PLANS["ring"][1], "group by group", marks=pytest.mark.long),
        ("dynamic rotation", PLANS["tensor"][1], ""),
        pytest.param("persimmon", SELECTIVE, "", marks=pytest.mark.long),
        ("llama", SELECTIVE, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equal_to_one_process(name: str, plan: Plan, note: str) -> None:
    batches = [text_batch(size, seed=seed) for seed, size in enumerate((8, 6))]
    outcome = verify(
        make_model(name), plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu"
    ).require()
    assert note in " ".join(outcome.notes) and bool(outcome.notes) == bool(note)


def balance_loss(output: Any, targets: Any) -> Any:
    del targets
    return output.aux_loss


@ranks(2)
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("cross-entropy", "that of the logits alone; set output_router_logits = false"),
        (balance_loss, "2 parts of a batch, of which each makes its own, do not add up"),
    ],
    ids=["left out", "of parts"],
)
def test_a_balance_loss_is_never_left_out_or_taken_of_parts(loss: Any, words: str) -> None:
    model = make_model("mixtral", output_router_logits=True)
    with pytest.raises(ModelError, match=words):
        make_trainer(model, PLANS["data"][1], loss=loss)


@ranks(2)
def test_experts_are_not_split_over_tensor() -> None:
    with pytest.raises(ModelError, match="moe_tp_experts.*set .axes. tensor = 1"):
        make_trainer(make_model("mixtral"), PLANS["tensor"][1], example=text_batch(2)[0])
