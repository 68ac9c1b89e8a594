"""Workers of other seeds train the first worker's frozen layers and buffers: as one process that has its."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, MLP, SGD, batch_of, cut_evenly, small_gpt, token_batch, train_alone
from ranks import gathered, ranks
from served_in_threads import servers_in_threads
from served_training import leave_group, served, server_plan
from torch import Tensor, nn

from weft.errors import ModelError
from weft.plan.plan import Axes, Plan, Precision


class Adapted(nn.Module):
    """A frozen layer with a trained product of two narrow ones beside it, and buffers that its output depends on."""

    scale: Tensor
    shift: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.base.requires_grad_(False)
        self.base.weight.data = self.base.weight.data.t().contiguous().t()
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("shift", torch.randn(3, 1).t(), persistent=False)
        self.register_buffer("counts", torch.randint(1, 9, (3,)))
        self.register_buffer("empty", torch.empty(0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) * self.scale + self.up(self.down(x)) * self.counts + self.shift[0]
        return output


def last_layer_alone() -> nn.Module:
    model = MLP()
    *frozen, _, _ = model.parameters()
    for one in frozen:
        one.requires_grad_(False)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one.detach().clone() for name, one in found.items()}


def like_the_first(model: nn.Module) -> nn.Module:
    """A copy with the values that the first rank's model has."""
    alone, first = copy.deepcopy(model), gathered(tensors_of(model))[0]
    for name, one in {**dict(alone.named_parameters()), **dict(alone.named_buffers())}.items():
        one.data.copy_(first[name])
    return alone


@pytest.mark.sampled(2, long=2)
@ranks(2)
@pytest.mark.parametrize("make", [Adapted, last_layer_alone])
@pytest.mark.parametrize(("shards", "bucket_bytes"), [(1, 10_000), (3, 40)])
def test_workers_of_other_seeds_equal_one_process(
    make: Callable[[], nn.Module], shards: int, bucket_bytes: int
) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = make()
    alone = like_the_first(model)
    expected = tensors_of(alone)
    batches = [batch_of(6, seed) for seed in range(3)]
    with servers_in_threads(), served(model, server_plan(2, shards=shards, bucket_bytes=bucket_bytes)) as trainer:
        losses = [float(trainer.step(*cut_evenly(one, 2)[rank])) for one in batches]
    seen = train_alone(alone, batches, optimizer=lambda one: SGD(one.parameters()))
    assert losses == pytest.approx([one.loss for one in seen], rel=1e-10)
    for name, one in tensors_of(model).items():
        if name in seen[-1].weights and alone.get_parameter(name).requires_grad:
            torch.testing.assert_close(one, seen[-1].weights[name], rtol=1e-10, atol=1e-12)
        else:
            assert torch.equal(one, expected[name]), name


@ranks(2)
def test_running_statistics_begin_as_the_first_workers_and_are_each_ones_own() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.copy_(torch.randn(4))
    norm.num_batches_tracked.fill_(5 + rank)
    first = gathered(norm.running_mean.clone())[0]
    parts = [batch_of(4, seed + 10 * rank) for seed in range(2)]
    with servers_in_threads(), served(model, server_plan(2)) as trainer:
        for inputs, targets in parts:
            trainer.step(inputs, targets)
            first = 0.9 * first + 0.1 * inputs.mean(0)
    torch.testing.assert_close(norm.running_mean, first, rtol=1e-12, atol=1e-12)
    assert norm.num_batches_tracked.item() == 7


@ranks(2)
def test_frozen_weights_that_the_model_computes_with_in_16_bits() -> None:
    """They have no master, and are in no buffer of those that are trained."""
    torch.manual_seed(dist.get_rank())
    model = Adapted().float()
    expected = like_the_first(model).get_parameter("base.weight").bfloat16()
    plan = server_plan(2)
    narrow = Plan(axes=plan.axes, data=plan.data, server=plan.server, precision=Precision(compute="bf16"))
    with servers_in_threads(), served(model, narrow) as trainer:
        trainer.step(*(one.float() if one.is_floating_point() else one for one in batch_of(4, 0)))
        assert torch.equal(model.get_parameter("base.weight").bfloat16(), expected)


@pytest.mark.long
@ranks(4, fresh=True)
@pytest.mark.parametrize("axes", [dict(tensor=2), dict(pipeline=2)])
def test_workers_of_two_ranks_take_their_parts(axes: dict[str, int]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank // 2)
    model: Any = small_gpt().double()
    for name, one in model.named_parameters():
        one.requires_grad_("mlp" in name)
    alone = like_the_first(model)
    batches = [token_batch(8, seed=seed) for seed in range(2)]
    leave_group()
    plain = server_plan(2, shards=2, bucket_bytes=4096)
    plan = Plan(axes=Axes(data=2, **axes), data=plain.data, server=plain.server, step=plain.step, comm=plain.comm)
    with served(model, plan, optimizer=ADAMW, example=batches[0][0][:4]) as trainer:
        losses = [float(trainer.step(*cut_evenly(one, 2)[trainer.data_rank])) for one in batches]
    seen = train_alone(alone, batches, optimizer=lambda one: ADAMW(one.parameters()))
    assert losses == pytest.approx([one.loss for one in seen], rel=1e-9)


def test_a_model_without_anything_to_train() -> None:
    model = MLP()
    model.requires_grad_(False)
    with servers_in_threads(), pytest.raises(ModelError, match="has no parameter to train: every one is frozen"):
        with served(model, server_plan(1)):
            pass
