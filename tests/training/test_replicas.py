"""Replicas that differ between exchanges: evaluated as one model, each with its own bad luck, wrong together or not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from by_hand import masters
from losses import contrastive
from oracle import (
    ADAMW,
    MLP,
    SGD,
    Batch,
    batch_of,
    cross_entropy,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    small_convnet,
    small_gpt,
    token_batch,
)
from pretend_gpu import no_waits, pretended_gpu
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.errors import DataError, DivergenceError, NotFiniteError
from weft.mesh import Mesh
from weft.plan.plan import Average, Data, Plan
from weft.training.loss.gather_batch import gather_batch
from weft.training.run import stop as stop_module
from weft.training.run.stop import StopRequest
from weft.training.step import not_finite, update
from weft.training.step.divergence import DivergenceCheck
from weft.training.trainer import Trainer

NAN = float("nan")


def local(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, data=dataclasses.replace(plan.data, **{"sync": "local", "every": 3, **changes}))


SHARDED = {shard: local(data_plan(2, replicate=2, shard=shard)) for shard in ("optimizer", "parameters")}


def part(trainer: Trainer, batch: Batch) -> Batch:
    return cut_evenly(batch, trainer.data_size)[trainer.data_rank]


def train(trainer: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        trainer.step(*part(trainer, batch_of(8, seed=trainer.steps_done)))


def mean_model(trainer: Trainer) -> nn.Module:
    """The mean of all replicas' weights, by hand."""
    replicas = dict(gathered((trainer.mesh.replica, masters(trainer))))
    assert len(replicas) == trainer.mesh.num_replicas > 1
    model = MLP()
    model.load_state_dict({name: torch.stack([one[name] for one in replicas.values()]).mean(0) for name in replicas[0]})
    return model


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


# Evaluation and the end.


def make(plan: Plan, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return make_trainer(MLP(), plan, **{"optimizer": ADAMW, **changes})


def evaluates_the_mean(plan: Plan) -> None:
    trainer = make(plan)
    train(trainer, 4)
    own, mean = masters(trainer), mean_model(trainer)
    held_out = batch_of(7, 99)
    with torch.no_grad():
        total, count = cross_entropy(mean(held_out[0]), held_out[1])
    inputs, targets = part(trainer, held_out)
    each = 1 if trainer.mesh.replica == 0 else 4  # replicas need not have as many batches
    mine = list(zip(inputs.split(each), targets.split(each), strict=True))
    assert trainer.evaluate(mine) == pytest.approx(float(total / count), rel=1e-12)
    assert_same_bits(masters(trainer), own)
    train(trainer, 3)
    untouched = make(plan)
    train(untouched, 7)
    assert_same_bits(masters(trainer), masters(untouched))


@ranks(2)
def test_the_mean_is_evaluated_and_training_goes_on_as_if_it_were_not() -> None:
    evaluates_the_mean(local(data_plan(2)))


@ranks(4)
@pytest.mark.parametrize("shard", SHARDED)
def test_the_mean_is_evaluated_with_state_sharded_inside(shard: str) -> None:
    evaluates_the_mean(SHARDED[shard])


@ranks(4)
def test_an_error_in_an_evaluation_leaves_replicas_as_they_were() -> None:
    """Parameters that all ranks of a replica have whole are given their own values again."""

    def spoilt() -> Iterator[Batch]:
        yield part(trainer, batch_of(8))
        raise RuntimeError("no more data")

    trainer, untouched = make(SHARDED["optimizer"]), make(SHARDED["optimizer"])
    train(trainer, 4)
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.evaluate(spoilt())
    train(trainer, 1)
    train(untouched, 5)
    assert_same_bits(masters(trainer), masters(untouched))


@ranks(2)
def test_all_replicas_generate_the_same_text() -> None:
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt().double(), local(data_plan(2)), optimizer=ADAMW)
    for step in range(4):
        trainer.step(*part(trainer, token_batch(4, seed=step)))
    replicas = gathered(masters(trainer))
    mean = small_gpt().double()
    mean.load_state_dict({name: (one + replicas[1][name]) / 2 for name, one in replicas[0].items()}, strict=False)
    text = [1, 2]
    with torch.no_grad():
        for _ in range(6):
            text.append(int(mean(torch.tensor([text]))[0, -1].argmax()))
    assert trainer.generate([1, 2], num_tokens=6, context=8, temperature=0) == text


