"""Verify can fail: each way of being wrong is caught, named, and told to every rank; a right plan passes untouched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import SGD, data_plan, image_batch, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import PlanError, VerifyError
from weft.sync.allreduce import AllReduce
from weft.sync.base import Totals
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer
from weft.verification import verify as verify_module
from weft.verification.compare import relative_error
from weft.verification.verify import Verification, verify


def run(model: nn.Module | None = None, *, batches: list[Any] | None = None, **changes: Any) -> Verification:
    plan = changes.pop("plan", None) or data_plan(dist.get_world_size() if dist.is_initialized() else 1)
    return verify(
        small_gpt() if model is None else model,
        plan,
        loss="cross-entropy",
        optimizer=SGD,
        batches=[token_batch(size, seed=seed) for seed, size in enumerate((8, 5, 8))] if batches is None else batches,
        device="cpu",
        **changes,
    )


@contextlib.contextmanager
def trainer_changed(patch: pytest.MonkeyPatch, change: Callable[[Trainer], None]) -> Iterator[None]:
    """The trainer that verify makes is tampered with before its first step."""

    def tampered(*args: Any, **kwargs: Any) -> Trainer:
        trainer = parallelize(*args, **kwargs)
        change(trainer)
        return trainer

    with patch.context() as inner:
        inner.setattr(verify_module, "parallelize", tampered)
        yield


def wrong_with(change: Callable[[Trainer], None], model: nn.Module | None = None, **changes: Any) -> Verification:
    """The outcome of a verification that must fail, the same on every rank."""
    with trainer_changed(pytest.MonkeyPatch(), change):
        outcome = run(model, **changes)
    assert not outcome.ok
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, str(outcome))
    assert len(set(everybodys)) == 1
    with pytest.raises(VerifyError, match="does not give the answer of one process"):
        outcome.require()
    return outcome


def after(owner: Any, method: str, then: Callable[[Any], Any]) -> None:
    """Call `then` with every result of a method; totals that it returns replace the result."""
    real = getattr(owner, method)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        other = then(result)
        return other if isinstance(other, Totals) else result

    setattr(owner, method, changed)


class Attends(nn.Module):
    """Torch's own attention, which keeps its dropout in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.dropout(self.attention(x, x, x)[0]))


# ---- right ----


@ranks(2)
def test_a_right_plan_passes_and_says_how_near_it_was() -> None:
    outcome = run().require()
    assert outcome.ok and outcome.num_steps == 3 and outcome.tolerance == 1e-10
    errors = [difference.error for difference in outcome.differences]
    assert errors == sorted(errors, reverse=True) and errors[0] < 1e-13
    names = {(difference.what, difference.name) for difference in outcome.differences}
    parameters = [name for name, _ in small_gpt().named_parameters()]
    assert names == {
        ("loss", ""),
        ("buffer", "rotary.table_2TE"),
        *(("gradient", name) for name in parameters),
        *(("weight", name) for name in parameters),
    }


def test_one_process_without_a_group_passes_too() -> None:
    assert not dist.is_initialized()
    assert run(plan=data_plan(1, microbatches=3, clip_norm=0.1)).require().ok


def test_a_mask_among_the_buffers_hides_no_error_of_the_others() -> None:
    """No terms cancel in buffers: a running mean that is off by 1e-6 is wrong beside a mask of -1e9 too."""
    assert relative_error("buffer", 1e-6, 0.5, 1e9) > 1e-10


def test_rounding_of_cancelling_terms_is_no_error_and_a_wrong_factor_is() -> None:
    """The gradient of a scale in front of BatchNorm is 1e-6 of the model's largest, its terms as large as that."""
    largest = 0.2
    small, unit = 1e-6 * largest, 2.2e-16 * largest
    assert relative_error("gradient", 16 * unit, small, largest) < 1e-10
    assert relative_error("gradient", small, small, largest) > 1e-4  # twice the true one
    assert (
        relative_error("gradient", 1e-12 * largest, 1e-12 * largest, largest) > 1e-10
    )  # the same where it is nearly noise
    assert relative_error("gradient", 2e-10 * largest, largest, largest) > 1e-10


