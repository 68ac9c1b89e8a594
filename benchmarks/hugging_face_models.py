"""Tiny Hugging Face models of the families that have something of their own, with a loss and batches for each.

Two steps of 4 and 3 samples, so that parts are unequal. Texts have 8 tokens, and windows 3, so that windows hide
something. Dropout has its default wherever that is the family's point (`F.dropout`, LayerDrop).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS, VOCABULARY, SAMPLES, WINDOW = 8, 64, (4, 3), 3
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=16, pad_token_id=3, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2)
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
EXPERTS = GROUPED | dict(num_experts_per_tok=2, moe_intermediate_size=16)
LEGACY = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=3)
TOWERS = dict(
    projection_dim=16, text_config=SIZES | dict(eos_token_id=2),
    vision_config=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, image_size=8, patch_size=4,
    ),
)  # fmt: skip
AUDIO_SAMPLES = 400
"""Samples of sound per example of wav2vec 2."""

Batch = tuple[Any, Tensor]


def _text(num_samples: int, seed: int) -> Batch:
    text = torch.randint(4, VOCABULARY, (num_samples, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].clone(), text[:, 1:].clone()


def _padded_text(num_samples: int, seed: int) -> Batch:
    tokens, targets = _text(num_samples, seed)
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 3), "attention_mask": mask}, targets.masked_fill(mask == 0, -100)


def _two_texts(num_samples: int, seed: int) -> Batch:
    tokens, targets = _text(num_samples, seed)
    return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}, targets


def _sound(num_samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(num_samples, AUDIO_SAMPLES, generator=generator, dtype=torch.float64)
    frames = (((AUDIO_SAMPLES - 10) // 5 + 1) - 3) // 2 + 1
    return sound, torch.randint(4, (num_samples, frames), generator=generator)


def _pairs(num_samples: int, seed: int) -> Batch:
    tokens, _ = _text(num_samples, seed)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": tokens, "pixel_values": images}, torch.arange(num_samples)


def _contrastive_loss(output: Any, targets: Tensor) -> Tensor:
    """Each text belongs to the image at its own place in the batch."""
    return F.cross_entropy(output.logits_per_text, targets)


def _gathered_contrastive_loss(output: Any, targets: Tensor) -> Tensor:
    """The same over the samples of all data ranks."""
    import weft

    texts, images = weft.gather_batch(output.text_embeds), weft.gather_batch(output.image_embeds)
    return F.cross_entropy(texts @ images.mT, torch.arange(len(texts)))


def _with_reentrant_checkpoints(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one row of the table is built."""

    kind: str
    """Names the configuration: `<kind>Config`."""
    purpose: str = "ForCausalLM"
    sizes: dict[str, Any] = field(default_factory=dict)
    make_batch: Callable[[int, int], Batch] = _text
    loss: Any = "cross-entropy"
    prepare: Callable[[Any], None] | None = None

    @property
    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.kind.removesuffix("Text") + self.purpose)

    def build(self) -> nn.Module:
        """The model, with the same values in every process."""
        import transformers

        torch.manual_seed(0)
        model: Any = self.model_class(getattr(transformers, f"{self.kind}Config")(**self.sizes))
        model.train()
        if self.prepare is not None:
            self.prepare(model)
        built: nn.Module = model
        return built

    def batches(self) -> list[Batch]:
        return [self.make_batch(num_samples, seed) for seed, num_samples in enumerate(SAMPLES)]


