"""The tensor regions of a GPT, as plain data beside the model, which does not know of ranks.

Attention is split by heads, the MLP by its inner features, embedding and head by tokens of the vocabulary. Learned
positions and norms stay whole: they are small, and every rank needs their outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.plan.partition.tensor import Count, Cut, Region, Section

if TYPE_CHECKING:
    from weft.models.gpt import GPTConfig


def gpt_regions(config: GPTConfig) -> tuple[Region, ...]:
    """In the order of use: embedding, attention and MLP of each block, head."""
    vocabulary = (Section(num_units=config.vocab_size),)
    head_weight = "embedding.weight" if config.tied else "head.weight"
    inside = []
    for number in range(config.num_layers):
        inside += [_attention(f"blocks.{number}.attention", config), _mlp(f"blocks.{number}.mlp", config)]
    return (
        Region(rows=("embedding",), cuts=(Cut(name="embedding.weight", dim=0, sections=vocabulary),)),
        *inside,
        Region(columns=(("head",),), cuts=(Cut(name=head_weight, dim=0, sections=vocabulary),), is_output=True),
    )


def _attention(name: str, config: GPTConfig) -> Region:
    heads = Section(num_units=config.heads, unit=config.head_dim)
    kv_heads = Section(num_units=config.num_kv_heads, unit=config.head_dim)
    return Region(
        columns=((f"{name}.qkv",),),
        rows=(f"{name}.out",),
        cuts=(
            *_column_cuts(f"{name}.qkv", (heads, kv_heads, kv_heads), bias=config.bias),
            Cut(name=f"{name}.out.weight", dim=1, sections=(heads,)),
        ),
        counts=(
            Count(module=name, attribute="heads", num_units=config.heads),
            Count(module=name, attribute="kv_heads", num_units=config.num_kv_heads),
        ),
    )


def _mlp(name: str, config: GPTConfig) -> Region:
    features = (Section(num_units=config.mlp_width),)
    return Region(
        columns=((f"{name}.up",),),
        rows=(f"{name}.down",),
        cuts=(
            *_column_cuts(f"{name}.up", features, bias=config.bias),
            Cut(name=f"{name}.down.weight", dim=1, sections=features),
        ),
    )


def _column_cuts(layer: str, sections: tuple[Section, ...], *, bias: bool) -> tuple[Cut, ...]:
    return tuple(Cut(name=f"{layer}.{part}", dim=0, sections=sections) for part in ("weight", "bias")[: 1 + bias])
