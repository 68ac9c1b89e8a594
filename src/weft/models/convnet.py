"""A small residual network for images of 8x8 to 32x32, quick to train, to test convolutions and BatchNorm with.

The first half of the blocks keeps the stem's width and resolution; the other half has twice the width and half the
resolution. Without batch norm it uses GroupNorm, whose result for one image does not depend on the others.

Dims in names: N samples, C channels, H and W pixels, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.sizes import flag_problems, size_problems

MAX_NORM_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNetConfig:
    """The sizes of a ConvNet."""

    classes: int = 10
    """Number of classes."""
    channels_in: int = 1
    """Channels of an image: 1 grey, 3 colour."""
    width: int = 32
    """Channels of the stem and of the first half of the blocks."""
    num_blocks: int = 4
    """Residual blocks of two convolutions each."""
    batch_norm: bool = True
    """Normalise over the batch; otherwise over groups of channels of each image."""

    def __post_init__(self) -> None:
        names = ("classes", "channels_in", "width", "num_blocks")
        if problems := size_problems(self, dict.fromkeys(names, 1)) + flag_problems(self, ("batch_norm",)):
            raise ModelError(problems)


def make_norm(config: ConvNetConfig, channels: int) -> nn.Module:
    if config.batch_norm:
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(channels, MAX_NORM_GROUPS), channels)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, config: ConvNetConfig, channels_in: int, channels: int) -> None:
        super().__init__()
        changes = channels_in != channels
        stride = 2 if changes else 1
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(config, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = make_norm(config, channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False) if changes else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x_NCHW)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x_NCHW))


class ConvNet(nn.Module):
    """Images in, class logits out."""

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(config.channels_in, config.width, 3, padding=1, bias=False)
        self.stem_norm = make_norm(config, config.width)
        half = (config.num_blocks + 1) // 2
        widths = [config.width] * (half + 1) + [2 * config.width] * (config.num_blocks - half)
        self.blocks = nn.ModuleList(
            ResidualBlock(config, before, after) for before, after in zip(widths, widths[1:], strict=False)
        )
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Logits_NK."""
        x_NCHW = F.relu(self.stem_norm(self.stem(images_NCHW)))
        for block in self.blocks:
            x_NCHW = block(x_NCHW)
        return cast(Tensor, self.head(x_NCHW.mean(dim=(2, 3))))
