"""Small Hugging Face models on shuffled tokens, like those of a rank, and attention that restores their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from weft.models.hugging_face_inputs import inputs_of
from weft.parallel.attention.attention import Pass
from weft.parallel.sequence.hugging_face import use_registry
from weft.parallel.wrapping.replacements import Replacements
from weft.plan.partition.sequence import Band, make_places

NUM_TOKENS, VOCABULARY = 12, 30
ORDER = torch.tensor([0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8])
"""Order of the tokens: those of two zigzag ranks, one after the other."""

SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=NUM_TOKENS, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_dropout=0.0,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=6)
GPT2_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=NUM_TOKENS, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Qwen3": ("ForCausalLM", GROUPED | {"use_sliding_window": True, "max_window_layers": 1,
                                        "sliding_window": NUM_TOKENS}),
    "Mistral": ("ForCausalLM", GROUPED | {"sliding_window": NUM_TOKENS}),
    "Phi3": ("ForCausalLM", GROUPED),
    "Gemma": ("ForCausalLM", GROUPED | {"num_key_value_heads": 1}),
    "GPT2": ("LMHeadModel", GPT2_SIZES),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "OPT": ("ForCausalLM", SIZES | {"ffn_dim": 20, "word_embed_proj_dim": 24, "dropout": 0.0}),
    "Bert": ("ForMaskedLM", SIZES),
    "Roberta": ("ForMaskedLM", SIZES | {"max_position_embeddings": NUM_TOKENS + 1}),
    "Gemma2": ("ForCausalLM", GROUPED | {"sliding_window": 4, "layer_types": LAYERS, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("ForCausalLM", GROUPED | {"sliding_window": 4, "layer_types": LAYERS}),
    "Cohere2": ("ForCausalLM", GROUPED | {"sliding_window": 4, "layer_types": LAYERS}),
    "Bloom": ("ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 4}),
    "Mpt": ("ForCausalLM", {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}),
    "GptOss": ("ForCausalLM", GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1,
                                         "sliding_window": NUM_TOKENS}),
    "GPTJ": ("ForCausalLM", GPT2_SIZES | {"rotary_dim": 4}),
    "Falcon": ("ForCausalLM", SIZES),
    "T5": ("ForConditionalGeneration", {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}),
}  # fmt: skip


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    purpose, sizes = MODELS[kind]
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**sizes | changes)
    model = getattr(transformers, kind + purpose)(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.train()


def tokens_of(num_samples: int = 2) -> Tensor:
    return torch.randint(1, VOCABULARY, (num_samples, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


class Shuffled:
    """Attention over tokens that are in another order than in their sequence."""

    def __init__(self, now: Pass) -> None:
        self.now = now
        self.num_calls = 0
        self.bands: list[Band] = []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        band: Band | None,
        softcap: float | None,
    ) -> Tensor:
        assert query.shape[2] == key.shape[2] == NUM_TOKENS
        self.num_calls += 1
        back = ORDER.argsort()
        mask = torch.ones(query.shape[0], 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
        if is_causal:
            mask = mask.tril()
        if self.now.key_mask_BS is not None:
            mask = mask & self.now.key_mask_BS[:, None, None, :]
        if self.now.documents_BS is not None:
            mask = mask & (self.now.documents_BS[:, None, :, None] == self.now.documents_BS[:, None, None, :])
        if band is not None:
            self.bands.append(band)
            behind = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
            mask = mask & (behind <= band.before) & (behind >= -band.after)
        q, k, v = (t[:, :, back] for t in (query, key, value))
        if softcap is None:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            repeats = q.shape[1] // k.shape[1]
            k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
            scores = softcap * (q @ k.mT * scale / softcap).tanh()
            mixed = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return mixed[:, :, ORDER]


def pass_of(**masks: Tensor | None) -> Pass:
    return Pass(places=make_places(NUM_TOKENS, ring=1, ulysses=1, layout="zigzag"), **masks)


@contextmanager
def switched_on(model: nn.Module, now: Pass) -> Iterator[Shuffled]:
    shuffled = Shuffled(now)
    on = use_registry(model, shuffled.attend, now=lambda: now, numbers=lambda where: ORDER.to(where))
    assert on is not None
    with Replacements(find=on):
        yield shuffled


def shuffled_logits(model: Any, inputs: Any) -> Tensor:
    """Output for the tokens in their right order."""
    read = inputs_of(model, inputs)
    assert read is not None
    ours = {name: value[:, ORDER] if name in read.along else value for name, value in read.inputs.items()}
    with switched_on(model, pass_of(key_mask_BS=read.key_mask_BS, documents_BS=read.documents_BS)) as shuffled:
        logits: Tensor = model(**ours).logits
    assert shuffled.num_calls == 2
    return logits[:, ORDER.argsort()]


class Wrapped(nn.Module):
    """A model inside a user's module."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, **self.given).logits
        return logits