@ranks(2)
def test_the_model_given_is_not_changed() -> None:
    torch.manual_seed(dist.get_rank())  # different weights on each rank: rank 0's are verified
    model = small_convnet()
    model.eval()
    model.blocks.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    run(model, batches=[image_batch(6), image_batch(5, seed=1)]).require()
    assert [module.training for module in model.modules()] == modes
    assert type(model.stem_norm) is nn.BatchNorm2d
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@ranks(2)
def test_dropout_is_off_for_it_and_stays_on_in_the_model() -> None:
    model = Attends()
    run(model).require()
    assert model.attention.dropout == model.dropout.p == 0.5


@ranks(2)
def test_in_single_only_losses_are_held_to_the_bound() -> None:
    outcome = run(dtype=torch.float32).require()
    assert [difference.what for difference in outcome.differences] == ["loss"] and outcome.tolerance == 1e-5


@ranks(2)
def test_groups_and_schedule_are_the_runs_own() -> None:
    def no_decay_for_vectors(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"lr": 0.5} if len(shape) == 1 else {"weight_decay": 0.1}

    outcome = run(groups=no_decay_for_vectors, schedule=lambda step: 1 / (step + 1)).require()
    assert outcome.worst("weight").error < 1e-12

    def forget_schedule(trainer: Trainer) -> None:
        trainer.update._schedule = None

    assert wrong_with(forget_schedule, schedule=lambda step: 1 / (step + 1)).worst("weight").step > 1


@ranks(2)
def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="2 are running"):
        run(plan=data_plan(3))


# ---- wrong ----


@ranks(2)
def test_a_gradient_that_is_a_hundred_millionth_too_large() -> None:
    """On one rank, for one parameter, in the part it contributes."""

    def scale(trainer: Trainer) -> None:
        if trainer.data_rank == 1:
            trainer.model.get_parameter("blocks.0.mlp.up.weight").register_hook(lambda gradient: gradient * (1 + 1e-8))

    outcome = wrong_with(scale)
    worst = outcome.worst("gradient")
    assert worst.name == "blocks.0.mlp.up.weight" and 1e-9 < worst.error < 1e-8
    off = {d.name for d in outcome.differences if d.what == "gradient" and d.step == 1 and d.error > 1e-10}
    assert off <= {"blocks.0.mlp.up.weight"}
    with pytest.raises(VerifyError) as caught:
        outcome.require()
    assert "gradient blocks.0.mlp.up.weight is off by" in str(caught.value)
    assert "1e-10 is allowed" in str(caught.value)


@ranks(2)
def test_a_count_that_is_not_corrected() -> None:
    """The second batch is shorter: with the first one's count its gradients are too small, in all parameters."""

    def forget(trainer: Trainer) -> None:
        trainer.counts.correction = lambda shared, count: None  # type: ignore[method-assign]

    outcome = wrong_with(forget)
    gradients = [d for d in outcome.differences if d.what == "gradient"]
    assert all(d.error == pytest.approx(1 - 5 / 8, rel=0.3) for d in gradients)
    assert outcome.worst("gradient").step >= 2 and outcome.worst("loss").error > 1e-10


@ranks(2)
def test_an_average_of_averages() -> None:
    """The classic: each rank divides by its own count. Equal parts hide it, unequal ones do not."""

    def own_count(trainer: Trainer) -> None:
        trainer.counts.share = lambda counts: 2.0 * sum(counts)  # type: ignore[method-assign]
        trainer.counts.correction = lambda shared, total: None  # type: ignore[method-assign]

    with trainer_changed(pytest.MonkeyPatch(), own_count):
        assert run(batches=[token_batch(8)]).ok
    assert wrong_with(own_count, batches=[token_batch(5)]).worst("gradient").error > 1e-3


@ranks(2)
def test_an_exchange_that_is_missing() -> None:
    """The tail arrives, so losses are right in the first step; gradients are each rank's own."""

    def cut_off(trainer: Trainer) -> None:
        sync = trainer.sync
        assert isinstance(sync, AllReduce)
        finish = sync.finish

        def only_the_last(loss_sum: Tensor, count: Tensor, **facts: Any) -> Totals:
            sync._turn = len(sync._buckets.buckets) - 1
            return finish(loss_sum, count, **facts)

        sync.finish = only_the_last  # type: ignore[method-assign]
        sync._launch_full = lambda: None  # type: ignore[method-assign]

    outcome = wrong_with(cut_off, plan=data_plan(2, bucket_bytes=1))
    assert outcome.worst("gradient").error > 0.1
    assert outcome.first is not None and (outcome.first.step, outcome.first.phase) == (1, "exchange")
    assert outcome.first.cause.axes == ("data",)
    first = wrong_with(cut_off, plan=data_plan(2, bucket_bytes=1), batches=[token_batch(8)])
    assert first.worst("loss").error < 1e-13


