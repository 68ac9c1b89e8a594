"""A small ResNet on images made here: one process, or any number of ranks under any plan.

    python examples/newcomer_resnet.py
    torchrun --nproc-per-node 2 examples/newcomer_resnet.py
    torchrun --nproc-per-node 2 examples/newcomer_resnet.py examples/plans/image-rows.toml

The model is torchvision's in small. Its BatchNorms use the statistics of the whole global batch, as on one device, so
the batch means the same on any number of ranks.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import weft
from weft.plan.plan import Axes, Plan

IMAGE_SIZE, CLASSES = 16, 4
BATCH, LEARNING_RATE = 16, 0.05


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x_NCHW)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x_NCHW))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, stride=2), BasicBlock(16, 16))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.layers(self.stem(images_NCHW))
        return self.fc(maps_NCHW.mean(dim=(2, 3)))


def make_images(total: int = 256) -> TensorDataset:
    """Noise with one brighter quarter, whose number is the class. Seeded, so that every rank has the same images."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(total, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator), torch.arange(total) % CLASSES
    half = IMAGE_SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 1.0
    return TensorDataset(images, labels)


def main(plan: Plan | str | Path | None = None, *, steps: int = 48) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(0)
    data = make_images()
    with weft.parallelize(
        ResNet(),
        plan or Plan(axes=Axes(data="all")),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4),
        global_batch=BATCH,
        example=data[:2][0],  # inputs of two samples, by which pipelines and split layers are cut
    ) as trainer:
        losses: list[float] = []
        for images, labels in weft.batches(data, trainer, global_batch=BATCH, shuffle_seed=0, epochs=None):
            losses.append(trainer.step(images, labels).item())
            if trainer.mesh.world.rank == 0 and trainer.steps_done % 16 == 0:
                print(f"step {trainer.steps_done}: loss {losses[-1]:.4f}")
            if trainer.steps_done == steps:
                break
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