FAMILIES: dict[str, Family] = {
    "GPT-2 (control)": Family(
        kind="GPT2", purpose="LMHeadModel",
        sizes=LEGACY | dict(n_positions=16, n_embd=32, n_layer=4, n_head=4, attn_pdrop=0.0),
    ),
    "Llama, reentrant checkpoints": Family(kind="Llama", sizes=GROUPED, prepare=_with_reentrant_checkpoints),
    "Phi-3, reentrant checkpoints": Family(kind="Phi3", sizes=GROUPED, prepare=_with_reentrant_checkpoints),
    "BERT": Family(kind="Bert", purpose="ForMaskedLM", sizes=SIZES),
    "BERT, padding": Family(kind="Bert", purpose="ForMaskedLM", sizes=SIZES, make_batch=_padded_text),
    "RoBERTa, padding": Family(
        kind="Roberta", purpose="ForMaskedLM", sizes=SIZES | dict(max_position_embeddings=20), make_batch=_padded_text
    ),
    "OPT": Family(
        kind="OPT",
        sizes=LEGACY | dict(
            hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=16,
        ),
    ),
    "T5": Family(
        kind="T5", purpose="ForConditionalGeneration", make_batch=_two_texts,
        sizes=dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, pad_token_id=3),
    ),
    "Longformer": Family(
        kind="Longformer", purpose="ForMaskedLM", sizes=SIZES | dict(attention_window=4, max_position_embeddings=20)
    ),
    "wav2vec 2": Family(
        kind="Wav2Vec2", purpose="ForAudioFrameClassification", make_batch=_sound,
        sizes=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, conv_dim=[16, 16],
            conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, num_labels=4, apply_spec_augment=False,
        ),
    ),
    "Mixtral": Family(kind="Mixtral", sizes=GROUPED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "Mixtral, output_router_logits": Family(
        kind="Mixtral", sizes=GROUPED | dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    ),
    "Qwen2-MoE": Family(
        kind="Qwen2Moe", sizes=EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=16, decoder_sparse_step=1)
    ),
    "Qwen3-MoE": Family(kind="Qwen3Moe", sizes=EXPERTS | dict(num_experts=4, head_dim=8, decoder_sparse_step=1)),
    "DeepSeek-V3": Family(
        kind="DeepseekV3",
        sizes=SIZES | dict(
            num_key_value_heads=4, num_experts_per_tok=2, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
            topk_group=1, first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        ),
    ),
    "gpt-oss": Family(
        kind="GptOss",
        sizes=GROUPED | ALTERNATING | dict(
            num_local_experts=4, num_experts_per_tok=2, head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "Llama, dynamic rotary scaling": Family(
        kind="Llama",
        sizes=GROUPED | dict(
            max_position_embeddings=6,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ),
    "CLIP, contrastive loss": Family(
        kind="CLIP", purpose="Model", make_batch=_pairs, loss=_contrastive_loss, sizes=TOWERS
    ),
    "CLIP, weft.gather_batch": Family(
        kind="CLIP", purpose="Model", make_batch=_pairs, loss=_gathered_contrastive_loss, sizes=TOWERS
    ),
    "Gemma 2": Family(kind="Gemma2", sizes=GROUPED | ALTERNATING | dict(head_dim=8, query_pre_attn_scalar=8)),
    "Gemma 3": Family(kind="Gemma3Text", sizes=GROUPED | ALTERNATING | dict(head_dim=8, query_pre_attn_scalar=8)),
    "Cohere 2": Family(kind="Cohere2", sizes=GROUPED | ALTERNATING),
    "Mistral": Family(kind="Mistral", sizes=GROUPED | dict(head_dim=8, sliding_window=WINDOW)),
    "Falcon": Family(
        kind="Falcon",
        sizes=LEGACY | dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=48),
    ),
    "Falcon, ALiBi": Family(
        kind="Falcon",
        sizes=LEGACY | dict(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=48, alibi=True,
            multi_query=False, parallel_attn=False,
        ),
    ),
    "MPT, ALiBi": Family(kind="Mpt", sizes=dict(d_model=32, n_heads=4, n_layers=4, max_seq_len=16, vocab_size=64)),
    "Bloom, ALiBi": Family(
        kind="Bloom", sizes=LEGACY | dict(hidden_size=32, n_layer=4, n_head=4)
    ),
    "OLMo 2": Family(kind="Olmo2", sizes=GROUPED),
    "Persimmon": Family(kind="Persimmon", sizes=SIZES),
}  # fmt: skip
