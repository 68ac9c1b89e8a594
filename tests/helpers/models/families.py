"""Tiny Hugging Face models of several families, and the batches and plans they are verified on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from meshes import verify
from oracle import ADAMW, pipeline_plan, sequence_plan
from torch import Tensor, nn

from weft.plan.plan import Plan, Recompute

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=16, pad_token_id=3, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2)
GPT2 = dict(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "tied llama": ("Llama", "ForCausalLM", GROUPED | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", GROUPED | {"head_dim": 8}),
    "mistral": ("Mistral", "ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": None}),
    "windowed mistral": ("Mistral", "ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 3}),
    "gemma 2": (
        "Gemma2", "ForCausalLM",
        GROUPED | {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "untied gpt2": ("GPT2", "LMHeadModel", GPT2 | {"tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoX", "ForCausalLM", SIZES),
    "sequential gpt-neox": ("GPTNeoX", "ForCausalLM", SIZES | {"use_parallel_residual": False}),
    "bert": ("Bert", "ForMaskedLM", SIZES),
    "bert classifier": ("Bert", "ForSequenceClassification", SIZES | {"num_labels": 64}),
    "roberta": ("Roberta", "ForMaskedLM", SIZES | {"max_position_embeddings": 20}),
    "distilbert": (
        "DistilBert", "ForMaskedLM",
        dict(vocab_size=64, dim=32, hidden_dim=48, n_layers=4, n_heads=4, max_position_embeddings=16),
    ),
    "vit": (
        "ViT", "ForImageClassification",
        dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, image_size=8,
            patch_size=2, num_channels=1, num_labels=64,
        ),
    ),
}  # fmt: skip


def make_config(family: str, **changes: Any) -> Any:
    kind, _, sizes = FAMILIES[family]
    return getattr(transformers, f"{kind}Config")(**sizes | changes)


def make_family(family: str, **changes: Any) -> Any:
    kind, purpose, _ = FAMILIES[family]
    return getattr(transformers, kind + purpose)(make_config(family, **changes))


def text_batch(num_samples: int, *, seed: int = 0, num_tokens: int = 8) -> tuple[Tensor, Tensor]:
    text = torch.randint(4, 64, (num_samples, num_tokens + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].clone(), text[:, 1:].clone()


def batch_of(family: str, num_samples: int, *, seed: int = 0) -> tuple[Any, Tensor]:
    tokens, targets = text_batch(num_samples, seed=seed)
    if family == "vit":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_samples, 1, 8, 8, generator=generator, dtype=torch.float64), targets[:, 0].clone()
    return tokens, targets[:, 0].clone() if family == "bert classifier" else targets


def padded(tokens: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A padding mask: the last sample lacks its first tokens, the first its last."""
    mask = torch.ones_like(tokens)
    mask[0, 5:], mask[-1, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}, targets.masked_fill(mask == 0, -100)


def packed(tokens: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    positions = torch.cat([torch.arange(3), torch.arange(tokens.shape[1] - 3)])
    return {"input_ids": tokens, "position_ids": positions.repeat(len(tokens), 1)}, targets


def verified(model: nn.Module, plan: Plan, batches: list[tuple[Any, Tensor]]) -> None:
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()


def recomputed(plan: Plan, policy: str) -> Plan:
    return dataclasses.replace(plan, recompute=Recompute(policy=policy))


def pipeline_step(num_stages: int = 2, **settings: Any) -> Plan:
    return pipeline_plan(num_stages, **{"microbatches": 2, **settings})


PLANS: dict[str, tuple[int, Plan]] = {
    "data": (2, sequence_plan(data=2)),
    "zero 1": (2, sequence_plan(data=2, shard="optimizer")),
    "zero 3": (2, sequence_plan(data=2, shard="parameters", microbatches=2, reshard="microbatch")),
    "zero 3 full": (2, recomputed(sequence_plan(data=2, shard="parameters"), "full")),
    "zero 3 selective": (2, recomputed(sequence_plan(data=2, shard="parameters"), "selective")),
    "1f1b": (2, pipeline_step()),
    "interleaved": (2, pipeline_step(schedule="interleaved", chunks=2, cuts=(1, 2, 3))),
    "zero-bubble": (2, pipeline_step(schedule="zero-bubble")),
    "1f1b full": (2, recomputed(pipeline_step(), "full")),
    "tensor": (2, sequence_plan(tensor=2)),
    "tensor sequence": (2, sequence_plan(tensor=2, split_tokens=True)),
    "tensor sequence full": (2, recomputed(sequence_plan(tensor=2, split_tokens=True), "full")),
    "ring": (2, sequence_plan(ring=2)),
    "ring selective": (2, recomputed(sequence_plan(ring=2), "selective")),
    "ulysses": (2, sequence_plan(ulysses=2)),
    "pipeline x tensor": (4, sequence_plan(pipeline=2, tensor=2, microbatches=2)),
    "ring x tensor sequence": (4, sequence_plan(ring=2, tensor=2, split_tokens=True)),
    "pipeline x ring": (4, sequence_plan(pipeline=2, ring=2, microbatches=2)),
    "ulysses x zero 3": (4, sequence_plan(ulysses=2, data=2, shard="parameters")),
    "pipeline x data x tensor": (8, sequence_plan(pipeline=2, data=2, tensor=2, microbatches=2)),
    "pipeline x zero 3 x tensor": (
        8, sequence_plan(pipeline=2, data=2, tensor=2, microbatches=2, shard="parameters", split_tokens=True),
    ),
    "pipeline x ring x tensor": (8, sequence_plan(pipeline=2, ring=2, tensor=2, microbatches=2)),
    "ring x ulysses x data": (8, sequence_plan(ring=2, ulysses=2, data=2)),
}  # fmt: skip
