"""The slots of weight versions: what lies where, when one is free, and that every misuse is noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import CheckpointError
from weft.parallel.pipeline.weight_versions import WeightVersions


def three_layers(**settings: Any) -> tuple[nn.Sequential, WeightVersions]:
    """Three convolutions: the second is frozen, the third has the first one's weight."""
    torch.manual_seed(0)
    shared = nn.Conv2d(2, 2, 1).to(memory_format=torch.channels_last)
    model = nn.Sequential(shared, nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))
    model[1].requires_grad_(False)
    model[2].weight = shared.weight
    return model, WeightVersions(model, dict(model.named_parameters(remove_duplicate=False)), **settings)


def run_once(model: nn.Module, versions: WeightVersions) -> Tensor:
    with versions.using(versions.newest):
        return model(torch.ones(1, 2, 3, 3)).square().sum()


def update(versions: WeightVersions, *, fail: bool = False) -> None:
    versions.take_gradients(versions.newest)
    with versions.advance():
        torch.optim.SGD(versions.heads, lr=0.1).step()
        if fail:
            raise KeyboardInterrupt
    for head in versions.heads:
        head.grad = None


def test_weights_are_held_once_per_slot_and_frozen_ones_once() -> None:
    model, versions = three_layers(num_slots=3)
    assert len(versions.heads) == 3, "a weight and two biases"
    assert versions.num_bytes == 3 * 3 * 64, "each fits into one step of alignment"
    leaves = versions.leaves(0)
    assert leaves["0.weight"] is leaves["2.weight"] and leaves["1.weight"] is model[1].weight
    assert leaves["0.weight"].stride() == model[0].weight.stride()
    for head, name in zip(versions.heads, ("0.weight", "0.bias", "2.bias"), strict=True):
        assert head.data_ptr() == leaves[name].data_ptr() and head.data_ptr() % 64 == 0


def test_gradients_of_a_version_gather_on_its_leaves_and_move_to_the_heads() -> None:
    model, versions = three_layers(num_slots=1)
    alone = copy.deepcopy(model)
    for _ in range(2):
        run_once(model, versions).backward()
        alone(torch.ones(1, 2, 3, 3)).square().sum().backward()
    with versions.using(0):
        model[0].bias.grad = None
    assert all(head.grad is None for head in versions.heads)
    versions.take_gradients(0)
    assert model[0].weight.grad is not None and torch.equal(model[0].weight.grad, alone[0].weight.grad)
    assert model[0].bias.grad is None and model[1].weight.grad is None


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_used_again_under_a_live_graph_is_noticed(num_slots: int) -> None:
    model, versions = three_layers(num_slots=num_slots, lag=num_slots - 1)
    loss = run_once(model, versions)
    for _ in range(num_slots):
        run_once(model, versions).backward()
        update(versions)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_updates_need_an_unused_slot() -> None:
    model, versions = three_layers(num_slots=2)
    for count in (2, 1):
        for _ in range(count):
            versions.hold(versions.newest)
        if versions.newest == 0:
            update(versions)
    held = "held: version 0 by 2 microbatches, version 1 by 1 microbatches"
    with pytest.raises(AssertionError, match=f"no slot of 2 is free for version 2: live are .0, 1., .* {held}"):
        update(versions)
    versions.release(1)
    update(versions)
    assert versions.live == (0, 2), "the newest was updated in place"
    with pytest.raises(AssertionError, match=r"there is no version 1: live are \(0, 2\)"):
        versions.hold(1)
    with pytest.raises(AssertionError, match="version 1 is released once too often"):
        versions.release(1)
    for what in (versions.older, versions.forget_older, lambda: versions.restart(3)):
        with pytest.raises(AssertionError, match="needs an empty pipeline; held: version 0 by 2"):
            what()


def test_gradients_that_are_lost_or_mixed_are_noticed() -> None:
    model, versions = three_layers(num_slots=1)
    run_once(model, versions).backward()
    with pytest.raises(AssertionError, match="gradients of version 0 were not taken"), versions.advance():
        pass
    versions.take_gradients(0)
    with pytest.raises(AssertionError, match="0.weight has a gradient already: clear it"):
        versions.take_gradients(0)
    with pytest.raises(AssertionError, match="version 5 is gone"):
        versions.take_gradients(5)


def test_the_model_has_its_own_parameters_again_whatever_fails() -> None:
    model, versions = three_layers(num_slots=2, lag=1)
    before = [parameter.detach().clone() for parameter in versions.heads]
    with pytest.raises(ZeroDivisionError), versions.using(0):
        assert model[2].weight is versions.leaves(0)["2.weight"]
        with pytest.raises(AssertionError, match="version 0 is to be used while 0 is"), versions.using(0):
            pass
        raise ZeroDivisionError
    assert model[0].weight is model[2].weight is versions.heads[0]
    run_once(model, versions).backward()
    with pytest.raises(KeyboardInterrupt):
        update(versions, fail=True)
    assert versions.live == (0,)
    assert all(torch.equal(head, weight) for head, weight in zip(versions.heads, before, strict=True))


def test_a_version_ends_with_its_last_use_and_when_its_slot_is_written_over() -> None:
    _, versions = three_layers(num_slots=2)
    versions.hold(0)
    update(versions)
    versions.release(0)
    assert versions.live == (1,)
    with pytest.raises(AssertionError, match="there is no version 0"):
        versions.hold(0)
    _, versions = three_layers(num_slots=2, lag=1)
    update(versions)
    update(versions)
    assert versions.live == (1, 2)
    with pytest.raises(KeyboardInterrupt):
        update(versions, fail=True)
    assert versions.live == (2,)


def test_versions_of_another_stage_are_refused() -> None:
    _, versions = three_layers(num_slots=2, lag=1)
    named = {"0.weight": torch.ones(3), "0.bias": torch.ones(2), "0.scale": torch.ones(2)}
    with pytest.raises(CheckpointError) as refused:
        versions.load(4, {2: named, 3: versions.leaves(0)})
    problems = "\n".join(refused.value.problems)
    assert "there are 3 weight versions, and this stage holds 2" in problems
    assert "version 2 has an unknown 0.scale" in problems and "version 2 lacks 2.bias" in problems
    assert "version 2 of 0.weight has shape (3,) and the model's is (2, 2, 1, 1)" in problems
    assert "version 3 has an unknown 1.weight" in problems
    assert versions.live == (0,)


def test_a_restart_gives_the_version_before_the_same_weights() -> None:
    model, versions = three_layers(num_slots=2, lag=1)
    versions.restart(7)
    assert versions.live == (6, 7)
    assert torch.equal(versions.leaves(6)["0.weight"], model[0].weight)
    assert versions.leaves(6)["0.weight"].data_ptr() != model[0].weight.data_ptr()
