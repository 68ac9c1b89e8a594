"""A run whose loss is not finite: skipped, then taken back to its last good checkpoint, then ended with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.errors import NotFiniteError
from weft.plan.plan import Axes, Data, Plan
from weft.training.data import batches
from weft.training.run.job import Job, Part, Steps
from weft.training.run.loop import Summary, train
from weft.training.run.spikes import SpikeRule

TOTAL = 256


class Samples:
    """Linear targets; the inputs in `bad` are multiplied by a factor."""

    def __init__(self, bad: range, factor: float) -> None:
        self.bad, self.factor = bad, factor

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.arange(3.0) + index / TOTAL
        return inputs * (self.factor if index in self.bad else 1.0), inputs.sum(0, keepdim=True)


def samples(*, first_bad: int, last_bad: int, factor: float = float("nan")) -> Samples:
    return Samples(range(first_bad, last_bad), factor)


def model() -> nn.Module:
    return nn.Linear(3, 1)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def job_of(*, plan: Plan, bad: range = range(0), factor: float = float("nan"), **steps: Any) -> Job:
    """Batches of 8 samples, in the order of the dataset thanks to `in_order`."""
    return Job(
        model=Part(name=f"{__name__}:model"),
        loss=f"{__name__}:mean_square",
        dataset=Part(
            name=f"{__name__}:samples", settings={"first_bad": bad.start, "last_bad": bad.stop, "factor": factor}
        ),
        optimizer=Part(name="adamw", settings={"lr": 0.01}),
        schedule=Part(name="constant"),
        steps=Steps(**{"total": 12, "global_batch": 8, "save_every": 4, **steps}),
        plan=plan,
    )


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad samples must lie in known batches."""
    keep_order(monkeypatch)


def keep_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batches, "permutation", lambda total, seed, epoch: np.arange(total))


def lines_of(summary_directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (summary_directory / "metrics.jsonl").read_text().splitlines()]


def run(directory: Path, **given: Any) -> Summary:
    return train(job_of(**{"plan": Plan(), **given}), directory=directory)


def test_a_few_bad_batches_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    summary = run(tmp_path / "run", bad=range(40, 56))  # batches 5 and 6
    assert summary.steps_done == 12 and summary.last_loss is not None
    lines = [line for line in lines_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines if line["loss"] is None] == [6, 7] and lines[-1]["num_skipped"] == 2
    (first, second) = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert "step 6 is skipped: the loss is not finite" in first and '"inputs"' in first and "step 7" in second


def test_more_of_them_take_the_run_back_and_it_goes_on_behind_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 6 to 8 are bad, and two may be skipped: back to step 4, on with sample 64 instead of 32."""
    summary = run(tmp_path / "run", bad=range(40, 64), skip_at_most=2)
    assert summary.steps_done == 12
    lines = lines_of(tmp_path / "run")
    (back,) = [line for line in lines if "rolled_back_from" in line]
    assert (back["step"], back["rolled_back_from"], back["checkpoint"]) == (4, 8, "step-4")
    assert back["data_position"] == 64 and "3 steps in a row" in back["problem"]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13)), "bad lines are dropped"
    assert all(line["loss"] is not None for line in lines if "loss" in line)
    assert any("going back from step 8 to" in record.getMessage() for record in caplog.records)
    index = json.loads((summary.checkpoint / "checkpoint.json").read_text())
    assert (index["step"], index["data_position"]) == (12, 64 + 8 * 8)


def test_a_run_that_stays_bad_ends_with_an_error_and_keeps_its_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="(?s)went back to a checkpoint once already, .*roll_back_at_most = 1"):
        run(tmp_path / "run", bad=range(40, TOTAL), skip_at_most=1, roll_back_at_most=1)
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert kept.name == "step-4"


def test_without_a_checkpoint_there_is_nowhere_to_go(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="(?s)there is no checkpoint in .* to go back to"):
        run(tmp_path / "run", bad=range(8, TOTAL), skip_at_most=0)


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_ranks_go_back_together(shard: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        keep_order(patch)
        plan = Plan(axes=Axes(data=2), data=Data(shard=shard))
        summary = run(tmp_path / "run", plan=plan, bad=range(44, 64), skip_at_most=1)
    assert len(set(gathered((summary.steps_done, summary.last_loss)))) == 1 and summary.steps_done == 12


@ranks(2)
def test_replicas_that_differ_go_back_together_at_an_exchange(tmp_path: Path) -> None:
    """Replica 1 has three bad steps, 6 to 8, and replica 0 two; both may have one. They exchange after 3, 6 and 9."""
    with pytest.MonkeyPatch.context() as patch:
        keep_order(patch)
        plan = Plan(axes=Axes(data=2), data=Data(sync="local", every=3))
        summary = run(tmp_path / "run", plan=plan, bad=range(44, 64), skip_at_most=1, save_every=5)
    assert set(gathered((summary.steps_done, summary.held_out_loss))) == {(12, summary.held_out_loss)}
    (back,) = [line for line in lines_of(tmp_path / "run") if "rolled_back_from" in line]
    assert (back["rolled_back_from"], back["checkpoint"], back["data_position"]) == (9, "step-5", 72)
    assert "replica 0: 2 steps in a row, up to step 8" in back["problem"]
    assert "replica 1: 2 steps in a row, up to step 7" in back["problem"]


def test_a_spike_is_told_once_and_the_next_one_again() -> None:
    rule, noise = SpikeRule(), torch.Generator().manual_seed(0)
    ordinary = (3.0 + 0.05 * torch.randn(400, generator=noise)).tolist()
    assert [rule.add(loss) for loss in ordinary] == [None] * 400, "noise is none"
    found = [rule.add(loss) for loss in (3.0, 4.5, 5.0, 4.0, 3.0, float("nan"), 4.2)]
    assert [usual is not None for usual in found] == [False, True, False, False, False, False, True]
    assert found[1] == pytest.approx(3.0, abs=0.05)
    assert sum(rule.add(4.5) is not None for _ in range(200)) == 0, "a level that stays is ordinary in time"
    assert rule.add(9.0) == 4.5


def test_a_falling_loss_and_a_constant_one_have_no_spikes() -> None:
    for losses in ([10 * 0.99**step for step in range(300)], [0.5] * 100, [0.5] * 50 + [0.52] * 50):
        rule = SpikeRule()
        assert all(rule.add(loss) is None for loss in losses)


def test_spikes_are_in_metrics_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", total=31, save_every=0, bad=range(200, 216), factor=50.0)
    spikes = {line["step"]: line["spike"] for line in lines_of(tmp_path / "run") if line.get("spike")}
    assert list(spikes) == [26], "of two bad batches in a row"
    (told,) = [record.getMessage() for record in caplog.records if "spike" in record.getMessage()]
    assert told.startswith("the loss of step 26, ") and told.endswith(f", is a spike: {spikes[26]:.4g} is usual")
