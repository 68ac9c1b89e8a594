"""A loss or gradient that is not finite: nothing changes, its tensors are named, and in time every rank raises."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import adamw, masters, mixed
from oracle import (
    MLP,
    batch_of,
    cut_evenly,
    data_plan,
    make_trainer,
    pipeline_plan,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import gathered, ranks
from streamed import batches_of as stream_batches
from streamed import make_streaming, stream_plan
from torch import Tensor, nn

from weft.errors import NotFiniteError
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

NAN = float("nan")


class Spoilt:
    """The mean cross-entropy, of which a test makes NaN."""

    factor = 1.0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten()) * self.factor


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Messages:
        logging.getLogger("weft").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("weft").removeHandler(self)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.flush()
    return {piece.name: piece.tensor.detach().clone() for piece in trainer.sync.pieces}


def test_a_plan_without_a_norm_skips_by_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(MLP(), Plan(), optimizer=adamw)
    inputs, targets = batch_of(4)
    trainer.step(inputs, targets)
    before = masters(trainer)
    spoilt = inputs.clone()
    spoilt[1, 0] = NAN
    trainer.step(spoilt, targets)
    assert same(masters(trainer), before) and trainer.num_skipped == 1 and trainer.not_finite.in_a_row == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "step 2 is skipped: the loss is not finite (1 skipped so far); not finite: the loss of its samples (rank 0); "
        'the batch\'s "inputs" (rank 0); gradients of "'
    )
    trainer.step(inputs, targets)
    assert not same(masters(trainer), before) and trainer.not_finite.in_a_row == 0


def test_too_many_in_a_row_raise_and_the_trainer_can_be_used(tmp_path: Path) -> None:
    trainer = make_trainer(MLP(), Plan(), optimizer=adamw, skip_at_most=2)
    inputs, targets = batch_of(4)
    trainer.step(inputs, targets)
    trainer.save(tmp_path / "good")
    for good in (False, False, True, False, False):  # a good one in between starts the count anew
        trainer.step(inputs if good else inputs * NAN, targets)
    with pytest.raises(NotFiniteError, match=r"3 steps in a row, up to step 7, .* \(skip_at_most = 2\)"):
        trainer.step(inputs * NAN, targets)
    trainer.load(tmp_path / "good")
    assert trainer.not_finite.in_a_row == 0 and trainer.step(inputs, targets).isfinite()
    trainer.close()


@pytest.mark.parametrize("skip_at_most", [0, None])
def test_the_first_may_raise_or_none(skip_at_most: int | None) -> None:
    trainer = make_trainer(MLP(), Plan(), optimizer=adamw, skip_at_most=skip_at_most)
    inputs, targets = batch_of(4)
    if skip_at_most == 0:
        with pytest.raises(NotFiniteError, match="1 steps in a row"):
            trainer.step(inputs * NAN, targets)
        return
    for _ in range(8):
        trainer.step(inputs * NAN, targets)
    assert trainer.num_skipped == trainer.not_finite.in_a_row == 8


class RootAtZero(nn.Module):
    """Its output is finite, and the gradient of its root is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.sqrt(self.scale * inputs))


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_gradients_of_a_finite_loss(clip_norm: float, tmp_path: Path) -> None:
    """Where the plan has a norm the step is skipped; else the next one finds the weights lost, and nothing is saved."""
    trainer = make_trainer(RootAtZero().double(), data_plan(1, clip_norm=clip_norm), optimizer=adamw)
    inputs, targets = batch_of(4)
    trainer.step(torch.ones(4, 3).double(), targets)
    if clip_norm:
        assert trainer.num_skipped == 1
        trainer.save(tmp_path / "step-1")
        return
    with pytest.raises(NotFiniteError, match=r'"scale".*older checkpoints are untouched'):
        trainer.save(tmp_path / "step-1")
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotFiniteError, match=r'cannot go on after step 2.* weights "scale" \(rank 0\).*clip_norm'):
        trainer.step(torch.ones(4, 3).double(), targets)


def test_running_statistics_that_one_batch_spoilt_are_told_and_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()
    trainer = make_trainer(model, Plan(), optimizer=adamw)
    inputs, targets = batch_of(4)
    trainer.step(inputs, targets)
    trainer.save(tmp_path / "last")
    with pytest.raises(NotFiniteError, match='buffers "1.running_mean", "1.running_var"'):
        trainer.step(inputs * NAN, targets)
    with pytest.raises(NotFiniteError, match="running_mean"):
        trainer.save(tmp_path / "last")
    trainer.load(tmp_path / "last")
    assert trainer.steps_done == 1 and bool(model[1].running_mean.isfinite().all())
    trainer.close()


