"""What a script prints when it fails: their own frames, and before ranks have met one message, not one per rank."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn

from weft.comm.failures.user_traceback import print_user_traceback
from weft.errors import TURN_S, PlanError, print_in_turn


class Broken(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        try:
            return inputs.view(-1, 5)
        except RuntimeError as error:
            raise ValueError("another shape") from error


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    try:
        nn.Sequential(Broken())(torch.ones(3))
    except ValueError as error:
        print_user_traceback(type(error), error, error.__traceback__)
    return capsys.readouterr().err.splitlines()


def test_frames_of_torch_are_folded_between_those_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys)
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: another shape"
    assert any("RuntimeError: shape '[-1, 5]'" in line for line in lines), "its cause"
    inner = [line for line in lines if "torch/nn/modules" in line]
    assert len(inner) == 1 and inner[0].startswith("  … 5 frames of torch, to torch/nn/modules/module.py:")
    assert sum(f'File "{__file__}"' in line for line in lines) == 3, "the loop, the forward, and its cause"
    monkeypatch.setenv("WEFT_TRACEBACK", "all")
    assert sum("torch/nn/modules" in line for line in printed(capsys)) == 5


@pytest.mark.parametrize(("rank", "local_rank", "turn"), [(0, 0, None), (4, 0, TURN_S), (5, 1, 2 * TURN_S)])
def test_before_ranks_have_met_the_others_wait_for_rank_0(
    rank: int, local_rank: int, turn: float | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher ends them while they wait; one that is not ended has an error of its own, and prints it."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    error = PlanError("plan.toml: cannot be read")
    sys.excepthook(type(error), error, None)
    assert waited == ([] if turn is None else [turn])
    assert (sys.excepthook is print_in_turn) is (turn is not None)
    assert capsys.readouterr().err.endswith("PlanError: plan.toml: cannot be read\n")
