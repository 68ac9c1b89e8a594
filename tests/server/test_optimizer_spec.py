"""Optimizers that travel by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import weft.optim
from weft.errors import JobError
from weft.server.protocol.optimizer_spec import describe_optimizer, make_optimizer, try_optimizer


def named(*shapes: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        str(number): torch.nn.Parameter(torch.randn(shape, generator=generator)) for number, shape in enumerate(shapes)
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), betas=(0.8, 0.9), amsgrad=True),
        lambda groups: torch.optim.Adagrad(groups, lr=0.1, lr_decay=0.1),
        lambda groups: torch.optim.RMSprop(groups, lr=0.1, centered=True),
        lambda groups: weft.optim.LAMB(groups, lr=0.1, fused=False),
        lambda groups: weft.optim.LARS(groups, lr=0.1, fused=False),
    ],
)
def test_what_was_described_makes_the_same_updates(make: Any) -> None:
    ours, theirs = named((3, 4), (4,)), named((3, 4), (4,))
    optimizer = make([{"params": [ours["0"]], "weight_decay": 0.1}, {"params": [ours["1"]], "lr": 0.05}])
    spec = describe_optimizer(optimizer, {id(one): name for name, one in ours.items()})
    spec = json.loads(json.dumps(spec))
    try_optimizer(spec, list(ours))
    flat = {name: [torch.nn.Parameter(one.detach().flatten())] for name, one in theirs.items()}
    made = make_optimizer(spec, flat)
    for step in range(3):
        for name, one in ours.items():
            one.grad = torch.full_like(one, 0.1 * (step + 1)) * one.detach().sign()
            flat[name][0].grad = one.grad.flatten()
        optimizer.step()
        made.step()
    for name, one in ours.items():
        torch.testing.assert_close(flat[name][0].detach(), one.detach().flatten())


def test_an_optimizer_of_ones_own_is_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(JobError, match=r"torch\.optim and weft\.optim alone, not .*Mine; use one of these"):
        describe_optimizer(Mine(named((2,)).values(), lr=0.1), {})


def test_settings_that_are_no_numbers_are_refused() -> None:
    parameters = named((2,))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = torch.ones(2)
    with pytest.raises(
        JobError, match="SGD: weight_decay is a Tensor, which cannot be sent to a server; give a number"
    ):
        describe_optimizer(optimizer, {id(one): name for name, one in parameters.items()})