@ranks(4)
def test_one_rank_that_went_astray_is_named() -> None:
    """Its weight is off after the update, so everybody's gradient is from then on; its own error is the weight."""

    def drift(trainer: Trainer) -> None:
        if trainer.data_rank == 2:
            after(trainer.optimizer, "step", lambda _: trainer.model.get_parameter("norm.weight").data[3].add_(1e-6))

    outcome = wrong_with(drift, batches=[token_batch(8)])
    wrong = [d for d in outcome.differences if d.error > 1e-10]
    assert [(d.what, d.name, d.rank, d.step) for d in wrong] == [("weight", "norm.weight", 2, 1)]
    first = outcome.first
    assert first is not None and (first.phase, first.ranks, first.places) == ("update", (2,), "data 2 (rank 2)")
    assert "only entries 3 to 3 of 16 along dim 0 are off" in first.cause.text


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("where", ["loss", "gradient", "weight", "buffer"])
def test_not_a_number_is_never_near(where: str) -> None:
    """NaN compares false with every bound."""
    nan = float("nan")

    def poison(trainer: Trainer) -> None:
        model = trainer.model
        if where == "gradient":
            model.get_parameter("head.bias").register_hook(lambda gradient: gradient * nan)
        elif where == "loss":
            after(trainer.sync, "finish", lambda totals: dataclasses.replace(totals, loss_sum=torch.tensor(nan)))
        else:
            tensor = model.get_parameter("head.bias") if where == "weight" else model.stem_norm.running_mean
            after(trainer.optimizer, "step", lambda _: tensor.data[0].fill_(nan))

    outcome = wrong_with(poison, small_convnet(), batches=[image_batch(6)])
    assert outcome.worst(where).error == float("inf")
    first = outcome.first
    assert first is not None and (first.what, first.step, first.cause.kind) == (where, 1, "not a number"), first


@ranks(2)
def test_a_gradient_that_should_not_be_there_and_one_that_should() -> None:
    """None and zeros are not the same: an optimizer decays what has a gradient."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.spare = small_gpt(), nn.Parameter(torch.ones(3))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.gpt(tokens)

    def with_gradient(name: str, value: Callable[[Tensor], Tensor | None]) -> Callable[[Trainer], None]:
        def change(trainer: Trainer) -> None:
            parameter = trainer.model.get_parameter(name)
            after(trainer.sync, "finish", lambda _: setattr(parameter, "grad", value(parameter.detach())))

        return change

    batches = [token_batch(4)]
    outcome = wrong_with(with_gradient("spare", torch.zeros_like), Spare(), batches=batches)
    assert (outcome.worst("gradient").name, outcome.worst("gradient").error) == ("spare", float("inf"))
    assert outcome.first is not None and outcome.first.cause.kind == "extra"
    outcome = wrong_with(with_gradient("gpt.norm.weight", lambda _: None), Spare(), batches=batches)
    assert (outcome.worst("gradient").name, outcome.worst("gradient").error) == ("gpt.norm.weight", float("inf"))
    assert outcome.first is not None and outcome.first.cause.kind == "missing"


class Counts(nn.Module):
    """A layer that keeps a statistic of its own, which no rank shares."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.net = small_convnet(batch_norm=False)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(images.mean(), 0.1)
        return self.net(images)


@ranks(2)
def test_a_model_that_no_plan_makes_equal_is_found_out() -> None:
    """Nothing is broken in weft here: the model keeps a buffer by itself. Verify says so before a long run does."""
    outcome = run(Counts(), batches=[image_batch(6), image_batch(6, seed=1)])
    assert not outcome.ok and outcome.worst("buffer").name == "mean"


@ranks(2)
def test_statistics_of_a_ranks_own_are_found_out() -> None:
    """BatchNorm without synchronisation is not one process's answer, and does not pass for it."""
    plan = data_plan(2, buffers="local")
    outcome = run(small_convnet(), plan=plan, batches=[image_batch(8)])
    assert not outcome.ok and outcome.worst("gradient").error > 1e-3
    assert all(difference.what != "buffer" for difference in outcome.differences)


@ranks(2)
def test_no_more_than_ten_are_listed() -> None:
    def spoil(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.001)

    with pytest.raises(VerifyError) as caught:
        wrong_with(spoil).require()
    assert len(caught.value.problems) == 10
