"""What DGC sent goes past the optimizer's momentum, also where a GPU decides whether a step counts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.optim.momentum_correction import MomentumTakenOver


def taken_over(rate: float | torch.Tensor) -> tuple[MomentumTakenOver, Any, torch.Tensor]:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=rate, momentum=0.9)
    sync: Any = SimpleNamespace(
        compressed=SimpleNamespace(names=["weight"], momenta=None),
        pieces=[SimpleNamespace(name="weight", tensor=weight)],
    )
    return MomentumTakenOver(optimizer, sync), optimizer, weight


@torch.no_grad()
def updated(rate: float | torch.Tensor, gradient: list[float], overflow: float | None) -> list[float]:
    past, optimizer, weight = taken_over(rate)
    weight.grad = given = torch.tensor(gradient)
    with past.during(None if overflow is None else torch.tensor(overflow)):
        assert weight.grad is None
        optimizer.step()
    assert weight.grad is given and given.tolist() == torch.tensor(gradient).tolist()
    return weight.tolist()


@pytest.mark.parametrize("overflow", [None, 0.0])
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_what_was_sent_is_applied_as_it_is(rate: float | torch.Tensor, overflow: float | None) -> None:
    assert updated(rate, [2.0, 0.0, -2.0], overflow) == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_nothing_of_a_step_that_the_device_skips_is_applied(rate: float | torch.Tensor) -> None:
    """Not even what is not finite, which is the reason to skip it."""
    assert updated(rate, [math.inf, 1.0, -math.inf], 1.0) == [1.0, 2.0, 3.0]