@pytest.mark.parametrize("value", [-float("inf"), NAN])
def test_a_buffer_that_was_made_so_is_saved(tmp_path: Path, value: float) -> None:
    model = MLP()
    model.register_buffer("mask", torch.full((2, 2), value))
    trainer = make_trainer(model, Plan(), optimizer=adamw)
    trainer.step(*batch_of(4))
    trainer.save(tmp_path / "last")
    trainer.close()


PLANS: dict[str, Plan] = {
    "data": data_plan(2),
    "zero 1": data_plan(2, shard="optimizer"),
    "zero 3": data_plan(2, shard="parameters", microbatches=2),
    "tensor": tensor_plan(2),
    "1f1b": pipeline_plan(2, microbatches=2),
    "bf16": mixed(data_plan(2), compute="bf16"),
}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_skips_on_all_ranks_and_raises_in_the_same_step(name: str, tmp_path: Path) -> None:
    plan, loss = PLANS[name], Spoilt()
    model = small_gpt().float() if name == "bf16" else small_gpt()
    trainer = make_trainer(model, plan, optimizer=adamw, loss=loss, skip_at_most=1, example=token_batch(2)[0])
    spoils = trainer.data_rank == trainer.data_size - 1
    with Messages() as messages:
        trainer.step(*cut_evenly(token_batch(8), trainer.data_size)[trainer.data_rank])
        before = weights_of(trainer)
        loss.factor = NAN if spoils else 1.0
        trainer.step(*cut_evenly(token_batch(8), trainer.data_size)[trainer.data_rank])
        assert same(weights_of(trainer), before)
        error: Any = None
        try:
            trainer.step(*cut_evenly(token_batch(8), trainer.data_size)[trainer.data_rank])
        except NotFiniteError as caught:
            error = str(caught)
    assert same(weights_of(trainer), before) and trainer.steps_done == 3
    assert "2 steps in a row" in error and len(set(gathered(error))) == 1
    if trainer.mesh.world.rank == 0:
        first, _ = messages.texts
        (on,) = [part for part in first.split("; ") if "the loss of its samples" in part]
        assert on.endswith({"tensor": "(every rank)"}.get(name, "(rank 1)")) and "gradients of" in first
    trainer.save(tmp_path / "good")
    if trainer.mesh.world.rank == 1:
        trainer.sync.pieces[-1].tensor.data.fill_(NAN)  # one rank's alone
    with pytest.raises(NotFiniteError, match="not saved, because training is not finite on rank 1"):
        trainer.save(tmp_path / "good")
    trainer.close()


@ranks(2)
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_stages_that_update_in_different_steps_raise_in_the_same(schedule: str) -> None:
    loss = Spoilt()
    trainer = make_streaming(stream_plan(schedule, 2, 2), loss=loss, skip_at_most=3)
    good, *_ = stream_batches(4, 4)
    for _ in range(4):
        trainer.step(*good)
    assert trainer.num_skipped == 0, "losses are NaN until the pipeline is full, and that is no finding"
    loss.factor, raised = NAN, None
    for step in range(8):
        try:
            trainer.step(*good)
        except NotFiniteError:
            raised = step
            break
    assert raised is not None and len(set(gathered(raised))) == 1
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(trainer).values())
    trainer.close()


def test_a_scale_that_falls_is_not_counted_and_one_that_cannot_is(caplog: pytest.LogCaptureFixture) -> None:
    """Sixteen overflows take the scale from 65,536 to 1: the scaler's rule. After that they are the user's matter."""

    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.weight

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output * 1e6).mean()  # a gradient of 1e6 overflows in fp16 under any scale; the loss is float32

    trainer = make_trainer(Overflows(), mixed(Plan(), compute="fp16"), optimizer=adamw, loss=loss, skip_at_most=1)
    ones = torch.ones(4, 1)
    for _ in range(16):
        trainer.step(ones, ones)
    assert trainer.loss_scale == 1.0 and trainer.not_finite.in_a_row == 0
    assert not any("not finite: " in record.getMessage() for record in caplog.records)
    trainer.step(ones, ones)
    with pytest.raises(NotFiniteError, match="2 steps in a row"):
        trainer.step(ones, ones)