@ranks(2)
@pytest.mark.parametrize("num_steps", [3, 4])
def test_in_the_end_the_model_has_the_mean(num_steps: int) -> None:
    plan = local(data_plan(2))
    torch.manual_seed(0)
    model = small_convnet().double()
    trainer = make_trainer(model, plan, optimizer=ADAMW)
    for step in range(num_steps):
        trainer.step(*part(trainer, image_batch(8, seed=step)))
    before = gathered({name: one.clone() for name, one in model.state_dict().items()})
    trainer.close()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (before[0][name] + before[1][name]) / 2, rtol=1e-12, atol=1e-14)
            assert torch.equal(before[0][name], before[1][name]) == (num_steps == 3), name


@ranks(2)
def test_the_moving_average_is_the_same_on_all_replicas() -> None:
    plan = dataclasses.replace(local(data_plan(2), every=2), average=Average(decay=0.9))
    trainer = make(plan)
    train(trainer, 5)
    own = masters(trainer)
    with trainer.averaged():
        averages = gathered(masters(trainer))
        assert not torch.equal(averages[0]["last.weight"], own["last.weight"])
    assert_same_bits(averages[0], averages[1])
    assert_same_bits(masters(trainer), own)
    assert not torch.equal(*(one["last.weight"] for one in gathered(own)))


# Steps that are not finite.


def spoilt_step(trainer: Trainer, *, replica: int) -> Tensor:
    inputs, targets = part(trainer, batch_of(8, seed=trainer.steps_done))
    return trainer.step(inputs * (NAN if trainer.mesh.replica == replica else 1.0), targets)


@ranks(4)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_a_replica_skips_alone_and_training_goes_on(shard: str) -> None:
    plan = SHARDED["parameters"] if shard == "parameters" else local(data_plan(4))
    trainer = make(plan)
    train(trainer, 1)
    before = masters(trainer)
    with mock.patch.object(not_finite.log, "warning") as warned:
        loss = spoilt_step(trainer, replica=1)
    is_bad = trainer.mesh.replica == 1
    assert bool(loss.isnan()) == is_bad and trainer.num_skipped == is_bad
    assert torch.equal(masters(trainer)["last.weight"], before["last.weight"]) == is_bad
    texts = [str(call.args[1]) for call in warned.call_args_list]
    first = 2 if shard == "parameters" else 1
    assert [trainer.mesh.world.rank] * len(texts) == [first] * (trainer.mesh.world.rank == first)
    for text in texts:
        ranks_named = "every rank" if shard == "parameters" else "rank 1"
        start = "step 2 of replica 1 is skipped: the loss is not finite (1 skipped so far); not finite: the loss of its"
        assert text.startswith(start) and f"({ranks_named})" in text
    train(trainer, 1)
    assert trainer.sync.agrees and trainer.not_finite.in_a_row == 0
    assert all(torch.equal(one["last.weight"], masters(trainer)["last.weight"]) for one in gathered(masters(trainer)))


@ranks(2)
def test_too_many_in_one_replica_raise_on_all_ranks_at_an_exchange() -> None:
    trainer = make(local(data_plan(2), every=4), skip_at_most=1)
    for _ in range(3):
        spoilt_step(trainer, replica=1)
    assert trainer.num_skipped == 3 * trainer.data_rank
    with pytest.raises(NotFiniteError) as caught:
        spoilt_step(trainer, replica=1)
    (problem,) = caught.value.problems
    assert problem.startswith("replica 1: 2 steps in a row, up to step 2, had a loss or gradients that are not finite")
    train(trainer, 4)  # it can be used, and the error comes once
    assert trainer.sync.agrees


