"""Checkpoints of replicas that differ: the same plan goes on to the bit, between exchanges too, others from a mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from by_hand import masters
from oracle import (
    ADAMW,
    MLP,
    SGD,
    batch_of,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import gathered, ranks
from safetensors.torch import load_file
from torch import Tensor

from weft.checkpoint import load as checkpoint
from weft.checkpoint.pretrained import load_weights
from weft.parallel.state.buffers import persistent_buffers
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

NUM_BEFORE, NUM_AFTER = 4, 3
"""Replicas exchange every 3 steps: once before the save, and in the middle of what follows."""
DELAYED = {"sync": "delayed", "every": 1, "delay": 3}
DILOCO = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def local(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, data=dataclasses.replace(plan.data, **{"sync": "local", "every": 3, **changes}))


PLANS: dict[str, tuple[int, Plan]] = {
    "average": (2, local(data_plan(2))),
    "diloco": (2, local(data_plan(2), **DILOCO)),
    "delayed": (2, local(data_plan(2), **DELAYED)),
    "streaming": (2, local(data_plan(2), **DILOCO, fragments=2, delay=2, mix=0.5)),
    "streaming, after steps together": (2, local(data_plan(2), switch_step=2, delay=2)),
    "delayed, zero 3 inside": (4, local(data_plan(2, replicate=2, shard="parameters"), **DELAYED)),
    "batch norm": (2, local(data_plan(2))),
    "separate statistics": (2, local(data_plan(2, buffers="local"))),
    "zero 1 inside": (4, local(data_plan(2, replicate=2, shard="optimizer"))),
    "zero 3 inside": (4, local(data_plan(2, replicate=2, shard="parameters"), **DILOCO)),
    "tensor inside": (4, local(tensor_plan(2, data=2))),
    "pipeline inside": (4, local(pipeline_plan(2, data=2, microbatches=2, cuts=(1,)))),
}


def make(name: str) -> Trainer:
    torch.manual_seed(3)
    plan = PLANS[name][1]
    if "statistics" in name or "norm" in name:
        return make_trainer(small_convnet(), plan, optimizer=ADAMW)
    return make_trainer(small_gpt(dropout=0.1), plan, optimizer=ADAMW, example=token_batch(2)[0])


def train(trainer: Trainer, num_steps: int) -> list[float]:
    """Losses of steps on batches that depend on the step alone."""
    losses = []
    for _ in range(num_steps):
        images, tokens = image_batch(8, seed=trainer.steps_done), token_batch(8, seed=trainer.steps_done)
        batch = (images[0].float(), images[1]) if trainer.parts.has_batch_norms else tokens
        losses.append(float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])))
    return losses


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """All that this rank has."""
    found = {piece.name: piece.tensor.detach().clone() for piece in trainer.sync.pieces}
    found |= {name: buffer.clone() for name, buffer in persistent_buffers(trainer.named_model).items()}
    for piece in trainer.sync.pieces:
        states = trainer.optimizer.state[piece.tensor].items()
        found |= {f"{piece.name}/{key}": torch.as_tensor(value).clone() for key, value in states}
    return found


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def goes_on_to_the_bit(folder: Path, name: str, *, before: int) -> None:
    trainer = make(name)
    train(trainer, before)
    at_save = state_of(trainer)
    trainer.save(folder / "waited for")
    trainer.save(folder / "beside", wait=False)
    assert_same_bits(state_of(trainer), at_save)
    losses = train(trainer, NUM_AFTER)
    trainer.wait_for_save()
    for path in (folder / "waited for", folder / "beside")[-2 if dist.get_world_size() == 2 else -1 :]:
        again = make(name)
        train(again, 1)  # what it did before does not count
        with mock.patch.object(checkpoint.log, "warning") as warned:
            again.load(path)
        assert warned.call_args_list == []
        assert_same_bits(state_of(again), at_save)
        assert again.sync.agrees == (before % 3 == 0)
        assert train(again, NUM_AFTER) == losses
        assert_same_bits(state_of(again), state_of(trainer))


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", [name for name, (num_ranks, _) in PLANS.items() if num_ranks == 2])
def test_the_same_plan_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    goes_on_to_the_bit(tmp_path, name, before=NUM_BEFORE)


@ranks(2)
def test_and_from_a_save_right_after_an_exchange(tmp_path: Path) -> None:
    goes_on_to_the_bit(tmp_path, "diloco", before=3)
    stored = [name for path in tmp_path.glob("*/rank-*") for name in load_file(path)]
    # Replicas agree: their weights are the portable ones.
    assert any("replica/anchor/" in name for name in stored) and not any("replica/weight/" in name for name in stored)


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize(
    "name",
    ["zero 1 inside", "zero 3 inside", "tensor inside", pytest.param("pipeline inside", marks=pytest.mark.long)],
)
def test_the_same_plan_goes_on_to_the_bit_with_replicas_of_several_ranks(tmp_path: Path, name: str) -> None:
    goes_on_to_the_bit(tmp_path, name, before=NUM_BEFORE)


def mean_over_replicas(values: dict[str, Tensor], trainer: Trainer) -> dict[str, Tensor]:
    """The mean of what the first rank of every replica has, by hand."""
    found = gathered((trainer.mesh.replica, values))
    replicas = dict(reversed(found))
    return {name: torch.stack([one[name].double() for one in replicas.values()]).mean(0) for name in values}


def portable(folder: Path, kind: str) -> dict[str, Tensor]:
    """A checkpoint's tensors of a kind, each once where a weight is tied."""
    found = {name: one for path in sorted(folder.glob(f"{kind}-*")) for name, one in load_file(path).items()}
    if "embedding.weight" in found:
        assert torch.equal(found.pop("head.weight"), found["embedding.weight"])
    return found


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor.double(), theirs[name].double(), rtol=1e-6, atol=1e-7, msg=name)


