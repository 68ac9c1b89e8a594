"""Images split by rows give the results of one process: outputs, and gradients of inputs and of every parameter."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from image_rows import check, images, rows_group
from oracle import small_convnet
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.blueprint import Blueprint
from weft.parallel.recompute import recompute_blocks
from weft.parallel.spatial.spatial_parallel import SpatialParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from alexnet import AlexNet  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def random_layer(draw: random.Random, channels: int) -> nn.Module:
    kernel, dilation = draw.randint(1, 7), draw.randint(1, 2)
    reach = dilation * (kernel - 1) + 1
    match draw.choice(["conv", "conv", "same", "depthwise", "max", "average"]):
        case "conv":
            padding, stride = draw.randint(reach // 2, reach), draw.randint(1, 3)
            groups = draw.choice([1, 2])
            return nn.Conv2d(channels, channels, (kernel, 3), (stride, 1), (padding, 1), (dilation, 1), groups)
        case "same":
            return nn.Conv2d(channels, channels, (kernel, 2), padding="same", dilation=dilation)
        case "depthwise":
            return nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        case "max":
            stride, ceil = draw.randint(1, 3), draw.random() < 0.5
            return nn.MaxPool2d((kernel, 2), (stride, 1), (kernel // 2, 1), ceil_mode=ceil)
    stride, ceil, counts = draw.randint(1, 3), draw.random() < 0.5, draw.random() < 0.5
    divisor = draw.choice([None, None, 3])
    return nn.AvgPool2d((kernel, 2), (stride, 1), (kernel // 2, 1), ceil, counts, divisor)


def check_random_stacks(num_ranks: int, num_stacks: int) -> None:
    for seed in range(num_stacks):
        draw = random.Random(seed)
        layers = [[random_layer(draw, 4), draw.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU()])] for _ in range(4)]
        check(nn.Sequential(*itertools.chain(*layers)), images(draw.randint(1, 23), channels=4), num_ranks)


@pytest.mark.long
@ranks(2)
def test_random_stacks_on_two_ranks() -> None:
    check_random_stacks(2, 25)


@pytest.mark.long
@ranks(4)
def test_random_stacks_on_four_ranks() -> None:
    check_random_stacks(4, 25)


class Flattened(nn.Module):
    """A convolution, then a function that may need the whole map."""

    def __init__(self, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.relu(self.conv(x)))


def attend(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def like_convnext(x: Tensor) -> Tensor:
    last = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],))
    return (last @ torch.linspace(-1, 2, 24, dtype=x.dtype).view(4, 6) + 1).permute(0, 3, 1, 2)


def squeeze_and_excite(x: Tensor) -> Tensor:
    return x * F.adaptive_avg_pool2d(x, 1).sigmoid()


def overwrite(x: Tensor) -> Tensor:
    y = x.clone()
    y += x
    y.mul_(2).clamp_(max=1.5)
    return F.conv2d(F.leaky_relu(y, 0.1, inplace=True), torch.ones(2, 4, 3, 3, dtype=x.dtype))


def shuffle_channels(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return F.max_pool2d(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w), 2)


def positions(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[2], dtype=x.dtype)[:, None] * torch.ones(x.shape[-2:], dtype=x.dtype)


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(x.shape[0], -1),
    "view of channels": lambda x: x.view(x.size(0), x.size(1), x.size(2) * x.size(3)),
    "reshape to known sizes": lambda x: x.reshape(-1, 4 * 9 * 11),
    "mean": lambda x: x.mean((2, 3)),
    "mean of all": lambda x: x.mean()[None],
    "mean along height": lambda x: x.mean(dim=2, keepdim=True).sum(-1),
    "sum of width": lambda x: x.sum(-1),
    "global average": lambda x: nn.AdaptiveAvgPool2d(1)(x).flatten(1),
    "larger average": lambda x: F.adaptive_avg_pool2d(x, (4, 2)),
    "global maximum": lambda x: F.adaptive_max_pool2d(x, 1),
    "amax": lambda x: x.amax((2, 3)),
    "maximum of channels": lambda x: x.max(1).values,
    "softmax of channels": lambda x: x.softmax(1),
    "softmax of height": lambda x: x.softmax(2),
    "interpolate": lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3]), mode="bilinear"),
    "transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3, dtype=x.dtype), stride=2),
    "group norm": lambda x: F.group_norm(x, 2, x.new_tensor([1, 2, 3, 4]), x.new_ones(4)),
    "instance norm": lambda x: F.instance_norm(x, weight=x.new_tensor([1, 2, 3, 4])) + x,
    "channels last in memory": lambda x: F.avg_pool2d(x.to(memory_format=torch.channels_last), 3, padding=1),
    "batch norm by known statistics": lambda x: F.batch_norm(x, x.new_ones(4), x.new_tensor([1, 2, 3, 4])),
    "slopes of channels": lambda x: F.dropout(F.prelu(x - 1, x.new_tensor([0.1, 0.2, 0.3, 0.4])), training=False),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "local response norm": lambda x: F.local_response_norm(x, 3),
    "circular padding": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), x.new_ones(1, 4, 3, 3)),
    "padding": lambda x: F.avg_pool2d(F.pad(x, (1, 0, 2, 1), value=0.5), 2),
    "padding of width": lambda x: F.pad(x, (1, 2, 0, 0), mode="reflect"),
    "cropping": lambda x: F.pad(x, (0, 0, -1, -2)).relu() + 1,
    "slices": lambda x: torch.cat([x[:, :2], x[:, 2:] * 2, x[:, 1:2, ...].exp()], 1)[..., 1:],
    "slices of height": lambda x: x[:, :, ::2],
    "one image": lambda x: x[0].transpose(0, 1),
    "stack": lambda x: torch.stack([x, x.tanh()]).sum(0),
    "chunks": lambda x: x.chunk(2, 1)[0] * x.split([1, 3], dim=1)[0],
    "squeeze": lambda x: x[:, :1].squeeze() + x.unsqueeze(1).squeeze(1)[:, 0],
    "roll": lambda x: x.roll(1, dims=2),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1) * x[:, :1].expand_as(x)[:, 1:],
    "choice": lambda x: torch.where(x > 0.2, x, torch.zeros_like(x)) + (x > 0).sum() + x.masked_fill(x < 0.1, 2.0),
    "attention": attend,
    "last channels": like_convnext,
    "squeeze and excite": squeeze_and_excite,
    "overwritten": overwrite,
    "shuffled channels": shuffle_channels,
    "positions": positions,
}


@ranks(2)
def test_every_function_after_a_convolution() -> None:
    for name, leave in LEAVES.items():
        try:
            check(Flattened(leave), images(9), 2)
        except Exception as error:
            raise AssertionError(name) from error


@ranks(4)
@pytest.mark.parametrize("batch_norm", [True, False])
def test_residual_net(batch_norm: bool) -> None:
    for height in (13, 3):
        check(small_convnet(batch_norm=batch_norm), images(height, channels=1), 4)


@ranks(2)
def test_alexnet() -> None:
    model = AlexNet(shrink=16)
    model.dropout.p = 0.0
    check(model, images(64, channels=1, width=64), 2)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_blocks_computed_again_fetch_again(use_reentrant: bool) -> None:
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 3))
    check(nn.Sequential(nn.Conv2d(3, 4, 1), Recomputed(inner, use_reentrant=use_reentrant), nn.ReLU()), images(12), 2)


@ranks(2)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_blocks_recomputed_by_plan(policy: str) -> None:
    model = small_convnet()
    recompute_blocks(model, Blueprint(blocks=("blocks.0", "blocks.1")), policy)
    check(model, images(7, channels=1), 2)


@ranks(2)
def test_sums_of_narrow_numbers_are_taken_wide() -> None:
    """As inside torch: the sum of 40,000 ones overflows in 16 bits, their mean does not."""
    rows, ones = SpatialParallel(rows_group(2)), torch.ones(1, 2, 200, 200, dtype=torch.float16)
    for function in (lambda x: x.mean((2, 3)), lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.group_norm(x + 1, 1)):
        made = rows.call(function, ones)
        assert made.dtype == torch.float16
        assert torch.equal(made, function(ones))
