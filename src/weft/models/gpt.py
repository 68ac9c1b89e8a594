"""A decoder-only transformer: rotary or learned positions, grouped heads, tied or free head, one fused attention call.

Nothing here knows of ranks: parallel code finds `embedding`, `blocks`, `norm` and `head`, and may replace any module
(`attention.attend`, for example, which sees whole heads only). Positions enter in one place, `GPT.embed`; a block is
given its activations and their rows of the rotary table. There is no cache of keys and values, no mask but the causal
one, and no dropout on attention weights.

Dims in names: B samples, T tokens, C hidden, H query heads, G key/value heads, D head, E half a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.blueprint import Blueprint, Positions
from weft.errors import ModelError, nearest
from weft.models.gpt_regions import gpt_regions
from weft.models.sizes import divisors, flag_problems, size_problems

INIT_STD = 0.02
NORM_EPS = 1e-5
ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT."""

    vocab_size: int = 256
    """Size of the vocabulary; 256: bytes."""
    context: int = 256
    """Longest sequence, in tokens."""
    num_layers: int = 4
    """Number of blocks."""
    hidden: int = 256
    """Width of the activations between blocks."""
    heads: int = 4
    """Query heads of each block; they share `hidden` evenly."""
    kv_heads: int = 0
    """Key and value heads, each shared by heads / kv_heads query heads; 0: as many as heads."""
    mlp_hidden: int = 0
    """Width inside the MLP; 0: four times hidden."""
    positions: str = "rotary"
    """Position encoding: rotary | learned."""
    norm: str = "rms"
    """Kind of norm: rms | layer."""
    bias: bool = False
    """Linear layers and layer norms have a bias; the head never has."""
    tied: bool = True
    """The head shares its weight with the embedding."""
    dropout: float = 0.0
    """Probability of dropout after the embedding and after each half of a block."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        return self.mlp_hidden or 4 * self.hidden

    def __post_init__(self) -> None:
        minimum_of = dict.fromkeys(("vocab_size", "context", "num_layers", "hidden", "heads"), 1)
        problems = size_problems(self, minimum_of | {"kv_heads": 0, "mlp_hidden": 0})
        if not problems:
            problems += self._head_problems()
        for name, known in (("positions", ("rotary", "learned")), ("norm", ("rms", "layer"))):
            if getattr(self, name) not in known:
                problems.append(f"{name} is {getattr(self, name)!r}; {nearest(str(getattr(self, name)), known)}")
        problems += flag_problems(self, ("bias", "tied"))
        if not isinstance(self.dropout, float | int) or not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout!r}; it must be at least 0 and less than 1")
        if problems:
            raise ModelError(problems)

    def _head_problems(self) -> list[str]:
        problems = []
        if self.hidden % self.heads:
            problems.append(f"heads {self.heads} do not divide hidden {self.hidden}; these do: {divisors(self.hidden)}")
        elif self.positions == "rotary" and self.head_dim % 2:
            problems.append(
                f"a head of {self.hidden} / {self.heads} = {self.head_dim} is odd and cannot be rotated; "
                'change hidden or heads, or take positions = "learned"'
            )
        if self.heads % self.num_kv_heads:
            problems.append(
                f"kv_heads {self.kv_heads} do not divide heads {self.heads}; these do: {divisors(self.heads)}"
            )
        return problems


def gpt2_124m() -> GPTConfig:
    """GPT-2 small, its 50257 tokens padded to a multiple of 128."""
    return GPTConfig(
        vocab_size=50304,
        context=1024,
        num_layers=12,
        hidden=768,
        heads=12,
        positions="learned",
        norm="layer",
        bias=True,
    )


class RotaryTable(nn.Module):
    """cos and sin of every position's angles, computed once.

    The table is not saved and never rounded: moving or casting the model recomputes it, in float32 at least. So does
    materialising a model that was built on the meta device.
    """

    table_2TE: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context, self.head_dim = config.context, config.head_dim
        table_2TE = self._compute(torch.get_default_dtype(), torch.get_default_device())
        self.register_buffer("table_2TE", table_2TE, persistent=False)

    def _compute(self, model_dtype: torch.dtype, device: torch.device) -> Tensor:
        maker = torch.device("meta" if device.type == "meta" else "cpu")
        pairs_E = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=maker)
        places_T = torch.arange(self.context, dtype=torch.float64, device=maker)
        angles_TE = torch.outer(places_T, ROTARY_BASE ** (-pairs_E / self.head_dim))
        dtype = torch.promote_types(model_dtype, torch.float32)
        return torch.stack((angles_TE.cos(), angles_TE.sin())).to(device=device, dtype=dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table_2TE = self._compute(self.table_2TE.dtype, self.table_2TE.device)
        return self

    def forward(self, positions_T: Tensor | None, num_tokens: int) -> Tensor:
        """The rows of these positions; None: the first `num_tokens`."""
        return self.table_2TE[:, :num_tokens] if positions_T is None else self.table_2TE[:, positions_T]


def rotate(x_BTHD: Tensor, table_2TE: Tensor) -> Tensor:
    """Turn each pair (i, i + E) of a head's entries by its position's angle."""
    cos_T1E, sin_T1E = table_2TE[0].unsqueeze(1), table_2TE[1].unsqueeze(1)
    a_BTHE, b_BTHE = x_BTHD.chunk(2, dim=-1)
    turned = torch.cat((a_BTHE * cos_T1E - b_BTHE * sin_T1E, b_BTHE * cos_T1E + a_BTHE * sin_T1E), dim=-1)
    return turned.to(x_BTHD.dtype)


class CausalAttention(nn.Module):
    """softmax(q kᵀ / √D) v, each token looking at itself and those before it."""

    def forward(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        if q_BHTD.shape[0] == 0:
            # torch 2.11's fused CUDA kernels return None for an empty batch.
            return q_BHTD
        grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Self-attention with one fused projection.

    Rows of `qkv.weight`: first the H query heads, then the G key heads, then the G value heads, D rows each. Query
    head h uses key head h // (H / G). Columns of `out.weight`: the H heads, D columns each. To keep only some heads,
    keep those rows and columns and set `heads` and `kv_heads` accordingly.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.bias)
        self.attend = CausalAttention()
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden, bias=config.bias)

    def forward(self, x_BTC: Tensor, rotary_2TE: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x_BTC)
        num_samples, num_tokens = qkv.shape[:2]
        heads = qkv.view(num_samples, num_tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v_BTGD = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if rotary_2TE is not None:
            qk = rotate(qk, rotary_2TE)
        q_BTHD, k_BTGD = qk.split((self.heads, self.kv_heads), dim=2)
        mixed_BHTD = self.attend(q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2))
        mixed = mixed_BHTD.transpose(1, 2).reshape(num_samples, num_tokens, self.heads * self.head_dim)
        return cast(Tensor, self.out(mixed))


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.hidden, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x_BTC), approximate="tanh")))


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=NORM_EPS)
    return nn.LayerNorm(config.hidden, eps=NORM_EPS, bias=config.bias)


class Block(nn.Module):
    """Attention, then MLP, each on a normed copy and added back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, rotary_2TE: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rotary_2TE))
        return x_BTC + cast(Tensor, self.dropout(self.mlp(self.mlp_norm(x_BTC))))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden) if learned else None
        self.rotary = None if learned else RotaryTable(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal, with residual projections scaled by 1 / √(2L)."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.endswith(("attention.out", "mlp.down"))
                # A tied head is the embedding, which is initialised already.
                if module is not self.head or module.weight is not self.embedding.weight:
                    nn.init.normal_(module.weight, std=residual_std if is_residual else INIT_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # torch makes two parameters of a tied one when it leaves the meta device.
        tied = self.head.weight is self.embedding.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.head.weight = self.embedding.weight
        return self

    def weft_blueprint(self) -> Blueprint:
        children = [name for name, _ in self.named_children()]
        place = children.index("blocks")
        return Blueprint(
            prelude=tuple(children[:place]),
            blocks=tuple(f"blocks.{number}" for number in range(len(self.blocks))),
            postlude=tuple(children[place + 1 :]),
            regions=gpt_regions(self.config),
            positions=Positions(argument="positions_T", longest=self.config.context),
        )

    def embed(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(inputs of the first block, rotary rows of all blocks). Without positions: 0 to T - 1."""
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.config.context:
            raise ModelError(
                f"a sequence of {num_tokens} tokens is longer than the model's context of {self.config.context}; "
                "cut it, or build the model with a larger context"
            )
        x_BTC = self.embedding(tokens_BT)
        if self.positions is not None:
            first = torch.arange(num_tokens, device=tokens_BT.device) if positions_T is None else positions_T
            x_BTC = x_BTC + self.positions(first)
        rotary_2TE = None if self.rotary is None else self.rotary(positions_T, num_tokens)
        return self.dropout(x_BTC), rotary_2TE

    def forward(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Logits_BTV. The causal mask follows the order in which tokens are given, whatever their positions."""
        x_BTC, rotary_2TE = self.embed(tokens_BT, positions_T)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotary_2TE)
        return cast(Tensor, self.head(self.norm(x_BTC)))