def files_hold_the_mean(folder: Path, name: str) -> None:
    """Of weights and of the optimizer's state; `average` of the plan: the weights of the last exchange."""
    trainer = make(name)
    train(trainer, NUM_BEFORE)
    weights = mean_over_replicas(masters(trainer), trainer)
    trainer.save(folder / "whole")
    trainer.export(folder / "exported")
    assert_close(portable(folder / "whole", "model"), weights)
    assert_close(portable(folder / "exported", "model"), weights)
    if trainer.plan.axes.tensor * trainer.plan.axes.pipeline == 1 and trainer.plan.data.shard == "nothing":
        states = {one: t for one, t in state_of(trainer).items() if "/" in one}
        assert_close(portable(folder / "whole", "optimizer"), mean_over_replicas(states, trainer))
    dist.barrier()


@ranks(2)
def test_files_hold_the_mean_of_replicas(tmp_path: Path) -> None:
    files_hold_the_mean(tmp_path, "average")


@ranks(4)
@pytest.mark.parametrize("name", ["zero 3 inside", "tensor inside"])
def test_files_hold_the_mean_of_replicas_of_several_ranks(tmp_path: Path, name: str) -> None:
    files_hold_the_mean(tmp_path, name)


@ranks(2)
@pytest.mark.parametrize("name", ["batch norm", "separate statistics"])
def test_running_statistics_are_averaged(tmp_path: Path, name: str) -> None:
    trainer = make(name)
    train(trainer, NUM_BEFORE)
    buffers = persistent_buffers(trainer.named_model)
    true = mean_over_replicas({one: t for one, t in buffers.items() if t.is_floating_point()}, trainer)
    assert any(not torch.equal(buffers[one].double(), true[one]) for one in true)
    trainer.save(tmp_path / "saved")
    found = portable(tmp_path / "saved", "model")
    assert_close({one: found[one] for one in true}, true)
    dist.barrier()


@ranks(2)
def test_weights_on_which_replicas_agree_are_saved_to_the_bit(tmp_path: Path) -> None:
    trainer = make("diloco")
    train(trainer, 3)
    weights = masters(trainer)
    trainer.save(tmp_path / "saved")
    assert_same_bits(portable(tmp_path / "saved", "model"), weights)
    dist.barrier()


OTHERS: dict[str, Plan] = {
    "all-reduce": data_plan(2),
    "zero 1": data_plan(2, shard="optimizer"),
    "another rhythm": local(data_plan(2), switch_step=2),
}


def gpt_on(plan: Plan) -> Trainer:
    torch.manual_seed(5)
    return make_trainer(small_gpt(dropout=0.1), plan, optimizer=ADAMW, example=token_batch(2)[0])


@ranks(2)
def test_another_plan_goes_on_from_the_mean(tmp_path: Path) -> None:
    trainer = make("diloco")
    train(trainer, NUM_BEFORE)
    weights = mean_over_replicas(masters(trainer), trainer)
    trainer.save(tmp_path / "saved")
    for name, plan in OTHERS.items():
        other = gpt_on(plan)
        train(other, 1)
        with mock.patch.object(checkpoint.log, "warning") as warned:
            other.load(tmp_path / "saved")
        assert len(warned.call_args_list) == (dist.get_rank() == 0), name
        assert_close(masters(other), weights)
        assert other.sync.agrees and other.steps_done == NUM_BEFORE
        train(other, 1)
    assert other.sync.agrees  # step 5 comes 3 after switch_step: counted from the checkpoint's steps, not from 0
    train(other, 1)
    assert not other.sync.agrees
    dist.barrier()


