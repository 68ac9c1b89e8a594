"""One block of attention against its definition: outputs, log-sum-exps, and gradients given those of all keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from weft.parallel.attention import kernels as attention_kernels
from weft.parallel.attention.kernels import CPU, PRODUCTS, Kernel, attend_block, attend_block_backward

SCALE = 0.3
SHAPES = [(4, 4, 6, 6, 8, 8), (6, 2, 5, 9, 8, 8), (4, 1, 7, 7, 7, 5), (3, 3, 9, 2, 4, 6), (2, 1, 40, 40, 3, 3)]
"""H, G, T, S, D, E."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=[CPU, PRODUCTS], ids=["cpu", "products"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Both on the CPU: matrix products are what float64 on a GPU is computed with."""
    with mock.patch.object(attention_kernels, "choose_kernel", lambda *_, **__: request.param):
        yield request.param


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    heads, groups, queries, keys, width, value_width = shape
    sizes = [(heads, queries, width), (groups, keys, width), (groups, keys, value_width), (heads, queries, value_width)]
    return [torch.randn(2, *size, dtype=torch.float64).to(dtype) for size in sizes]


def masks(shape: tuple[int, ...]) -> Iterator[Tensor | None]:
    """None; keys only; any; one in which some queries see nothing."""
    queries, keys = shape[2:4]
    yield None
    yield torch.rand(2, 1, 1, keys) > 0.3
    yield torch.rand(2, 1, queries, keys) > 0.3
    blind = torch.rand(2, 1, queries, keys) > 0.3
    blind[0, 0, 1:3] = False
    blind[1] = False
    yield blind


def by_definition(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).mT * SCALE
    probabilities = scores.masked_fill(~allowed, -1e300).softmax(-1) * allowed.any(-1, keepdim=True)
    return probabilities @ v.repeat_interleave(repeats, 1), scores.masked_fill(~allowed, -math.inf).logsumexp(-1)


def allowed_pairs(shape: tuple[int, ...], is_causal: bool, mask: Tensor | None) -> Tensor:
    allowed = torch.ones(2, 1, *shape[2:4], dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    return allowed if mask is None else allowed & mask


def assert_near(found: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == true.shape
    largest = max(true.abs().max().item(), 1e-3)
    assert (found - true).abs().max().item() <= TOLERANCES[dtype] * largest  # false of NaN too


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.usefixtures("kernel")
def test_a_block_is_attention_by_its_definition(dtype: torch.dtype) -> None:
    for shape, is_causal in itertools.product(SHAPES, (False, True)):
        if is_causal and shape[2] != shape[3]:
            continue
        for mask in masks(shape):
            *inputs, grad = tensors(shape, dtype)
            out, lse = attend_block(*inputs, is_causal=is_causal, scale=SCALE, mask=mask)
            assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            leaves = [one.double().requires_grad_() for one in inputs]
            true, true_lse = by_definition(*leaves, allowed_pairs(shape, is_causal, mask))
            assert_near(out, true.detach(), dtype)
            seen = true_lse.isfinite()
            assert torch.equal(lse.isfinite(), seen) and bool((lse[~seen] == -math.inf).all())
            if seen.any():
                off = (lse[seen] - true_lse.detach()[seen]).abs().max().item()
                assert off <= (1e-12 if dtype == torch.float64 else 1e-4), "in 16 bits exp is approximate"
            found = attend_block_backward(grad, *inputs, out, lse, is_causal=is_causal, scale=SCALE, mask=mask)
            for one, expected in zip(found, torch.autograd.grad(true, leaves, grad.double()), strict=True):
                assert one.dtype == dtype
                assert_near(one, expected, dtype)


@pytest.mark.usefixtures("kernel")
def test_gradients_of_blocks_add_up_to_those_of_all_keys() -> None:
    """Each block is given the output and the log-sum-exp of all keys."""
    shape = (6, 2, 5, 9, 8, 8)
    for mask in masks(shape):
        q, k, v, grad = tensors(shape, torch.float64)
        whole = {"is_causal": False, "scale": SCALE}
        out, lse = attend_block(q, k, v, mask=mask, **whole)
        true = attend_block_backward(grad, q, k, v, out, lse, mask=mask, **whole)
        parts = [
            attend_block_backward(
                grad, q, k[:, :, cut], v[:, :, cut], out, lse, mask=None if mask is None else mask[..., cut], **whole
            )
            for cut in (slice(0, 4), slice(4, 9))
        ]
        assert_near(parts[0][0] + parts[1][0], true[0], torch.float64)
        for number in (1, 2):
            assert_near(torch.cat([part[number] for part in parts], 2), true[number], torch.float64)


@pytest.mark.usefixtures("kernel")
def test_inputs_may_be_views_of_something_larger() -> None:
    """As ulysses receives them, and as a ring cuts them, with nothing copied."""
    packed = torch.randn(9, 2, 4 + 2 + 2, 8, dtype=torch.float64).permute(1, 2, 0, 3)
    q, k, v = packed[:, :4, 3:7], packed[:, 4:6, :6], packed[:, 6:, :6]
    grad = torch.randn(2, 6, 4, 8, dtype=torch.float64).transpose(1, 2)[:, :, 2:6]
    out, lse = attend_block(q, k, v, is_causal=False, scale=SCALE)
    wide_out, wide_lse = torch.randn(2, 4, 9, 8, dtype=torch.float64), torch.randn(2, 4, 9, dtype=torch.float64)
    wide_out[:, :, 3:7], wide_lse[:, :, 3:7] = out, lse
    found = attend_block_backward(grad, q, k, v, wide_out[:, :, 3:7], wide_lse[:, :, 3:7], is_causal=False, scale=SCALE)
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    true, true_lse = by_definition(*leaves, torch.ones(1, 1, 4, 6, dtype=torch.bool))
    assert_near(out, true.detach(), torch.float64)
    assert_near(lse, true_lse.detach(), torch.float64)
    for one, expected in zip(found, torch.autograd.grad(true, leaves, grad), strict=True):
        assert_near(one, expected, torch.float64)


def test_heads_are_padded_as_a_kernel_needs_them() -> None:
    q, k, v = torch.ones(1, 1, 2, 7), torch.ones(1, 1, 3, 7), torch.ones(1, 1, 3, 12)
    assert [one.shape[-1] for one in attention_kernels.FLASH.pad(q, k, v)] == [16, 16, 16]
    assert [one.shape[-1] for one in attention_kernels.EFFICIENT.pad(q, k, v)] == [8, 8, 16]
    assert [one.shape[-1] for one in CPU.pad(q, k, v)] == [12, 12, 12]
    assert all(made is one for made, one in zip(PRODUCTS.pad(q, k, v), (q, k, v), strict=True))


def test_heads_that_lie_askew_are_copied_for_kernels_that_read_several_entries_at_once() -> None:
    memory = torch.arange(2.0 * 3 * 20 * 12)
    askew = [memory.as_strided((2, 3, 5, 8), (300, 100, 12, 1)), memory[4:].as_strided((2, 3, 5, 8), (240, 80, 16, 1))]
    straight = memory[8:].as_strided((2, 3, 5, 8), (240, 80, 16, 1))
    for kernel in (attention_kernels.FLASH, attention_kernels.EFFICIENT):
        for one in askew:
            (made,) = kernel.pad(one)
            assert made.is_contiguous() and torch.equal(made, one)
        assert kernel.pad(straight)[0] is straight
    assert CPU.pad(askew[0])[0] is askew[0]
