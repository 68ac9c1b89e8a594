"""AlexNet with one of its two towers on each of two ranks, as it was trained in 2012 on two GPUs of 3 GB.

    torchrun --nproc-per-node 2 examples/alexnet.py

The model is an ordinary module with grouped convolutions, which runs in one process too. `weft_blueprint` declares how
it splits, because there is more than one way: the split that weft would find by itself begins at the third layer and
keeps the first two whole.

    images ─ conv1 ─ conv2 ─ conv3 ─ sum ─ conv4 ─ conv5 ─ fc6 ─ sum ─ fc7 ─ fc8 ─ sum ─ classes
             └──── region 1 ──────┘        └── region 2 ────┘        └ region 3 ┘

Krizhevsky's GPUs exchanged their maps before the third layer; here each GPU applies it to its own maps and the results
are summed.

Before training, the plan is verified against one process in float64: every loss, gradient and weight. The data are
scikit-learn's handwritten digits, enlarged to 64 × 64.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.blueprint import Blueprint
from weft.plan.partition.tensor import Count, Cut, Region, Section
from weft.training.data.datasets import TensorSamples, digits

TOWERS = 2
IMAGE_SIZE = 64
PLAN = Path(__file__).parent / "plans" / "tensor.toml"

ONE_EACH = "in_channels", "out_channels", "groups"
"""Attributes of a grouped convolution that are smaller on a rank with one tower."""


class TowerNorm(nn.Module):
    """Response normalisation over neighbouring maps of the same tower."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = TOWERS

    def forward(self, x_NCHW: Tensor) -> Tensor:
        apart = x_NCHW.reshape(-1, x_NCHW.shape[1] // self.towers, *x_NCHW.shape[2:])
        return F.local_response_norm(apart, size=5, alpha=5e-4, beta=0.75, k=2.0).view_as(x_NCHW)


class AlexNet(nn.Module):
    """Eight layers. The second, fourth and fifth use only the maps of their own tower."""

    def __init__(self, *, classes: int = 10, channels_in: int = 1, shrink: int = 1) -> None:
        """`shrink` divides the paper's numbers of maps and features."""
        super().__init__()
        c1, c2, c3, c4, c5, hidden = (number // shrink for number in (96, 256, 384, 384, 256, 4096))
        self.conv1 = nn.Conv2d(channels_in, c1, 11, stride=4, padding=2)
        self.norm1 = TowerNorm()
        self.conv2 = nn.Conv2d(c1, c2, 5, padding=2, groups=TOWERS)
        self.norm2 = TowerNorm()
        self.conv3 = nn.Conv2d(c2, c3, 3, padding=1)
        self.conv4 = nn.Conv2d(c3, c4, 3, padding=1, groups=TOWERS)
        self.conv5 = nn.Conv2d(c4, c5, 3, padding=1, groups=TOWERS)
        self.fc6 = nn.Linear(c5, hidden)  # an image of 64 × 64 is one pixel here
        self.fc7 = nn.Linear(hidden, hidden)
        self.fc8 = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm1(F.relu(self.conv1(images_NCHW))), 3, stride=2)
        x = F.max_pool2d(self.norm2(F.relu(self.conv2(x))), 3, stride=2)
        x = F.relu(self.conv5(F.relu(self.conv4(F.relu(self.conv3(x))))))
        x = self.dropout(F.max_pool2d(x, 3, stride=2).flatten(1))
        x = F.relu(self.fc7(self.dropout(F.relu(self.fc6(x)))))
        return self.fc8(x)

    def weft_blueprint(self) -> Blueprint:
        """Regions cut between towers; fc7 and fc8 have no towers, so their features may be cut anywhere."""
        below = Region(
            columns=(("conv1",),),
            rows=("conv3",),
            cuts=(*self._outputs("conv1", "conv2"), self._inputs("conv3")),
            counts=(
                Count(module="conv1", attribute="out_channels", num_units=TOWERS),
                *(Count(module="conv2", attribute=name, num_units=TOWERS) for name in ONE_EACH),
                Count(module="conv3", attribute="in_channels", num_units=TOWERS),
                *(Count(module=name, attribute="towers", num_units=TOWERS) for name in ("norm1", "norm2")),
            ),
        )
        above = Region(
            columns=(("conv4",),),
            rows=("fc6",),
            cuts=(*self._outputs("conv4", "conv5"), self._inputs("fc6")),
            counts=tuple(
                Count(module=layer, attribute=name, num_units=TOWERS)
                for layer in ("conv4", "conv5")
                for name in ONE_EACH
            ),
        )
        features = (Section(num_units=self.fc7.out_features),)
        top = Region(
            columns=(("fc7",),),
            rows=("fc8",),
            cuts=(
                Cut(name="fc7.weight", dim=0, sections=features),
                Cut(name="fc7.bias", dim=0, sections=features),
                Cut(name="fc8.weight", dim=1, sections=features),
            ),
        )
        return Blueprint(regions=(below, above, top))

    def _outputs(self, *layers: str) -> tuple[Cut, ...]:
        """Cuts of layers by output: a tower's weights and biases."""
        return tuple(
            Cut(name=name, dim=0, sections=_towers(tensor.shape[0]))
            for layer in layers
            for name, tensor in self.get_submodule(layer).named_parameters(prefix=layer)
        )

    def _inputs(self, layer: str) -> Cut:
        """Cut of a layer by input; its bias is added after the sum and stays whole."""
        name = f"{layer}.weight"
        return Cut(name=name, dim=1, sections=_towers(self.get_parameter(name).shape[1]))


def _towers(length: int) -> tuple[Section, ...]:
    return (Section(num_units=TOWERS, unit=length // TOWERS),)


def enlarged(samples: TensorSamples) -> TensorSamples:
    return TensorSamples(F.interpolate(samples.inputs, size=IMAGE_SIZE), samples.targets)


def main() -> None:
    torch.manual_seed(0)
    plan = weft.read_plan(PLAN)
    is_first = os.environ.get("RANK", "0") == "0"
    learned, held_out = (enlarged(samples) for samples in digits())

    optimizer = functools.partial(torch.optim.AdamW, lr=3e-4)
    outcome = weft.verify(
        AlexNet(shrink=8),
        plan,
        loss="cross-entropy",
        optimizer=optimizer,
        batches=list(zip(learned.inputs[:24].split(8), learned.targets[:24].split(8), strict=True)),
    ).require()
    if is_first:
        worst = max(difference.error for difference in outcome.differences)
        print(f"an eighth as wide, {outcome.num_steps} steps: equal to one process, worst relative error {worst:.1e}")

    model = AlexNet()
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=optimizer)
    here = sum(parameter.numel() for parameter in model.parameters())
    if is_first:
        print(f"{here:,} of {trainer.num_parameters:,} parameters on each rank")
    for inputs, targets in weft.batches(learned, trainer, global_batch=64, epochs=3):
        loss = trainer.step(inputs, targets)
        if is_first and trainer.steps_done % 10 == 0:
            print(f"step {trainer.steps_done}: loss {float(loss):.3f}", flush=True)
    held_out_loss = trainer.evaluate([(held_out.inputs, held_out.targets)])
    if is_first:
        print(f"held-out loss {held_out_loss:.3f}")


if __name__ == "__main__":
    main()