@ranks(2)
def test_lost_weights_of_one_replica_are_found_before_the_others_train_on() -> None:
    trainer = make(local(data_plan(2), every=3))
    train(trainer, 3)
    if trainer.data_rank == 0:
        trainer.model.get_parameter("last.weight").data[0, 0] = NAN
    train(trainer, 2)
    with pytest.raises(NotFiniteError, match=r"replica 0: training cannot go on after step 4: weights"):
        train(trainer, 1)


# Divergence.


def flip_bit(tensor: Tensor) -> None:
    tensor.detach().view(-1).view(torch.int64)[0] ^= 1


def outer_plan(**changes: Any) -> Plan:
    return local(data_plan(3), outer="nesterov", outer_lr=0.7, outer_momentum=0.9, **changes)


@ranks(3)
@pytest.mark.parametrize("what", ["weight last.bias", "anchor last.bias", "momentum last.bias"])
def test_a_changed_bit_is_found_after_an_exchange(what: str) -> None:
    trainer = make(outer_plan())
    train(trainer, 3)
    trainer.check_divergence()  # moments of the optimizer differ, as they may
    if trainer.data_rank == 1:
        flip_bit(trainer.sync.own_tensors()[what.replace(" ", "/")])  # type: ignore[attr-defined]
    with pytest.raises(DivergenceError, match=f"after step 3 replicas are not equal: {what} on rank 1 differs"):
        trainer.check_divergence()


@ranks(3)
def test_running_statistics_are_compared_after_an_exchange() -> None:
    torch.manual_seed(0)
    trainer = make_trainer(small_convnet().double(), local(data_plan(3)), optimizer=SGD)
    for step in range(3):
        trainer.step(*part(trainer, image_batch(9, seed=step)))
    trainer.check_divergence()
    if trainer.data_rank == 2:
        flip_bit(trainer.model.get_buffer("stem_norm.running_var"))
    with pytest.raises(DivergenceError, match=r"buffer stem_norm\.running_var on rank 2 differs from rank 0, 1"):
        trainer.check_divergence()


@ranks(4)
def test_between_exchanges_only_the_ranks_of_a_replica_are_compared() -> None:
    trainer = make(SHARDED["optimizer"])
    train(trainer, 4)
    trainer.check_divergence()
    if trainer.mesh.world.rank == 3:
        flip_bit(trainer.model.get_parameter("first.weight"))
    with pytest.raises(DivergenceError, match=r"step 4 replicas are not equal: weight first\.weight on rank 3 dif"):
        trainer.check_divergence()


@ranks(2)
def test_the_plans_checks_come_with_exchanges() -> None:
    trainer = make(local(data_plan(2, check_every=4), every=3, switch_step=2))
    steps: list[int] = []
    with mock.patch.object(DivergenceCheck, "run", lambda self, step: steps.append(step)):
        train(trainer, 17)
    assert steps == [5, 8, 14, 17]  # exchanges after 1, 2, 5, 8, 11, ...; checks wanted after 4, 8, 12, 16


