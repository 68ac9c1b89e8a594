"""The scale of an fp16 loss and steps that are skipped: alike on all ranks, kept in checkpoints, gone before clipping."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SHARDS, ByHand, adamw, gradients, masters, mixed
from oracle import cross_entropy, cut_evenly, data_plan, make_trainer, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.training import precision


class Messages(logging.Handler):
    """What weft wrote to its log while this context was open."""

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


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(compute: str, shard: str, microbatches: int) -> None:
    loss = Poisoned()
    plan = mixed(data_plan(2, shard=shard, microbatches=microbatches), compute=compute)
    trainer = make_trainer(small_gpt(), plan, optimizer=adamw, loss=loss)
    scale = 65536.0 if compute == "fp16" else 1.0
    seen = [masters(trainer)]
    with Messages() as messages:
        for step, is_bad in enumerate([False, True, False]):
            loss.factor = TOO_LARGE[compute] if is_bad and trainer.data_rank == 1 else 1.0
            state = copy.deepcopy(trainer.optimizer.state_dict()["state"])
            trainer.step(*cut_evenly(token_batch(6, seed=step), 2)[trainer.data_rank])
            seen.append(masters(trainer))
            assert trainer.grad_norm is not None and trainer.grad_norm.isfinite() == (not is_bad)
            if is_bad:
                assert all(
                    torch.equal(value, trainer.optimizer.state_dict()["state"][number][key])
                    for number, kept in state.items()
                    for key, value in kept.items()
                )
                scale = scale / 2 if compute == "fp16" else 1.0
            assert trainer.update.loss_scale.value == scale
            assert trainer.num_skipped == (step >= 1) and trainer.steps_done == step + 1
    is_same = [all(torch.equal(b[name], a[name]) for name in a) for a, b in zip(seen, seen[1:], strict=False)]
    assert is_same == [False, True, False]
    lowered = "; the loss scale goes from 65536 to 32768" if compute == "fp16" else ""
    told = [f"step 2 is skipped: a gradient is not finite{lowered} (1 skipped so far)"]
    assert messages == (told if trainer.data_rank == 0 else [])
    trainer.check_divergence()


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "gradients"])
def test_the_scale_goes_the_way_of_torchs_scaler(shard: str) -> None:
    """Good and bad steps as they come, an overflow now on one rank and now on the other."""
    loss = Poisoned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "_GROWTH_INTERVAL", 3)
        trainer = make_trainer(small_gpt(), mixed(data_plan(2, shard=shard), compute="fp16"), loss=loss)
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for step, bad_rank in enumerate([None, 0, 1, None, None, None, None, 1, None, None, None]):
            loss.factor = TOO_LARGE["fp16"] if bad_rank == trainer.data_rank else 1.0
            trainer.step(*cut_evenly(token_batch(4, seed=step), 2)[trainer.data_rank])
            scaler.scale(parameter.sum()).backward()
            parameter.grad = torch.tensor([1.0 if bad_rank is None else float("inf")])
            scaler.step(optimizer)
            scaler.update()
            assert trainer.update.loss_scale.value == scaler.get_scale(), f"after step {step + 1}"
        assert trainer.num_skipped == 3


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
