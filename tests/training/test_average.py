"""The average of the weights (`[average]`) against a loop by hand, under every kind of plan; and around it: evaluation,
checkpoints under other plans, export, skipped steps, 16 bits, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from by_hand import masters, mixed
from meshes import verify
from oracle import (
    ADAMW,
    SGD,
    cross_entropy,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.checkpoint import load as load_file_of_weft
from weft.errors import ModelError, PlanError
from weft.plan.plan import Average, Plan
from weft.training.run.components import build
from weft.training.run.job import parse_job
from weft.training.step.average import WeightAverage
from weft.training.trainer import Trainer

DECAY, START, NUM_STEPS = 0.75, 1, 4
gpt: Callable[..., nn.Module] = functools.partial(small_gpt, num_layers=4, heads=4)

PLANS = {
    "data 4": data_plan(4, microbatches=2),
    "zero 1": data_plan(4, shard="optimizer"),
    "zero 2": data_plan(4, shard="gradients", clip_norm=0.1),
    "zero 3": data_plan(4, shard="parameters"),
    "hybrid zero 3": data_plan(2, replicate=2, shard="parameters"),
    "tensor 2, data 2, zero 1": tensor_plan(2, data=2, shard="optimizer"),
    "1f1b 2, data 2": pipeline_plan(2, data=2, microbatches=2),
    "interleaved 2, data 2, zero 3": pipeline_plan(
        2, data=2, microbatches=2, schedule="interleaved", chunks=2, shard="parameters"
    ),
    "pipeline 2, tensor 2": tensor_plan(2, pipeline=2, microbatches=2),
    "ring 2, ulysses 2": sequence_plan(ring=2, ulysses=2),
}


def averaging(plan: Plan, decay: float = DECAY, start: int = START) -> Plan:
    return dataclasses.replace(plan, average=Average(decay=decay, start=start))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return token_batch(8, seed=step)


def make(plan: Plan, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return make_trainer(gpt().double(), plan, example=token_batch(2)[0], **changes)


def go_on(trainer: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        trainer.step(*cut_evenly(batch_of(trainer.steps_done), trainer.data_size)[trainer.data_rank])


@functools.cache
def by_hand(num_steps: int, clip_norm: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """A model trained in one process, and its average."""
    torch.manual_seed(0)
    model = gpt().double()
    mean, optimizer = copy.deepcopy(model), SGD(model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        total, count = cross_entropy(model(inputs), targets)
        (total / count).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        with torch.no_grad():
            for kept, weight in zip(mean.parameters(), model.parameters(), strict=True):
                kept.copy_(DECAY * kept + (1 - DECAY) * weight if step >= START else weight)
    return model, mean


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    total, count = cross_entropy(model(batch_of(99)[0]), batch_of(99)[1])
    return float(total / count)


def tensors_in(folder: Path, kind: str) -> dict[str, Tensor]:
    return {name: one for path in sorted(folder.glob(f"{kind}-*")) for name, one in load_file(path).items()}


def assert_close(found: dict[str, Tensor], expected: nn.Module) -> None:
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(2, long=3)
@ranks(4)
@pytest.mark.parametrize("name", PLANS)
def test_it_is_that_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """Also in evaluations, after which training goes on as if there had been none."""
    plan = averaging(PLANS[name])
    model, mean = by_hand(NUM_STEPS, plan.step.clip_norm)
    trainer = make(plan)
    go_on(trainer, START)
    held_out = cut_evenly(batch_of(99), trainer.data_size)[trainer.data_rank]
    assert trainer.evaluate([held_out], average=True) == trainer.evaluate([held_out]), "it has not begun"
    go_on(trainer, NUM_STEPS - START - 1)
    trainer.evaluate([held_out], average=True)
    go_on(trainer, 1)
    assert trainer.evaluate([held_out], average=True) == pytest.approx(loss_of(mean), rel=1e-12)
    assert trainer.evaluate([held_out]) == pytest.approx(loss_of(model), rel=1e-12)
    trainer.check_divergence()
    trainer.save(tmp_path / "saved")
    assert_close(tensors_in(tmp_path / "saved", "average"), mean)
    assert_close(tensors_in(tmp_path / "saved", "model"), model)
    trainer.export(tmp_path / "exported", average=True)
    assert_close(tensors_in(tmp_path / "exported", "model"), mean)
    trainer.export(tmp_path / "weights")
    assert_close(tensors_in(tmp_path / "weights", "model"), model)


FLUSH_FREE = {
    "2bw": (pipeline_plan(2, data=2, microbatches=2, schedule="2bw"), {}),
    "pipedream": (pipeline_plan(2, data=2, microbatches=2, schedule="pipedream"), {"tied": False}),
}


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("name", FLUSH_FREE)
def test_verify_compares_it_with_that_of_delayed_weights(name: str) -> None:
    plan, changes = FLUSH_FREE[name]
    verified = verify(
        gpt(**changes),
        averaging(plan, start=2),
        loss="cross-entropy",
        optimizer=SGD,
        batches=[batch_of(step) for step in range(6)],
    )
    assert verified.ok and any(one.what == "average" for one in verified.differences)


@ranks(2)
def test_verify_finds_an_average_that_is_off() -> None:
    def wrong(average: WeightAverage, overflow: Tensor | None = None) -> None:
        right(average, overflow)
        average.means["norm.weight"] *= 1.001

    right = WeightAverage.add
    with mock.patch.object(WeightAverage, "add", wrong):
        verified = verify(
            small_gpt(),
            averaging(data_plan(2, shard="optimizer")),
            loss="cross-entropy",
            optimizer=SGD,
            batches=[batch_of(step) for step in range(3)],
        )
    assert not verified.ok and verified.first is not None
    assert (verified.first.what, verified.first.name, verified.first.step) == ("average", "norm.weight", 2)


CHANGES = [("zero 3", "pipeline 2, tensor 2"), ("interleaved 2, data 2, zero 3", "data 4")]


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_another_plan_goes_on_with_it(before: str, after: str, tmp_path: Path) -> None:
    first = make(averaging(PLANS[before]))
    go_on(first, 2)
    first.save(tmp_path / "two")
    trainer = make(averaging(PLANS[after]))
    trainer.load(tmp_path / "two")
    go_on(trainer, NUM_STEPS - 2)
    trainer.save(tmp_path / "four")
    assert_close(tensors_in(tmp_path / "four", "average"), by_hand(NUM_STEPS)[1])


@ranks(2)
def test_a_checkpoint_without_one_and_a_plan_without_one_are_told(tmp_path: Path) -> None:
    plan = data_plan(2, shard="optimizer")
    plain, kept = make(plan), make(averaging(plan))
    for trainer, name in ((plain, "plain"), (kept, "kept")):
        go_on(trainer, 2)
        trainer.save(tmp_path / name)
    is_first = dist.get_rank() == 0
    for trainer, name, words in (
        (plain, "kept", "holds an average of the weights, and the plan keeps none"),
        (kept, "plain", "holds no average of the weights: the average begins anew"),
    ):
        with mock.patch.object(load_file_of_weft.log, "warning") as said:
            trainer.load(tmp_path / name)
        assert sum(words in call.args[0] for call in said.call_args_list) == is_first
    assert kept.average is not None and not kept.average.has_begun
    go_on(kept, 1)
    assert kept.average.has_begun


@ranks(2)
def test_float32_masters_are_averaged_to_the_bit() -> None:
    """Under mixed precision; the model has them in bf16 while it is evaluated with them."""
    plan = averaging(mixed(data_plan(2, shard="gradients"), compute="bf16"), decay=0.999, start=0)
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt(), plan, optimizer=ADAMW)
    mean = {name: tensor.clone() for name, tensor in masters(trainer).items()}
    for step in range(3):
        trainer.step(*cut_evenly(batch_of(step), 2)[trainer.data_rank])
        for name, master in masters(trainer).items():
            mean[name].lerp_(master, 1 - 0.999)
    weights = {name: p.detach().clone() for name, p in trainer.named_model.named_parameters()}
    with trainer.averaged():
        assert all(torch.equal(masters(trainer)[name], mean[name]) for name in mean)
        for name, parameter in trainer.named_model.named_parameters():
            assert torch.equal(parameter, mean[name].bfloat16())
    assert all(torch.equal(p, weights[name]) for name, p in trainer.named_model.named_parameters())


def test_weights_in_16_bits_are_averaged_in_32() -> None:
    """A thousandth of a difference is less than half a unit in the last place of bf16, and would be lost."""
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt().bfloat16(), averaging(Plan(), decay=0.999, start=0))
    mean = {name: p.detach().double() for name, p in trainer.named_model.named_parameters()}
    for step in range(3):
        trainer.step(*batch_of(step))
        for name, p in trainer.named_model.named_parameters():
            mean[name] += 0.001 * (p.detach().double() - mean[name])
    assert trainer.average is not None
    weights = {name: p.detach().clone() for name, p in trainer.named_model.named_parameters()}
    for _ in range(2):  # the second use finds what the first one left
        for name, found in trainer.average.means.items():
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), mean[name], rtol=1e-6, atol=1e-7)
        with trainer.averaged():
            for name, p in trainer.named_model.named_parameters():
                assert torch.equal(p, trainer.average.means[name].bfloat16())
    assert all(torch.equal(p, weights[name]) for name, p in trainer.named_model.named_parameters())


@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_steps_leave_it_alone(on_device: bool) -> None:
    plan = averaging(mixed(Plan(), compute="fp16", loss_scale=1024), start=0)
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt(), plan)
    go_on(trainer, 1)
    assert trainer.average is not None
    before = {name: mean.clone() for name, mean in trainer.average.means.items()}
    if on_device:  # as fused optimizers do on a GPU
        trainer.average.add(torch.ones(()))
        assert all(torch.equal(mean, before[name]) for name, mean in trainer.average.means.items())
        trainer.average.add(torch.zeros(()))
        for name, piece in ((piece.name, piece.tensor) for piece in trainer.sync.pieces):
            expected = before[name].lerp(piece.detach(), 1 - DECAY)
            torch.testing.assert_close(trainer.average.means[name], expected, rtol=1e-6, atol=1e-8)
        return
    handle = trainer.model.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    go_on(trainer, 1)
    handle.remove()
    assert trainer.num_skipped == 1
    assert all(torch.equal(mean, before[name]) for name, mean in trainer.average.means.items())


def test_loading_its_kernels_leaves_everything_as_it_was() -> None:
    """As is done for pipelines on GPUs, before messages are under way."""
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt(), averaging(Plan(), start=1))
    assert trainer.average is not None
    weights = {name: p.detach().clone() for name, p in trainer.named_model.named_parameters()}
    trainer.average.warm_up()
    trainer.not_finite.warm_up()
    assert not trainer.average.has_begun
    assert all(torch.equal(p, weights[name]) for name, p in trainer.named_model.named_parameters())
    go_on(trainer, 2)
    torch.manual_seed(0)
    expected = make_trainer(small_gpt(), averaging(Plan(), start=1))
    go_on(expected, 2)
    assert expected.average is not None
    for name, mean in expected.average.means.items():
        assert torch.equal(trainer.average.means[name], mean)


@ranks(2)
def test_running_statistics_are_the_models_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(small_convnet().double(), averaging(data_plan(2), start=0))
    for step in range(3):
        trainer.step(*cut_evenly(image_batch(8, seed=step), 2)[trainer.data_rank])
    trainer.export(tmp_path / "average", average=True)
    found = tensors_in(tmp_path / "average", "model")
    for name, buffer in trainer.named_model.named_buffers():
        assert torch.equal(found[name], buffer)
    small_convnet().load_state_dict(found)


@ranks(2)
def test_training_and_saving_with_it_in_place_of_the_weights_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt().double(), averaging(data_plan(2, shard="optimizer"), start=0))
    go_on(trainer, 2)
    before = {name: p.detach().clone() for name, p in trainer.named_model.named_parameters()}
    with trainer.averaged():
        with pytest.raises(ModelError, match=r"step\(\) inside trainer.averaged\(\)"):
            go_on(trainer, 1)
        for action in (trainer.save, trainer.load, trainer.export):
            with pytest.raises(ModelError, match=r"would take the average for the weights; leave the context first"):
                action(tmp_path / "nothing")
        with pytest.raises(ModelError, match="entered twice"), trainer.averaged():
            pass
    assert all(torch.equal(p, before[name]) for name, p in trainer.named_model.named_parameters())
    with pytest.raises(RuntimeError, match="planted"), trainer.averaged():
        raise RuntimeError("planted")
    trainer.flush()
    assert all(torch.equal(p, before[name]) for name, p in trainer.named_model.named_parameters()), "after an error"


def test_a_plan_without_one_says_so() -> None:
    trainer = make_trainer(small_gpt(), Plan())
    for action in (lambda: trainer.evaluate([batch_of(0)], average=True), lambda: trainer.export("x", average=True)):
        with pytest.raises(PlanError, match=r"the plan keeps no average of the weights; set \[average\] decay"):
            action()


def test_a_job_that_evaluates_it_needs_a_plan_that_keeps_it() -> None:
    job = parse_job('[dataset]\nname = "digits"\n[model]\nname = "convnet"\n[steps]\nevaluate_average = true\n')
    words = "evaluate_average = true needs an average of the weights, and the plan keeps none"
    assert [words in problem for problem in build(job)[1]].count(True) == 1
    assert not any(words in problem for problem in build(dataclasses.replace(job, plan=averaging(Plan())))[1])
