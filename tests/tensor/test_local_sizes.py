"""A module's code run on shards: sizes are reduced, and calls that were not traced are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.parallel.tensor.local_sizes import LocalSizes
from weft.plan.partition.tensor import Resized, Size, SizedCall


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).view(x.shape)


class Heads(nn.Module):
    """Four heads of two, of which a rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(3, 4, 2)
        heads = self.inner(heads)[:, :4]
        return heads if self.skips else heads.expand(size=(3, 4, 2)).reshape([3, 8])


CALLS = (
    SizedCall(function="view", sizes=(Size(place=(2,), num_units=4),)),
    SizedCall(function="__getitem__", sizes=(Size(place=(1, 1, "stop"), num_units=4),)),
    SizedCall(function="expand", sizes=(Size(place=("size", 1), num_units=4),)),
    SizedCall(function="reshape", sizes=(Size(place=(1, 1), num_units=4),)),
)


def quarter(units: int) -> int:
    return max(units // 4, 1)


def make(calls: tuple[SizedCall, ...] = CALLS) -> Heads:
    module = Heads()
    module.forward = LocalSizes(module, Resized(module="heads", calls=calls), quarter).forward
    return module


def test_sizes_become_those_of_a_share_wherever_they_stand() -> None:
    x = torch.randn(3, 2)
    assert torch.equal(make()(x), x)
    assert torch.equal(copy.deepcopy(make())(x), x)


def test_a_number_for_each_of_others_shrinks_by_both() -> None:
    """Eight heads, four for each of two others: a rank with two heads of one of those has two for it."""
    calls = tuple(
        SizedCall(
            function=call.function, sizes=tuple(Size(place=s.place, num_units=8, per_units=2) for s in call.sizes)
        )
        for call in CALLS
    )
    module = Heads()
    module.forward = LocalSizes(module, Resized(module="heads", calls=calls), {8: 2, 2: 1}.__getitem__).forward
    x = torch.randn(3, 4)
    assert torch.equal(module(x), x)


def test_calls_that_were_not_foreseen_are_refused() -> None:
    x = torch.randn(3, 2)
    with pytest.raises(ModelError, match='"heads" calls __getitem__ as call 2 with sizes, where expand was expected'):
        make((CALLS[0], CALLS[2], CALLS[1], CALLS[3]))(x)
    with pytest.raises(ModelError, match="calls reshape as call 4 with sizes, where nothing more was expected"):
        make(CALLS[:3])(x)
    module = make()
    module.skips = True
    with pytest.raises(ModelError, match="makes 2 calls with sizes, where 4 were expected"):
        module(x)


def test_two_regions_in_one_module_change_their_own_sizes() -> None:
    module = Heads()
    first = tuple(SizedCall(function=call.function, sizes=call.sizes if k < 2 else ()) for k, call in enumerate(CALLS))
    second = tuple(
        SizedCall(function=call.function, sizes=call.sizes if k >= 2 else ()) for k, call in enumerate(CALLS)
    )
    for calls in (first, second):
        module.forward = LocalSizes(module, Resized(module="heads", calls=calls), quarter).forward
    x = torch.randn(3, 2)
    assert torch.equal(module(x), x)


def test_a_module_inside_another_has_its_own_sizes() -> None:
    module = make()
    inner = module.inner
    calls = (SizedCall(function="view"), SizedCall(function="view"))
    inner.forward = LocalSizes(inner, Resized(module="heads.inner", calls=calls), quarter).forward
    x = torch.randn(3, 2)
    assert torch.equal(module(x), x)
