"""Models without declared regions get Megatron's splits by discovery, and equal one process with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import verify
from oracle import ADAMW, Batch, image_batch, small_convnet, tensor_plan, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.plan.plan import Plan
from weft.verification.verdict import Verification

VOCABULARY, HIDDEN, HEADS = 17, 16, 4


class Attention(nn.Module):
    """As nanoGPT writes it: the sizes of views come from the input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GatedAttention(nn.Module):
    """As Llama's is written: four projections, fewer key heads, norms of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, 2 * self.head_dim, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class NormedAttention(Attention):
    """As many vision transformers have it: the norm is part of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, 20, bias=False) for _ in range(2))
        self.down = nn.Linear(20, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = attention, GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(8, HIDDEN)
        self.layers = nn.ModuleList(Layer(attention()) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


class Towers(nn.Module):
    """AlexNet's two towers in small: convolutions by groups, which meet in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.conv3, self.conv4 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 9, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.conv4(F.relu(self.conv3(x))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "nanoGPT": (lambda: Transformer(Attention, tied=True), token_batch),
    "Llama": (lambda: Transformer(GatedAttention), token_batch),
    "norms inside": (lambda: Transformer(NormedAttention), token_batch),
    "convnet": (lambda: small_convnet(batch_norm=True), image_batch),
    "towers": (Towers, image_batch),
}


def verified(name: str, plan: Plan, **changes: Any) -> Verification:
    make, batch = MODELS[name]
    torch.manual_seed(2)
    batches = [batch(size, seed=seed) for seed, size in enumerate((6, 4))]
    return verify(
        make(), plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu", **changes
    ).require()


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str) -> None:
    verified(name, tensor_plan(2, clip_norm=0.5))


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("name", ["nanoGPT", "Llama", pytest.param("convnet", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(tensor_plan(4), marks=pytest.mark.long),
        tensor_plan(2, data=2, shard="parameters", clip_norm=0.5),
        tensor_plan(2, pipeline=2, microbatches=2, cuts=(1,), clip_norm=0.5),
    ],
    ids=["4", "zero 3", "pipeline"],
)
def test_four_ranks(name: str, plan: Plan) -> None:
    verified(name, plan)


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("name", ["nanoGPT", "Llama", "norms inside"])
def test_split_tokens(name: str) -> None:
    verified(name, tensor_plan(4, sequence=True, clip_norm=0.5))