# Steps without targets.


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("name", ["alone", "zero", "pipeline"])
def test_a_replica_without_targets_makes_no_update(name: str) -> None:
    if name == "pipeline":
        torch.manual_seed(0)
        plan = local(pipeline_plan(2, data=2, microbatches=2, cuts=(1,)))
        trainer = make_trainer(small_gpt().double(), plan, optimizer=ADAMW, example=token_batch(1)[0])
    else:
        trainer = make(SHARDED["optimizer"] if name == "zero" else local(data_plan(4)))

    def batch(num_samples: int) -> Batch:
        whole = token_batch(num_samples) if name == "pipeline" else batch_of(num_samples)
        return part(trainer, whole)

    trainer.step(*batch(8))
    before = masters(trainer)
    with mock.patch("weft.training.loss.target_count.log.warning") as warned:
        losses = [float(trainer.step(*batch(1))) for _ in range(2)]
    is_first = trainer.mesh.replica == 0
    assert [math.isnan(one) for one in losses] == [not is_first] * 2
    told = [call for calls in gathered([call.args[1:] for call in warned.call_args_list]) for call in calls]
    assert sorted(told) == [(2, replica) for replica in range(1, trainer.mesh.num_replicas)]  # once each
    assert trainer.sync.agrees and trainer.num_skipped == 0  # step 3 ended with an exchange, and all took part in it
    trainer.check_divergence()
    after = masters(trainer)
    assert any(not torch.equal(after[one], before[one]) for one in before)
    trainer.step(*batch(8))


@ranks(2)
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_gpu_skips_a_replica_without_targets_by_itself(clip_norm: float) -> None:
    """Only the GPU knows how many of the targets count."""
    with mock.patch.object(update, "can_skip_on_device", lambda _: True):
        plan = local(data_plan(2, clip_norm=clip_norm), every=9)
        trainer = make(plan, optimizer=functools.partial(torch.optim.AdamW, lr=0.1, fused=True))
    inputs, targets = part(trainer, batch_of(8))
    with pretended_gpu():
        for _ in range(2):
            trainer.step(inputs, targets)
        before = masters(trainer)
        with no_waits():
            loss = trainer.step(inputs, targets if trainer.data_rank == 0 else torch.full_like(targets, -100))
    is_empty = trainer.data_rank == 1
    assert bool(loss.isnan()) == is_empty and trainer.num_skipped == 0
    assert torch.equal(masters(trainer)["last.bias"], before["last.bias"]) == is_empty
    assert float(trainer.optimizer.state[trainer.model.get_parameter("last.bias")]["step"]) == 3 - is_empty


def test_one_replica_alone_refuses_a_step_without_targets() -> None:
    trainer = make(local(Plan()))
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(*batch_of(0))


# Losses over a replica's samples, and stopping.


def of_all_samples(output: Tensor, targets: Tensor) -> Tensor:
    return contrastive(gather_batch(output), gather_batch(targets))


@ranks(4)
def test_a_loss_gathers_the_samples_of_its_replica() -> None:
    trainer, model = make(SHARDED["parameters"], loss=of_all_samples), MLP()
    model.load_state_dict(masters(trainer))
    whole = batch_of(8, 5)
    with torch.no_grad():
        inputs, targets = cut_evenly(whole, 2)[trainer.mesh.replica]
        true = float(contrastive(model(inputs), targets))
    assert float(trainer.step(*part(trainer, whole))) == pytest.approx(true, rel=1e-12)


def test_replicas_look_for_a_stop_after_exchanges() -> None:
    """Within five seconds of steps, or after these if there is none."""
    clock_s = 0.0
    looks: list[int] = []
    plan = Plan(data=Data(sync="local", every=40))
    mesh = SimpleNamespace(num_replicas=2, plan=plan, world=SimpleNamespace(rank=0), everyone=lambda purpose: None)
    with (
        mock.patch.object(stop_module.time, "perf_counter", lambda: clock_s),
        mock.patch.object(stop_module, "all_reduce", lambda *_, **__: looks.append(step)),
        StopRequest(cast(Mesh, mesh)) as stop,
    ):
        for step in range(1, 300):
            clock_s += 0.1 if step <= 200 else 1.0
            assert not stop.agreed(step=step)
    assert looks[:6] == [1, 40, 80, 120, 160, 200] and looks[6] == 240
    assert all(later - earlier == 5 for earlier, later in zip(looks[7:], looks[8:], strict=False) if later % 40)
