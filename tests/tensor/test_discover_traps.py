"""Code between two layers that is tempting to split: each case stays whole, or is split right.

`first` widens to N features, `last` contracts what the code makes of them. Splits are run and compared with the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from discovered import run_split
from torch import Tensor, nn

from weft.parallel.tensor.discovery.find import find

B, T, C, N = 2, 6, 8, 24
Code = Callable[[Any, Tensor], Tensor]


class Between(nn.Module):
    """Two layers, the code between them, and other modules or tensors that it needs."""

    def __init__(self, code: Code, num_last: int = N, **others: Any) -> None:
        super().__init__()
        self.code = code
        self.first, self.last = nn.Linear(C, N), nn.Linear(num_last, C)
        for name, other in others.items():
            if isinstance(other, Tensor) and not isinstance(other, nn.Parameter):
                self.register_buffer(name, other)
            else:
                setattr(self, name, other)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def learned(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Through(torch.autograd.Function):
    """A user's own autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def write_first(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h[..., 0] = 0.0
    return m.last(h)


def add_input(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h += torch.cat((x, x.flip(1), x), -1)
    return m.last(h)


def write_parts(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    made = h.new_zeros(B, T, N)
    made[..., :8] = h[..., :8].relu()
    made[..., 8:] = h[..., 8:]
    return m.last(made)


def tells_heads_apart(m: Any, x: Tensor) -> Tensor:
    heads = m.first(x).view(B, T, 6, 4)
    return m.last(torch.cat([heads[:, :, k] * k for k in range(6)], -1).roll(1, -1))


def heads_in_the_batch(m: Any, x: Tensor) -> Tensor:
    h = m.first(x).view(B, T, 6, 4).transpose(1, 2).reshape(B * 6, T, 4).softmax(1)
    return m.last(h.view(B, 6, T, 4).transpose(1, 2).reshape(B, T, N))


WHOLE: dict[str, Callable[[], Between]] = {
    "softmax": lambda: Between(lambda m, x: m.last(m.first(x).softmax(-1))),
    "layer norm": lambda: Between(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.LayerNorm(N)),
    "layer norm by size": lambda: Between(lambda m, x: m.last(F.layer_norm(h := m.first(x), h.shape[-1:]))),
    "residual": lambda: Between(
        lambda m, x: m.last(m.first(x) + m.other(x.flip(1)).softmax(-1)), other=nn.Linear(C, N)
    ),
    "flip": lambda: Between(lambda m, x: m.last(m.first(x).flip(-1))),
    "roll": lambda: Between(lambda m, x: m.last(m.first(x).roll(1, -1))),
    "running sum": lambda: Between(lambda m, x: m.last(m.first(x).cumsum(-1))),
    "gated by its sum": lambda: Between(lambda m, x: m.last((h := m.first(x)) * h.sum(-1, keepdim=True))),
    "largest": lambda: Between(lambda m, x: m.last((h := m.first(x)) * (h >= h.topk(5, -1).values[..., -1:]))),
    "above the mean": lambda: Between(lambda m, x: m.last(torch.where((h := m.first(x)) > h.mean(), h, 0.0))),
    "neighbours": lambda: Between(lambda m, x: m.last(F.avg_pool1d(m.first(x), 3, 1, 1))),
    "shuffled": lambda: Between(lambda m, x: m.last(m.first(x)[..., m.order]), order=torch.randperm(N)),
    "told apart": lambda: Between(lambda m, x: m.last(m.first(x) * torch.arange(N))),
    "told apart by size": lambda: Between(lambda m, x: m.last((h := m.first(x)) * torch.arange(h.shape[-1]))),
    "divided by size": lambda: Between(lambda m, x: m.last((h := m.first(x)) / h.shape[-1])),
    "divided by count": lambda: Between(lambda m, x: m.last((h := m.first(x)) / h.numel())),
    "times an attribute": lambda: Between(lambda m, x: m.last(m.first(x) * m.last.in_features)),
    "times a weight's size": lambda: Between(lambda m, x: m.last(m.first(x) * m.first.weight.shape[0])),
    "decided by size": lambda: Between(lambda m, x: m.last(h if (h := m.first(x)).shape[-1] == N else -h)),
    "with all others": lambda: Between(lambda m, x: m.last((h := m.first(x)) @ h.mT @ h)),
    "each with each": lambda: Between(
        lambda m, x: m.last(((h := m.first(x))[..., None] * h[..., None, :]).flatten(2)), num_last=N * N
    ),
    "half needed whole": lambda: Between(lambda m, x: m.last((h := m.first(x))[..., C:]) + h[..., :C], num_last=N - C),
    "one written": lambda: Between(write_first),
    "added to in place": lambda: Between(add_input),
    "weight elsewhere": lambda: Between(lambda m, x: m.last(m.first(x)) + m.first.weight.square().sum()),
    "weight transposed": lambda: Between(lambda m, x: F.linear(m.first(x).relu(), m.first.weight.t())),
    "beside something whole": lambda: Between(
        lambda m, x: m.last(torch.cat((m.first(x), m.other(x)), -1)), num_last=N + 1, other=nn.Linear(C, 1)
    ),
    "learned, also elsewhere": lambda: Between(lambda m, x: m.last(m.first(x) * m.p) * m.p, p=learned(1)),
    "gated by what is whole": lambda: Between(
        lambda m, x: m.last(m.first(y := m.other(x)) * y[..., :1]), other=nn.Linear(C, C)
    ),
    "gated by all": lambda: Between(
        lambda m, x: m.last(m.first(y := x * m.p) * y.mean(-1, keepdim=True)), p=learned(C)
    ),
    "somebody's own function": lambda: Between(lambda m, x: m.last(Through.apply(m.first(x)))),
    "heads told apart": lambda: Between(tells_heads_apart),
    "a function nobody knows": lambda: Between(
        lambda m, x: m.last(torch.special.logsumexp(m.first(x), 1, keepdim=True))
    ),
}

SPLIT: dict[str, Callable[[], Between]] = {
    "other dims flipped": lambda: Between(
        lambda m, x: m.last(m.first(x).flip(1).unflatten(2, (6, 4)).flip(3).flatten(2))
    ),
    "straddling view": lambda: Between(lambda m, x: m.last(m.first(x).view(B, T * 3, 8).softmax(1).view(B, T, N))),
    "half of the features": lambda: Between(lambda m, x: m.last(m.first(x)[..., : N // 2]), num_last=N // 2),
    "unequal parts": lambda: Between(
        lambda m, x: m.last((h := m.first(x))[..., :8]) + m.rest(h[..., 8:]), num_last=8, rest=nn.Linear(16, C)
    ),
    "every other one": lambda: Between(
        lambda m, x: m.last(torch.stack((-(h := m.first(x))[..., 1::2], h[..., ::2]), -1).flatten(2))
    ),
    "another order": lambda: Between(
        lambda m, x: m.last((m.first(x).view(B, T, 6, 4) * m.g(x).view(B, T, 4, 6).mT).flatten(2)), g=nn.Linear(C, N)
    ),
    "heads in the batch": lambda: Between(heads_in_the_batch),
    "a layer for each head": lambda: Between(
        lambda m, x: m.last(m.own(m.first(x).unflatten(-1, (6, 4))).flatten(2)), own=nn.Linear(4, 4)
    ),
    "weights by head": lambda: Between(
        lambda m, x: m.last(torch.einsum("bthd,hde->bthe", m.first(x).view(B, T, 6, 4), m.p).flatten(2)),
        p=learned(6, 4, 4),
    ),
    "gate of one": lambda: Between(lambda m, x: m.last(m.first(x) * m.gate(x).sigmoid()), gate=nn.Linear(C, 1)),
    "learned scales": lambda: Between(
        lambda m, x: m.last(m.first(x) * m.p.exp().view(1, N) * m.s), p=learned(N), s=learned(1)
    ),
    "parts written": lambda: Between(write_parts),
    "a share of a constant": lambda: Between(lambda m, x: m.last(m.first(x) + x @ m.wide), wide=torch.randn(C, N)),
    "repeated": lambda: Between(lambda m, x: m.last(m.first(x).repeat(1, 1, 2)), num_last=2 * N),
    "normed over tokens": lambda: Between(lambda m, x: m.last((h := m.first(x)) / h.std(1, keepdim=True))),
    "tokens mixed by channel": lambda: Between(
        lambda m, x: m.last(m.mix(m.first(x).mT).mT), mix=nn.Conv1d(N, N, 3, padding=1, groups=N)
    ),
    "complex numbers": lambda: Between(
        lambda m, x: m.last(
            torch.view_as_real(torch.view_as_complex(m.first(x).view(B, T, 6, 2, 2)) * (1 + 1j)).flatten(2)
        )
    ),
    "called twice": lambda: Between(lambda m, x: m.last(m.first(x).relu()) + m.last(m.first(-x).tanh())),
    "gated units": lambda: Between(lambda m, x: m.last(F.glu(m.first(x))), num_last=N // 2),
    "mask made inside": lambda: Between(
        lambda m, x: m.last(m.first(x).masked_fill((x[..., :1] > 0).expand(B, T, N), 0.0))
    ),
    "without gradient": lambda: Between(lambda m, x: m.last(m.first(x) * m.first(x).detach())),
}


@pytest.mark.sampled(27)
@pytest.mark.parametrize("name", [*WHOLE, *SPLIT])
def test_it_is_left_whole_or_split_right(name: str) -> None:
    model = {**WHOLE, **SPLIT}[name]().double()
    x = torch.randn(B, T, C, dtype=torch.float64)
    for tensor in (2, 3):
        regions = find(model, lambda meta_copy: meta_copy(x), tensor=tensor).regions
        assert bool(regions) == (name in SPLIT)
        assert run_split(model, regions, tensor, x) < 1e-10


def test_compiled_code_is_not_trusted() -> None:
    with pytest.warns(DeprecationWarning):
        compiled = torch.jit.script(_scripted)
    model = Between(lambda m, x: m.last(compiled(m.first(x))))
    assert find(model, lambda meta_copy: meta_copy(torch.randn(B, T, C)), tensor=2).regions == ()


def _scripted(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)
