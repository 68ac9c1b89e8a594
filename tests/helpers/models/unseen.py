"""Models that declare nothing to weft: transformers and convolutional nets in others' styles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, C, H, G, D, V = 2, 6, 24, 6, 3, 4, 40
"""Samples, tokens, width, query heads, key heads, width of a head, vocabulary."""


class NanoAttention(nn.Module):
    """Attention as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.n_head, self.n_embd = H, C
        self.register_buffer("bias", torch.tril(torch.ones(T, T)).view(1, 1, T, T))

    def forward(self, x: Tensor) -> Tensor:
        num_samples, num_tokens, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(num_samples, num_tokens, self.n_head, width // self.n_head).transpose(1, 2)
        q = q.view(num_samples, num_tokens, self.n_head, width // self.n_head).transpose(1, 2)
        v = v.view(num_samples, num_tokens, self.n_head, width // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :num_tokens, :num_tokens] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(num_samples, num_tokens, width)
        return self.c_proj(y)


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Norm(nn.Module):
    """RMS norm, hand-written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    num_samples, num_heads, num_tokens, width = x.shape
    x = x[:, :, None, :, :].expand(num_samples, num_heads, times, num_tokens, width)
    return x.reshape(num_samples, num_heads * times, num_tokens, width)


class LlamaAttention(nn.Module):
    """Attention with grouped heads, norms of queries and keys, and rotary positions."""

    def __init__(self, key_heads: int = G, how: str = "repeat_kv") -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(C, H * D, bias=False), nn.Linear(H * D, C, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(C, key_heads * D, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = Norm(D), Norm(D)
        self.times, self.how = H // key_heads, how

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, D)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        angles = torch.arange(x.shape[1])[:, None] * torch.arange(D)[None, :] / 10.0
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if self.how == "repeat_kv":
            k, v = repeat_kv(k, self.times), repeat_kv(v, self.times)
        elif self.how == "interleave":
            k, v = (one.repeat_interleave(self.times, dim=1) for one in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.how == "gqa")
        return self.o_proj(made.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


class GroupedEinsum(nn.Module):
    """Attention in which the query heads of a key head have their own dim."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(C, H * D), nn.Linear(C, 2 * G * D), nn.Linear(H * D, C)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, T, G, H // G, D)
        k, v = self.kv(x).view(B, T, 2, G, D).unbind(2)
        weights = torch.einsum("btgrd,bsgd->bgrts", q, k).softmax(-1)
        return self.o(torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(C, 2 * 32)
        else:
            self.gate, self.up = nn.Linear(C, 32), nn.Linear(C, 32)
        self.down = nn.Linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class FusedAttention(nn.Module):
    """Attention with one fused projection, in several orders of its features."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.num_heads = order, H
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        num_samples, num_tokens, width = x.shape
        made = self.qkv(x)
        if self.order == "3HD":
            heads = made.reshape(num_samples, num_tokens, 3, self.num_heads, width // self.num_heads)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
        elif self.order == "3HD indexed":
            heads = made.reshape(num_samples, num_tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = heads[0], heads[1], heads[2]
        elif self.order == "H3D":
            heads = made.view(num_samples, num_tokens, self.num_heads, 3 * D).transpose(1, 2)
            q, k, v = heads.chunk(3, dim=-1)
        else:
            parts = (made[..., :C], made[..., C : 2 * C], made[..., -C:])
            q, k, v = (one.unflatten(-1, (self.num_heads, D)).transpose(1, 2) for one in parts)
        scores = torch.matmul(q * (D**-0.5), k.mT)
        out = scores.softmax(dim=-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class LoRA(nn.Module):
    """A frozen projection with a low-rank adapter."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(num_in, num_out), nn.Linear(num_in, 4), nn.Linear(4, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class LoRAAttention(LlamaAttention):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = LoRA(C, H * D)


class BiasedAttention(nn.Module):
    """Attention with slopes per head in a buffer, a scale per head and a learned bias per head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(C, C) for _ in range(4))
        self.register_buffer("slopes", -torch.arange(1.0, H + 1).view(H, 1, 1))
        self.scale = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.table = nn.Parameter(torch.randn(H, 2 * T - 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).view(B, T, H, D).permute(0, 2, 1, 3) for one in (self.q, self.k, self.v))
        places = torch.arange(T)
        apart = (places[None, :] - places[:, None]).abs().to(x.dtype)
        learned = self.table[:, places[None, :] - places[:, None] + T - 1]
        weights = torch.softmax(q @ k.mT * self.scale + self.slopes.to(x.dtype) * apart + learned, -1)
        return self.o((weights @ v).permute(0, 2, 1, 3).reshape(B, T, C))


class PalmBlock(nn.Module):
    """Attention with one key head and an MLP in parallel, both from one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.fused = nn.Linear(C, C + 2 * D + 48, bias=False)
        self.out, self.down = nn.Linear(C, C, bias=False), nn.Linear(24, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.fused(self.norm(x)).split((C, D, D, 48), dim=-1)
        q = q.view(B, T, H, D).transpose(1, 2)
        scores = torch.einsum("bhtd,bsd->bhts", q, k) * D**-0.5
        mixed = torch.einsum("bhts,bsd->bhtd", scores.softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(B, T, C)) + self.down(F.glu(hidden))


class Residual(nn.Module):
    """A block of attention and MLP."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """Maps tokens to logits."""

    def __init__(self, *blocks: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """Maps patches to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, C, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, C)), nn.Parameter(torch.randn(1, 5, C))
        self.blocks = nn.Sequential(*(Residual(FusedAttention("3HD"), PlainMLP()) for _ in range(2)))
        self.head = nn.Linear(C, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        return self.head(self.blocks(x)[:, 0])


class AlexNet(nn.Module):
    """Two towers of grouped convolutions, joined in the third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, 3, padding=1, groups=2), nn.ReLU(inplace=True),
            nn.Conv2d(24, 16, 3, padding=1, groups=2), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(16 * 4, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(images)), 1))


class Separable(nn.Module):
    """Depthwise convolutions, norms of every kind, a slope per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 16, 1)
        self.own = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.slope, self.groups = nn.BatchNorm2d(16), nn.PReLU(16), nn.GroupNorm(8, 16)
        self.narrow = nn.Conv2d(16, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.slope(self.norm(self.own(self.wide(images))))
        return self.head(torch.relu(self.narrow(self.groups(x))).mean((2, 3)))
