"""The example of two towers: declared splits of convolutions by groups, on two ranks and against one process."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from meshes import verify
from oracle import ADAMW, make_trainer
from ranks import ranks

from weft.plan.text import read_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from alexnet import IMAGE_SIZE, PLAN, AlexNet  # noqa: E402

narrow = functools.partial(AlexNet, shrink=16)


def images(num_samples: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(num_samples, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return made, torch.randint(10, (num_samples,), generator=generator)


@pytest.mark.long
@ranks(2)
def test_two_towers_are_one_net() -> None:
    verify(
        narrow(),
        read_plan(PLAN),
        loss="cross-entropy",
        optimizer=ADAMW,
        batches=[images(size, seed=size) for size in (4, 3)],
        device="cpu",
    ).require()


@ranks(2)
def test_each_rank_has_a_tower() -> None:
    model, whole = narrow(), narrow()
    trainer = make_trainer(model, read_plan(PLAN))
    for name in ("conv2", "conv4", "conv5"):
        ours, all_of_it = model.get_submodule(name), whole.get_submodule(name)
        assert (ours.groups, all_of_it.groups) == (1, 2)
        assert ours.weight.numel() * 2 == all_of_it.weight.numel()
        assert ours.in_channels * 2 == all_of_it.in_channels
    assert model.norm1.towers == 1
    num_here = sum(parameter.numel() for parameter in model.parameters())
    num_whole_biases = sum(whole.get_submodule(name).bias.numel() for name in ("conv3", "fc6", "fc8"))
    assert num_here * 2 == trainer.num_parameters + num_whole_biases
