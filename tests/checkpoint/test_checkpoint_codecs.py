"""Checkpoints of what codecs keep: the same plan goes on to the bit, another one with the same sum over replicas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import SGD, data_plan, make_trainer, pipeline_plan, sequence_plan, small_gpt, tensor_plan, train_on_tokens
from oracle import token_batch as tokens
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.checkpoint import codec_state
from weft.codecs.base import LINEAR_KINDS
from weft.plan.plan import Codec, Plan
from weft.sync.delayed import DelayedSync
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer

pytestmark = pytest.mark.long

SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.05},
    "dgc": {"density": 0.05},
    "powersgd": {"rank": 2},
    "qsgd": {"levels": 4},
}
NUM_BEFORE, NUM_AFTER = 3, 3


def coded(plan: Plan, name: str, **changes: Any) -> Plan:
    settings = {"dense_below": 1000, **SETTINGS.get(name, {}), **changes}
    return dataclasses.replace(plan, codec=Codec(name=name, **settings) if name != "none" else Codec())


def local(plan: Plan) -> Plan:
    return dataclasses.replace(plan, data=dataclasses.replace(plan.data, sync="local", every=2))


def model_of() -> nn.Module:
    """Its matrices are compressed, also those of which a rank has half; its tied embedding never is."""
    return small_gpt(hidden=48, mlp_hidden=48).double()


def make(plan: Plan, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    return make_trainer(model_of(), plan, optimizer=SGD, example=tokens(2)[0], **changes)


def kept(trainer: Trainer) -> dict[str, Tensor]:
    """All that this rank's codecs keep."""
    assert trainer.sync.compressed is not None
    return {name: tensor.clone() for name, tensor in trainer.sync.compressed.tensors().items()}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {**kept(trainer), **{piece.name: piece.tensor.detach().clone() for piece in trainer.sync.pieces}}


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def goes_on_to_the_bit(folder: Path, plan: Plan) -> None:
    """Batches change their size from step to step, and with it the unit of gradients."""
    trainer = make(plan)
    train_on_tokens(trainer, NUM_BEFORE)
    at_save = state_of(trainer)
    trainer.save(folder / "saved")
    losses = train_on_tokens(trainer, NUM_AFTER)
    again = make(plan)
    train_on_tokens(again, 1)  # what it did before does not count
    again.load(folder / "saved")
    assert_same_bits(state_of(again), at_save)
    assert train_on_tokens(again, NUM_AFTER) == losses
    assert_same_bits(state_of(again), state_of(trainer))
    assert plan.codec.name == "qsgd" or any(tensor.any() for tensor in at_save.values())


CODECS = ["topk", "dgc", "onebit", "powersgd", "qsgd"]
LONG = pytest.mark.long


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize("name", CODECS)
def test_the_same_plan_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    goes_on_to_the_bit(tmp_path, coded(data_plan(2), name))


@pytest.mark.sampled(long=3)
@ranks(2)
@pytest.mark.parametrize("name", ["topk", *(pytest.param(one, marks=LONG) for one in ("onebit", "powersgd", "qsgd"))])
def test_the_same_plan_of_local_steps_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    goes_on_to_the_bit(tmp_path, coded(local(data_plan(2)), name))


PLANS: dict[str, Plan] = {
    "data 4": data_plan(4),
    "zero 3": data_plan(2, replicate=2, shard="parameters"),
    "tensor 2": tensor_plan(2, data=2),
    "ring 2": sequence_plan(ring=2, data=2),
    "pipeline 2": pipeline_plan(2, data=2, microbatches=2, cuts=(1,)),
}


@pytest.mark.sampled(long=6)
@LONG
@ranks(4)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("axes", list(PLANS)[1:])
def test_the_same_plan_of_more_axes_goes_on_to_the_bit(tmp_path: Path, axes: str, name: str) -> None:
    goes_on_to_the_bit(tmp_path, coded(PLANS[axes], name))


