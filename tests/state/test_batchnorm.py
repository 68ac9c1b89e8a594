"""Synchronised BatchNorm against one BatchNorm over the concatenated batch, and the other two ways to treat buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import data_group
from oracle import (
    ADAMW,
    assert_same,
    cross_entropy,
    cut,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    small_convnet,
    train_alone,
    train_parallel,
)
from ranks import ranks
from torch import Tensor, nn

from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.state.batchnorm import SynchronisedBatchNorm, synchronise_batch_norms
from weft.parallel.state.buffers import consensus_buffers

KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d of sequences": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 2, 2)),
    "3d": (nn.BatchNorm3d, (3, 2, 1, 2)),
    "torch's synchronised": (nn.SyncBatchNorm, (3, 2, 2)),
}


def statistics_group() -> Group:
    return data_group("statistics")


def check_layer(kind: str, sizes: tuple[int, ...], *, eval_mode: bool = False, **settings: Any) -> None:
    """Three forward and backward passes: outputs, gradients of inputs and parameters, running statistics."""
    make, shape = KINDS[kind]
    whole: Any = (nn.BatchNorm2d if make is nn.SyncBatchNorm else make)(3, dtype=torch.float64, **settings)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    module: Any = make(3, dtype=torch.float64, **settings)
    module.load_state_dict(whole.state_dict())
    group = statistics_group()
    synchronise_batch_norms(module, group)
    whole.train(not eval_mode)
    module.train(not eval_mode)
    start = sum(sizes[: group.index])
    rows = slice(start, start + sizes[group.index])
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        # Far from zero, where a sum of squares would cancel.
        everything = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64) + 1e3
        upstream = torch.randn(everything.shape, generator=generator, dtype=torch.float64)
        mine, theirs = everything[rows].clone().requires_grad_(), everything.clone().requires_grad_()
        output, expected = module(mine), whole(theirs)
        output.backward(upstream[rows])
        expected.backward(upstream)
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(output, expected[rows], **close)
        torch.testing.assert_close(mine.grad, theirs.grad[rows], **close)
        for ours, true in zip(module.parameters(), whole.parameters(), strict=True):
            total = ours.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, true.grad, **close)
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(module.get_buffer(name), buffer, **close)
        module.zero_grad()
        whole.zero_grad()


@ranks(2)
@pytest.mark.parametrize("sizes", [(4, 4), (5, 1), (3, 0), (0, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_equals_one_process(kind: str, sizes: tuple[int, int]) -> None:
    check_layer(kind, sizes)


@ranks(4)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (0, 5, 0, 1)], ids=str)
def test_one_layer_on_four_ranks(sizes: tuple[int, ...]) -> None:
    check_layer("2d", sizes)


@ranks(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.7},
        {"eps": 0.5},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"eval_mode": True},
        {"eval_mode": True, "track_running_stats": False},  # without running statistics the batch's are used
    ],
    ids=str,
)
def test_every_setting_of_a_layer(settings: dict[str, Any]) -> None:
    check_layer("1d", (3, 2), **settings)


@ranks(2)
def test_one_value_a_channel_is_refused_on_every_rank() -> None:
    module = nn.BatchNorm1d(3)
    group = statistics_group()
    synchronise_batch_norms(module, group)
    with pytest.raises(ModelError, match="more than 1 value"):
        module(torch.randn(1 if group.index == 0 else 0, 3))
    assert int(module.num_batches_tracked) == 0


@ranks(2)
def test_no_value_at_all_teaches_nothing() -> None:
    module = nn.BatchNorm1d(3)
    synchronise_batch_norms(module, statistics_group())
    nothing = torch.empty(0, 3, requires_grad=True)
    module(nothing).sum().backward()
    assert int(module.num_batches_tracked) == 0 and module.running_var.eq(1).all()
    assert nothing.grad is not None and nothing.grad.shape == (0, 3)


@ranks(2)
def test_half_precision_inputs_have_statistics_in_single() -> None:
    module, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    group = statistics_group()
    synchronise_batch_norms(module, group)
    everything = (torch.randn(64, 3) + 30).bfloat16()
    output = module(everything[group.index :: 2])
    assert output.dtype == torch.bfloat16
    expected = whole(everything.float())
    torch.testing.assert_close(output.float(), expected[group.index :: 2], rtol=0.02, atol=0.02)
    torch.testing.assert_close(module.running_var, whole.running_var, rtol=1e-5, atol=1e-6)


def test_a_module_keeps_its_class_its_checks_and_its_names() -> None:
    model = small_convnet()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    group = data_group("statistics")
    synchronise_batch_norms(model, group)
    synchronise_batch_norms(model, group)  # twice is the same as once
    assert isinstance(model.stem_norm, nn.BatchNorm2d) and isinstance(model.stem_norm, SynchronisedBatchNorm)
    assert type(model.stem_norm).__name__ == "SynchronisedBatchNorm2d"
    assert list(model.state_dict()) == list(state)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected 4D input"):
            model.stem_norm(torch.zeros(2, 4))
        model.eval()


@ranks(2)
def test_a_synchronised_model_can_be_copied() -> None:
    """For a moving average of weights, say; the copy exchanges through the same group."""
    model = small_convnet()
    trainer = make_trainer(model, data_plan(2))
    meta_copy = copy.deepcopy(model)
    images = image_batch(4)[0].float()[trainer.data_rank :: 2]
    torch.testing.assert_close(meta_copy(images), model(images))
    assert meta_copy.stem_norm.weft_group is model.stem_norm.weft_group


@ranks(2)
def test_a_second_derivative_is_refused() -> None:
    """It would be that of one rank's share, without a word."""
    module = nn.BatchNorm1d(3)
    synchronise_batch_norms(module, statistics_group())
    inputs = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad((module(inputs) ** 3).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class WithActivation(nn.BatchNorm2d):
    """A BatchNorm of a user's own, with a forward that does more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Renamed(nn.BatchNorm2d):
    """A BatchNorm of a user's own that changes nothing."""


@ranks(2)
def test_a_batch_norm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    model = nn.Sequential(Renamed(1), WithActivation(1), nn.BatchNorm2d(1), WithActivation(1))
    with pytest.raises(ModelError) as caught:
        make_trainer(model, data_plan(2))
    assert [problem.split('"')[1] for problem in caught.value.problems] == ["1", "3"]
    assert "WithActivation" in str(caught.value) and "buffers" in str(caught.value)
    make_trainer(model, data_plan(2, buffers="local"))
    assert type(model[1]) is WithActivation


# ---- whole models ----


@ranks(2)
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_a_convnet_on_whole_batches(clip_norm: float) -> None:
    """One microbatch: plain torch on the whole batch, running statistics included, also for unequal parts."""
    model = small_convnet().double()
    alone = copy.deepcopy(model)
    steps = [image_batch(6), image_batch(5, seed=1), image_batch(2, seed=2), image_batch(6, seed=3)]
    parts = [cut_evenly(steps[0], 2), cut(steps[1], (1, 4)), cut(steps[2], (0, 2)), cut_evenly(steps[3], 2)]
    trainer = make_trainer(model, data_plan(2, clip_norm=clip_norm))
    assert_same(train_parallel(trainer, parts), train_alone(alone, steps, clip_norm=clip_norm))
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("loss", ["built-in", "mean"])
def test_samples_without_a_target_still_count_for_the_statistics(loss: str) -> None:
    """Their own loss is nothing, but everybody's output depends on them, so gradients go through them."""
    model = small_convnet().double()
    alone = copy.deepcopy(model)
    steps = [image_batch(6, seed=seed) for seed in range(3)]
    steps[0][1][3:] = -100  # all of rank 1's
    steps[1][1][:3] = -100  # all of rank 0's
    steps[2][1][1:5] = -100
    function: Any = "cross-entropy" if loss == "built-in" else nn.functional.cross_entropy
    trainer = make_trainer(model, data_plan(2), loss=function)
    assert_same(train_parallel(trainer, [cut_evenly(step, 2) for step in steps]), train_alone(alone, steps))
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_a_rank_with_fewer_samples_than_microbatches_keeps_in_step() -> None:
    """Rank 1 has one sample for three microbatches: it exchanges statistics in all, and uses nothing in two."""
    model = small_convnet().double()
    trainer = make_trainer(model, data_plan(2, microbatches=3))
    for number in range(3):
        loss = trainer.step(*cut(image_batch(7, seed=number), (6, 1))[trainer.data_rank])
        assert torch.isfinite(loss)
    trainer.check_divergence()
    assert int(model.stem_norm.num_batches_tracked) == 9


class Guarded(nn.Module):
    """Uses a parameter only where no sample is below a bound: true of a batch without samples, and of no other here."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = small_convnet(), nn.Parameter(torch.ones(5))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits + self.spare if bool((images > 99).all()) else logits


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rank_without_samples_uses_no_parameter(microbatches: int) -> None:
    """It runs the model to keep in step with the others' statistics; what it touches there is not used by anybody."""
    model = Guarded().double()
    spare = model.spare.detach().clone()
    trainer = make_trainer(model, data_plan(2, microbatches=microbatches), optimizer=ADAMW)
    for number, sizes in enumerate([(4, 0), (0, 4), (3, 1)]):
        trainer.step(*cut(image_batch(4, seed=number), sizes)[trainer.data_rank])
        assert model.spare.grad is None and model.net.stem.weight.grad is not None
    assert torch.equal(model.spare, spare)


@ranks(2)
def test_frozen_statistics_are_used_and_kept() -> None:
    """A BatchNorm that the user put in eval mode normalises by its running statistics, without an exchange."""
    model = small_convnet().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.eval()
    alone = copy.deepcopy(model)
    steps = [image_batch(4, seed=seed) for seed in range(2)]
    trainer = make_trainer(model, data_plan(2))
    before = trainer.mesh.traffic["data"].num_calls
    mine = train_parallel(trainer, [cut_evenly(step, 2) for step in steps])
    assert trainer.mesh.traffic["data"].num_calls - before == 4, "one count, one order, two exchanges of gradients"
    assert_same(mine, train_alone(alone, steps))
    assert torch.equal(model.stem_norm.running_mean, alone.stem_norm.running_mean)


# ---- the other ways to treat buffers ----


def gathered(tensor: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return tensors


class Replaces(nn.Module):
    """Keeps a moving average by replacing its buffer, which many layers of users do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean().float()
        return x - self.mean


@ranks(2)
def test_broadcast_gives_everybody_the_buffers_of_rank_0() -> None:
    """Each rank normalises by its own samples; after the step rank 0's running statistics are everybody's."""
    model = nn.Sequential(nn.BatchNorm2d(1), Replaces(), nn.Flatten(), nn.Linear(36, 5)).double()
    model[1].mean = model[1].mean.float()
    rank_0 = copy.deepcopy(model)
    plan = data_plan(2, buffers="broadcast", check_every=1)
    trainer = make_trainer(model, plan)
    assert type(model[0]) is nn.BatchNorm2d, "nothing is synchronised"
    for number in range(3):
        # In the second step rank 1 has no sample, so it does not even count the batch.
        step = cut(image_batch(6, seed=number), (6, 0) if number == 1 else (3, 3))
        trainer.step(*step[trainer.data_rank])
        rank_0[0](step[0][0])
        assert float(model[1].mean) != 0
    trainer.check_divergence()
    for name, buffer in rank_0[0].named_buffers():
        torch.testing.assert_close(model[0].get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(other, model[0].get_buffer(name)) for other in gathered(model[0].get_buffer(name)))
    assert int(model[0].num_batches_tracked) == 3


@ranks(2)
def test_local_leaves_every_rank_its_own_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 5)).double()
    meta_copy = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, buffers="local", check_every=1), optimizer=ADAMW)
    assert type(model[0]) is nn.BatchNorm2d
    for number in range(2):
        step = cut_evenly(image_batch(6, seed=number), 2)[trainer.data_rank]
        trainer.step(*step)
        meta_copy[0](step[0])
    for name, buffer in meta_copy[0].named_buffers():
        torch.testing.assert_close(model[0].get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    means = gathered(model[0].running_mean)
    assert not torch.equal(means[0], means[1])
    weights = gathered(model[2].weight.detach())
    assert torch.equal(weights[0], weights[1]), "weights are exchanged all the same"
    agreed = consensus_buffers(model, trainer.mesh)
    torch.testing.assert_close(agreed["0.running_mean"], (means[0] + means[1]) / 2)
    assert torch.equal(gathered(model[0].running_mean)[trainer.data_rank], means[trainer.data_rank])


@ranks(2)
def test_local_statistics_give_each_rank_its_own_gradient_and_their_sum_to_all() -> None:
    """What torch's DDP does: every rank a batch of its own, gradients averaged."""
    model = small_convnet().double()
    meta_copy = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, buffers="local"))
    parts = cut_evenly(image_batch(6), 2)
    trainer.step(*parts[trainer.data_rank])
    total = sum(cross_entropy(copy_of(meta_copy)(images), classes)[0] for images, classes in parts)
    (total / 6).backward()
    for name, parameter in meta_copy.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def copy_of(model: nn.Module) -> Any:
    """The same parameters, buffers of its own, as on another rank."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return lambda images: torch.func.functional_call(model, buffers, (images,))


def test_statistics_of_microbatches_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    for microbatches, is_told in ((2, True), (1, False)):
        caplog.clear()
        make_trainer(small_convnet(), data_plan(1, microbatches=microbatches))
        assert any("normalise each microbatch" in record.message for record in caplog.records) == is_told
    caplog.clear()
    make_trainer(small_convnet().eval(), data_plan(1, microbatches=2))
    assert not caplog.records