@ranks(2)
def test_replicas_start_from_an_all_reduce_checkpoint_and_from_weights(tmp_path: Path) -> None:
    trainer = gpt_on(data_plan(2))
    train(trainer, 2)
    trainer.save(tmp_path / "saved")
    weights = masters(trainer)
    for load in (Trainer.load, load_weights):
        read: Callable[..., None] = load
        other = make("diloco")
        train(other, 2)
        read(other, tmp_path / "saved")
        assert_same_bits(masters(other), weights)
        other.sync.begin()
        own = other.sync.own_tensors()  # type: ignore[attr-defined]
        for name, weight in weights.items():
            assert torch.equal(own[f"anchor/{name}"], weight) and not own[f"momentum/{name}"].any()
    dist.barrier()


class Gated(torch.nn.Module):
    """Uses its second layer only for samples whose first feature is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) if bool((x[:, 0] > 0).all()) else self.first(x)


@ranks(3)
@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg"])
def test_states_that_only_some_replicas_have(tmp_path: Path, key: str) -> None:
    """The mean is over those; the others go on without any."""
    optimizer = ADAMW if key == "exp_avg" else SGD

    def build() -> Trainer:
        torch.manual_seed(0)
        return make_trainer(Gated(), local(data_plan(3)), optimizer=optimizer)

    def step(trainer: Trainer) -> float:
        inputs, targets = batch_of(2, seed=trainer.data_rank + 3 * trainer.steps_done)
        inputs = inputs.float()
        inputs[:, 0] = inputs[:, 0].abs() * (1 if trainer.data_rank else -1)
        return float(trainer.step(inputs, targets))

    trainer = build()
    step(trainer)
    assert (trainer.model.second.weight in trainer.optimizer.state) == (trainer.data_rank > 0)  # type: ignore[union-attr]
    trainer.save(tmp_path / "saved")
    mine = trainer.optimizer.state.get(trainer.model.second.weight, {}).get(key)  # type: ignore[union-attr, call-overload]
    holders = [one for one in gathered(mine) if one is not None]
    found = portable(tmp_path / "saved", "optimizer")
    torch.testing.assert_close(found[f"second.weight/{key}"], torch.stack(holders).mean(0))
    if key == "exp_avg":
        assert float(found["second.weight/step"]) == 1.0
    losses = [step(trainer) for _ in range(3)]
    again = build()
    again.load(tmp_path / "saved")
    assert (again.model.second.weight in again.optimizer.state) == (again.data_rank > 0)  # type: ignore[union-attr]
    assert [step(again) for _ in range(3)] == losses
    assert_same_bits(masters(again), masters(trainer))


@ranks(2)
def test_one_replica_alone_keeps_its_outer_momentum(tmp_path: Path) -> None:
    plan = local(tensor_plan(2), **DILOCO)
    trainer = gpt_on(plan)
    train(trainer, NUM_BEFORE)
    trainer.save(tmp_path / "saved")
    losses = train(trainer, NUM_AFTER)
    again = gpt_on(plan)
    again.load(tmp_path / "saved")
    assert train(again, NUM_AFTER) == losses
    assert_same_bits(masters(again), masters(trainer))


@ranks(2)
def test_the_loss_scale_is_each_replicas_own(tmp_path: Path) -> None:
    """So are skipped steps: replica 1 alone has met a batch that is not finite."""
    trainer = make_trainer(MLP(), local(data_plan(2)), optimizer=ADAMW)
    inputs, targets = batch_of(4)
    trainer.step(inputs, targets)
    trainer.step(inputs * (float("nan") if trainer.data_rank else 1.0), targets)
    assert trainer.num_skipped == trainer.data_rank
    trainer.save(tmp_path / "saved")
    again = make_trainer(MLP(), local(data_plan(2)), optimizer=ADAMW)
    again.load(tmp_path / "saved")
    assert again.num_skipped == again.data_rank
    assert_same_bits(state_of(again), state_of(trainer))
    assert float(portable(tmp_path / "saved", "optimizer")["first.weight/step"]) == 2.0  # of 2 and 1, to even
    dist.barrier()