def fill(trainer: Trainer) -> None:
    """Whole numbers, whose sums are exact, another draw on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    assert trainer.sync.compressed is not None
    for name, tensor in trainer.sync.compressed.tensors().items():
        if name.partition("/")[0] in LINEAR_KINDS:
            tensor.copy_(torch.randint(-999, 999, tensor.shape, generator=generator, dtype=tensor.dtype))


def totals(trainer: Trainer) -> dict[str, Tensor]:
    """The sum over replicas of what codecs keep, as whole tensors, of parts put together by hand."""
    grid, rank, found = trainer.mesh.grid, trainer.mesh.world.rank, {}
    assert trainer.sync.compressed is not None
    ranges = trainer.sync.compressed.ranges()
    for name, tensor in kept(trainer).items():
        kind, _, parameter = name.partition("/")
        if kind in LINEAR_KINDS:
            layout = dataclasses.replace(trainer.layouts[parameter], flat_range=ranges[parameter])
            whole = torch.zeros(layout.global_shape, dtype=torch.float64)
            for runs in layout.runs(grid.axes.sizes, grid.coordinates(rank)):
                for there, here in runs.places():
                    whole.view(-1)[there : there + runs.numel] = tensor[here : here + runs.numel]
            found[name] = whole
    summed: dict[str, Tensor] = {}
    for part in gathered(found):
        for name, whole in part.items():
            summed[name] = summed[name] + whole if name in summed else whole
    return summed


def goes_over(folder: Path, before: Plan, after: Plan, *, factor: float = 1.0) -> None:
    trainer = make(before)
    assert trainer.sync.compressed is not None
    fill(trainer)
    trainer.sync.compressed.keep = 0.5  # values of the next exchange will have another unit
    expected = totals(trainer)
    trainer.save(folder / "saved")
    other = make(after)
    train_on_tokens(other, 2)
    with mock.patch.object(codec_state.log, "warning") as warned:
        other.load(folder / "saved")
    assert not any("dropped" in str(call) for call in warned.call_args_list)
    found = totals(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name] * 0.5 * factor)] == []
    assert found and all(whole.any() for whole in found.values())
    assert other.sync.compressed is not None and other.sync.compressed.keep == 1.0
    train_on_tokens(other, 1)
    dist.barrier()


PAIRS = [
    ("data 4", "zero 3"),
    pytest.param("zero 3", "tensor 2", marks=LONG),
    pytest.param("tensor 2", "ring 2", marks=LONG),
    pytest.param("ring 2", "pipeline 2", marks=LONG),
    pytest.param("pipeline 2", "data 4", marks=LONG),
]


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_plan_goes_on_with_the_same_sum(tmp_path: Path, before: str, after: str) -> None:
    goes_over(tmp_path, coded(PLANS[before], "dgc"), coded(PLANS[after], "dgc", density=0.1))


@LONG
@ranks(4)
@pytest.mark.parametrize("name", ["topk", "onebit", "powersgd"])
def test_another_plan_goes_on_with_the_sum_of_every_codec(tmp_path: Path, name: str) -> None:
    goes_over(tmp_path, coded(PLANS["tensor 2"], name), coded(PLANS["data 4"], name))


@LONG
@ranks(2)
def test_another_delay_goes_on_with_what_no_exchange_under_way_has_sent(tmp_path: Path) -> None:
    """PowerSGD keeps one state for each of them."""

    def delayed(delay: int) -> Plan:
        plan = data_plan(2)
        return coded(
            dataclasses.replace(plan, data=dataclasses.replace(plan.data, sync="delayed", delay=delay)), "powersgd"
        )

    trainer, other = make(delayed(4)), make(delayed(5))
    train_on_tokens(trainer, 9)
    trainer.save(tmp_path / "saved")
    assert isinstance(trainer.sync, DelayedSync) and len(trainer.sync.further_compressed) == 3
    kept_now, further = kept(trainer), [one.tensors() for one in trainer.sync.further_compressed]
    mine = {
        name: tensor + sum(one[name] for one in further)
        for name, tensor in kept_now.items()
        if name.partition("/")[0] in LINEAR_KINDS
    }
    of_all = gathered(mine)
    train_on_tokens(other, 7)
    other.load(tmp_path / "saved")
    found = kept(other)
    for name in mine:
        torch.testing.assert_close(found[name], sum(one[name] for one in of_all) / len(of_all))
    assert isinstance(other.sync, DelayedSync)
    assert not any(one.tensors()[name].any() for one in other.sync.further_compressed for name in mine)
    assert mine and all(tensor.any() for tensor in mine.values())
    for one in (trainer, other):
        one.close()


@LONG
@ranks(4)
def test_local_replicas_go_on_with_the_same_mean(tmp_path: Path) -> None:
    """Of 2 replicas of 2 ranks each, over which the state is cut; then of 4 replicas, whose sum is twice as large."""
    before = coded(local(data_plan(2, replicate=2, shard="parameters")), "topk")
    goes_over(tmp_path, before, coded(local(data_plan(4)), "topk"), factor=2.0)


@ranks(2)
def test_what_another_plan_cannot_use_is_dropped_with_a_warning(tmp_path: Path) -> None:
    trainer = make(coded(data_plan(2), "topk"))
    fill(trainer)
    expected = sum(float(one.square().sum()) for one in totals(trainer).values()) ** 0.5
    trainer.save(tmp_path / "saved")
    for plan, why in (
        (data_plan(2), '[codec] name = "none" does not go on with it'),
        (coded(data_plan(2), "onebit"), '[codec] name = "onebit" does not go on with it'),
        (coded(local(data_plan(2)), "topk"), '[data] sync = "local" exchanges other quantities than "all-reduce"'),
        (coded(data_plan(2), "topk", dense_below=4000), "tensors are not compressed any more"),
    ):
        other = make(plan)
        train_on_tokens(other, 2)
        with mock.patch.object(codec_state.log, "warning") as warned:
            other.load(tmp_path / "saved")
        texts = [call.args[0] % call.args[1:] for call in warned.call_args_list if why in str(call)]
        assert len(texts) == (dist.get_rank() == 0), warned.call_args_list
        if texts and "dense_below" not in why and "any more" not in why:
            assert f"with a norm of {expected:.3g} in all" in texts[0]
        if other.sync.compressed is not None and "any more" not in why:
            assert not any(one.any() for name, one in kept(other).items() if not name.startswith("start/"))
    dist.barrier()


@ranks(2)
def test_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    trainer = make(coded(data_plan(2), "topk"))
    if dist.get_rank() == 1:
        next(iter(trainer.sync.compressed.tensors().values()))[0] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(Exception, match="codec's residual"):
        trainer.save(tmp_path / "saved")


def in_process(plan: Plan) -> Trainer:
    torch.manual_seed(3)
    return parallelize(
        model_of(),
        plan,
        loss="cross-entropy",
        optimizer=SGD,
        device="cpu",
        replicas_in_process=True,
    )


IN_PROCESS = {
    "local": coded(local(data_plan(2)), "topk"),
    "all-reduce": coded(data_plan(2), "dgc"),
    "powersgd": coded(data_plan(2), "powersgd", warmup_steps=1),
}


@ranks(2)
def goes_on_as_ranks(folder: Path, name: str, losses: list[float]) -> None:
    trainer = make(IN_PROCESS[name])
    trainer.load(folder / "in process")
    found = gathered(train_on_tokens(trainer, NUM_AFTER))
    assert [sum(both) / 2 for both in zip(*found, strict=True)] == pytest.approx(losses, rel=1e-12)
    trainer.save(folder / "ranks")


def states_in(trainer: Trainer) -> list[dict[str, Tensor]]:
    """What the codecs of all ranks keep that are played here, and the weights."""
    found = [exchange.tensors() for one in (trainer, *trainer.others) for exchange in one.sync.all_compressed]
    return [*found, *(dict(one.named_model.named_parameters()) for one in (trainer, *trainer.others))]


@pytest.mark.parametrize("name", ["local", "all-reduce", pytest.param("powersgd", marks=LONG)])
def test_replicas_in_process_and_ranks_read_each_others(tmp_path: Path, name: str) -> None:
    trainer = in_process(IN_PROCESS[name])
    train_on_tokens(trainer, NUM_BEFORE)
    trainer.save(tmp_path / "in process")
    losses = train_on_tokens(trainer, NUM_AFTER)
    goes_on_as_ranks(folder=tmp_path, name=name, losses=losses)
    again = in_process(IN_PROCESS[name])
    again.load(tmp_path / "ranks")
    for mine, theirs in zip(states_in(trainer), states_in(again), strict=True):
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-12, atol=1e-15, msg=key)
    trainer.close()
    again.close()


@ranks(4)
def goes_on_with_the_sum(folder: Path, expected: dict[str, Tensor]) -> None:
    trainer = make(coded(data_plan(4), "topk"))
    trainer.load(folder / "saved")
    found = totals(trainer)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@LONG
def test_four_ranks_go_on_with_the_sum_of_two_in_process(tmp_path: Path) -> None:
    trainer = in_process(coded(data_plan(2), "topk"))
    expected: dict[str, Tensor] = {}
    for number, exchange in enumerate(trainer.sync.all_compressed):
        for name, tensor in exchange.tensors().items():
            tensor.copy_(torch.arange(tensor.numel()) * (number + 1))
            whole = tensor.view(trainer.layouts[name.partition("/")[2]].global_shape)
            expected[name] = whole.clone() + expected.get(name, 0)
    trainer.save(tmp_path / "saved")
    goes_on_with_the_sum(folder=tmp_path, expected=expected)
    trainer.close()
