"""The scale of an fp16 loss, and skipped steps: alike on all ranks, kept in checkpoints, gone before clipping."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SHARDS, ByHand, TorchsScale, adamw, gradients, masters, mixed
from oracle import cross_entropy, cut_evenly, data_plan, make_trainer, small_gpt, token_batch
from ranks import ranks
from torch import Tensor

from weft.training.step import precision
from weft.training.trainer import Trainer


class Messages(logging.Handler):
    """Context that collects the messages in weft's log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("weft").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("weft").removeHandler(self)


class Poisoned:
    """Cross-entropy whose gradient is too large for 16 bits where this rank is told so."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        total, count = cross_entropy(logits, targets)
        return total * self.factor, count


TOO_LARGE = {"bf16": float("inf"), "fp16": 1e6}
"""fp16 ends at 65504; bf16 where float32 does."""


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(compute: str, shard: str, microbatches: int) -> None:
    """An overflow of all gradients, and of one small tensor, which under sharding a single rank keeps."""
    loss, model = Poisoned(), small_gpt()
    poison = {"loss": 1.0, "norm": 1.0}
    model.norm.weight.register_hook(lambda gradient: gradient * poison["norm"])
    plan = mixed(data_plan(2, shard=shard, microbatches=microbatches), compute=compute)
    trainer = make_trainer(model, plan, optimizer=adamw, loss=loss)
    seen, states = [masters(trainer)], [optimizer_state(trainer)]
    with Messages() as messages:
        for step, bad in enumerate(["", "loss", "", "norm", ""]):
            poison = {key: TOO_LARGE[compute] if key == bad and trainer.data_rank == 1 else 1.0 for key in poison}
            loss.factor = poison["loss"]
            trainer.step(*cut_evenly(token_batch(6, seed=step), 2)[trainer.data_rank])
            seen.append(masters(trainer))
            states.append(optimizer_state(trainer))
            assert trainer.grad_norm is not None and trainer.grad_norm.isfinite() == (not bad)
            assert trainer.num_skipped == (step + 1) // 2 and trainer.steps_done == step + 1
            assert trainer.update.loss_scale.value == (65536 / 2**trainer.num_skipped if compute == "fp16" else 1.0)
    for kept in (seen, states):
        is_same = [all(torch.equal(b[key], a[key]) for key in b) for a, b in zip(kept[1:], kept[2:], strict=False)]
        assert is_same == [True, False, True, False]
    falls = ("; the loss scale goes from 65536 to 32768", "; the loss scale goes from 32768 to 16384")
    # Scaled by 1e6 the loss is finite, and so an overflow under fp16 is the scale's ordinary work.
    what = ("a gradient", "a gradient") if compute == "fp16" else ("the loss", "a gradient")
    told = [
        f"step {2 * number} is skipped: {what[number - 1]} is not finite{fall if compute == 'fp16' else ''} "
        f"({number} skipped so far)"
        for number, fall in enumerate(falls, start=1)
    ]
    assert [message.partition("; not finite: ")[0] for message in messages] == (told if trainer.data_rank == 0 else [])
    assert all(("; not finite: " in message) == (compute == "bf16") for message in messages)
    trainer.check_divergence()


def optimizer_state(trainer: Trainer) -> dict[str, Tensor]:
    states = trainer.optimizer.state_dict()["state"]
    return {f"{number} {key}": value.clone() for number, kept in states.items() for key, value in kept.items()}


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "gradients"])
def test_the_scale_goes_the_way_of_torchs_scaler(shard: str) -> None:
    """Good and bad steps as they come, an overflow now on one rank and now on the other."""
    loss = Poisoned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "_GROWTH_INTERVAL", 3)
        trainer = make_trainer(small_gpt(), mixed(data_plan(2, shard=shard), compute="fp16"), loss=loss)
        torchs = TorchsScale(growth_interval=3)
        for step, bad_rank in enumerate([None, 0, 1, None, None, None, None, 1, None, None, None]):
            loss.factor = TOO_LARGE["fp16"] if bad_rank == trainer.data_rank else 1.0
            trainer.step(*cut_evenly(token_batch(4, seed=step), 2)[trainer.data_rank])
            torchs.update(is_finite=bad_rank is None)
            assert trainer.update.loss_scale.value == torchs.scaler.get_scale(), f"after step {step + 1}"
        assert trainer.num_skipped == 3


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_are_unscaled_before_they_are_clipped(shard: str, loss_scale: int | str) -> None:
    """The norm of the whole unscaled gradient is told, and clipping follows it."""
    model, clip_norm = small_gpt(), 0.05
    plan = mixed(data_plan(2, shard=shard, microbatches=2, clip_norm=clip_norm), compute="fp16", loss_scale=loss_scale)
    scale = 65536.0 if loss_scale == "dynamic" else 1024.0
    by_hand = ByHand(model, torch.float16, scale=scale, clip_norm=clip_norm)
    trainer = make_trainer(model, plan, optimizer=adamw)
    for step in range(2):
        parts = cut_evenly(token_batch(8, seed=step), 2)
        trainer.step(*parts[trainer.data_rank])
        by_hand.step(parts, 2)
        assert trainer.grad_norm is not None and by_hand.norm > clip_norm
        assert float(trainer.grad_norm) == pytest.approx(by_hand.norm, rel=1e-5)
        clipped = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(trainer).values()]))
        assert float(clipped) == pytest.approx(clip_norm, rel=1e-4), "of which torch's 1e-6 in the divisor is 2e-5"
        for name, master in masters(trainer).items():
            # Sums of entries below 0.05 in float32 are off by 4 x 2**-24 of it, and Adam makes 3 LR / EPS of that.
            torch.testing.assert_close(master, by_hand.masters[name].detach(), rtol=1e-5, atol=1e-6)
        by_hand.go_on_from(masters(trainer))
        assert trainer.update.loss_scale.value == scale and trainer.num_skipped == 0


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_the_scale_is_kept_in_checkpoints(shard: str, tmp_path: Path) -> None:
    plan = mixed(data_plan(2, shard=shard), compute="fp16")
    loss, batches = Poisoned(), [cut_evenly(token_batch(6, seed=step), 2) for step in range(6)]
    trainer = make_trainer(small_gpt(), plan, optimizer=adamw, loss=loss)
    for step in range(4):
        loss.factor = TOO_LARGE["fp16"] if step < 2 else 1.0
        trainer.step(*batches[step][trainer.data_rank])
    trainer.save(tmp_path / "step-4")
    kept = trainer.update.state()
    assert kept == {"loss_scale": {"value": 16384.0, "num_good": 2}, "num_skipped": 2}
    after = [float(trainer.step(*batch[trainer.data_rank])) for batch in batches[4:]]

    torch.manual_seed(1)
    again = make_trainer(small_gpt(), plan, optimizer=adamw, loss=loss)
    again.load(tmp_path / "step-4")
    assert again.update.state() == kept
    assert [float(again.step(*batch[again.data_rank])) for batch in batches[4:]] == after
    expected = masters(trainer)
    assert all(torch.equal(master, expected[name]) for name, master in masters(again).items())

    other = make_trainer(small_gpt(), mixed(data_plan(2, microbatches=2), compute="bf16"), optimizer=adamw, loss=loss)
    with Messages() as messages:
        other.load(tmp_path / "step-4")
    assert len(messages) == (trainer.data_rank == 0), "another plan starts its scale anew, and says so"
    assert other.update.loss_scale.value == 1.0 and other.steps_done == 4
    assert float(other.step(*batches[4][other.data_rank])) == pytest.approx(after[0], rel=2e-2), "bf16 has 8 bits"
