"""Small transformers that differ in positions, masks and attention code."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from weft.blueprint import Blueprint, Positions

VOCABULARY, HIDDEN, HEADS, CONTEXT = 17, 16, 4, 16


class Block(nn.Module):
    """Pre-norm attention and MLP; `way` selects how attention is computed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attend(*heads, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length = q.shape[2]
        triangle = torch.ones(length, length, dtype=torch.bool).tril()
        match self.way:
            case "causal":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "full":
                return F.scaled_dot_product_attention(q, k, v)
            case "imported":
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            case "three dims":
                flat = (one.flatten(0, 1) for one in (q, k, v))
                return F.scaled_dot_product_attention(*flat, is_causal=True).view_as(q)
            case "padding":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            case "dropout":
                return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            case "triangle":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=triangle)
            case "cross":
                return F.scaled_dot_product_attention(q, k[:, :, :-1], v[:, :, :-1])
            case "by hand":
                scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~triangle, -math.inf)
                return scores.softmax(-1) @ v
        raise AssertionError(self.way)


class Transformer(nn.Module):
    """`where` selects the source of positions: module, table, learned table, hidden, shift or none."""

    def __init__(self, way: str = "causal", where: str = "none", *, checkpoints: bool = False) -> None:
        super().__init__()
        self.where = where
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(CONTEXT, HIDDEN) if where in ("module", "hidden") else None
        self.register_buffer("table", torch.linspace(-1, 1, CONTEXT * HIDDEN).view(CONTEXT, HIDDEN))
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def weft_blueprint(self) -> Blueprint:
        positions = {
            "module": Positions(modules=("places",)),
            "table": Positions(tables=(("table", 0),)),
        }.get(self.where)
        return Blueprint(
            prelude=("embedding",), blocks=("blocks.0", "blocks.1"), postlude=("head",), positions=positions
        )

    def forward(self, tokens: Tensor, is_text: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        if self.places is not None:
            x = x + self.places(torch.arange(length))
        if self.where == "table":
            x = x + self.table[:length]
        if self.where == "shift":
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        mask = None if is_text is None else is_text[:, None, None, :]
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpoints else block(x, mask)
        if self.where == "pooled":
            x = x.mean(1)
        made: Tensor = self.head(x)
        return made


def batch(num_samples: int, num_tokens: int, seed: int = 0, **extra: Any) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (num_samples, num_tokens + 1), generator=generator)
    inputs: Any = drawn[:, :-1].clone()
    return ({"tokens": inputs, **extra} if extra else inputs), drawn[:, 1:].clone()


@dataclasses.dataclass
class Answer:
    scores: Tensor


class Wrapped(nn.Module):
    """A transformer of torch's own layers that returns its output in an object."""

    def __init__(self, *, in_object: bool = False) -> None:
        super().__init__()
        self.in_object = in_object
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        scores = self.head(self.encoder(self.embedding(tokens)))
        return Answer(scores=scores) if self.in_object else scores


class RotaryInside(nn.Module):
    """A GPT with usual initial values and rotary positions taken from the shape of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.qkv = nn.Linear(64, 192, bias=False)
        self.out = nn.Linear(64, VOCABULARY, bias=False)
        for module in (self.embedding, self.qkv, self.out):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.qkv(self.embedding(tokens)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        angles = torch.outer(torch.arange(tokens.shape[1]), 10000.0 ** (-torch.arange(8) / 8)).to(heads.dtype)
        q, k = (
            torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
            for a, b in (one.chunk(2, -1) for one in heads[:2])
        )
        mixed = F.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class NanoAttention(nn.Module):
    """Attention as in nanoGPT: sizes are read from the input and passed to view."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (one.view(B, T, HEADS, C // HEADS).transpose(1, 2) for one in self.c_attn(x).split(HIDDEN, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        made: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return made


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(HIDDEN), NanoAttention()
        self.ln_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.h = nn.ModuleList(NanoBlock() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def weft_blueprint(self) -> Blueprint:
        return Blueprint(
            prelude=("wte", "wpe"),
            blocks=("h.0", "h.1"),
            postlude=("lm_head",),
            positions=Positions(modules=("wpe",)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        made: Tensor = self.lm_head(x)
        return made


class Lengths(nn.Module):
    """Makes its padding mask from the lengths of the samples and its own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer("padding")

    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        return self.inner(tokens, torch.arange(tokens.shape[1]) < lengths[:, None])
