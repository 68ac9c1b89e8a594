"""Regions of Hugging Face models found from their dataflow alone, also of those that ship a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from discovered import run_split
from torch import Tensor, nn

from weft.parallel.tensor.discovery.find import find

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, intermediate_size=36,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
OLD_SIZES: dict[str, Any] = dict(
    vocab_size=50, n_embd=24, n_layer=1, n_head=6, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=4)

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT2": ("LMHeadModel", OLD_SIZES, 4),
    "GPTBigCode": ("ForCausalLM", OLD_SIZES, 4),
    "GPTJ": ("ForCausalLM", OLD_SIZES | {"rotary_dim": 4}, 4),
    "GPTNeoX": ("ForCausalLM", SIZES, 4),
    "Llama": ("ForCausalLM", GROUPED, 4),
    "Qwen3": ("ForCausalLM", GROUPED, 4),
    "Gemma": ("ForCausalLM", GROUPED | {"num_key_value_heads": 1}, 2),
    "OPT": ("ForCausalLM", SIZES | {"ffn_dim": 36, "word_embed_proj_dim": 24, "dropout": 0.0}, 4),
    "Bert": ("ForMaskedLM", SIZES, 4),
    "Albert": ("ForMaskedLM", SIZES | {"embedding_size": 12, "num_hidden_layers": 2}, 4),
    "DistilBert": ("ForMaskedLM", dict(vocab_size=50, dim=24, n_layers=1, n_heads=6, hidden_dim=36, dropout=0.0,
                                       attention_dropout=0.0), 4),
}  # fmt: skip
"""Class suffix, sizes and number of regions by kind of model: attention, MLP, often embedding and head."""


class Logits(nn.Module):
    """Returns only the output that a loss takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(MODELS))
def test_it_is_split_right(kind: str) -> None:
    purpose, sizes, num_regions = MODELS[kind]
    model = Logits(getattr(transformers, kind + purpose)(getattr(transformers, f"{kind}Config")(**sizes))).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, 50, (2, 7))
    for tensor in (2, 4):
        regions = find(model, lambda meta_copy: meta_copy(tokens), tensor=tensor).regions
        assert len(regions) == num_regions
        assert run_split(model, regions, tensor, tokens) < 1e-5  # some of their norms work in float32
