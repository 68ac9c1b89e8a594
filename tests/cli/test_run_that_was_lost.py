"""A run with servers of which every process is killed, and which any plan resumes with the losses of one that lives."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from command import finish, losses_of, start, wait_for_step

from weft.server.snapshot_file import common_snapshots

NUM_STEPS = 25
PARTS = """
import time

import torch
from torch import nn


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        inputs = torch.arange(3.0, dtype=torch.float64) + index / 64
        return inputs, inputs.sum(0, keepdim=True)


def model():
    return nn.Linear(3, 1).double()


def mean_square(output, targets):
    return nn.functional.mse_loss(output, targets)
"""
JOB = f"""
plan = "plan.toml"
[model]
name = "lost_parts:model"
loss = "lost_parts:mean_square"
[dataset]
name = "lost_parts:Samples"
[optimizer]
name = "adamw"
lr = 0.01
schedule = "constant"
[steps]
total = {NUM_STEPS}
global_batch = 8
save_every = 100
"""
SERVED = '[axes]\ndata = 2\n[data]\nsync = "server"\n[server]\nshards = 2\n'


def run_well(folder: Path, *arguments: str | Path) -> None:
    outcome = finish(start("train", *arguments, folder=folder, module="served_often"))
    assert outcome.code == 0, outcome.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_whoever_resumes_it_goes_on_where_servers_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "lost_parts.py").write_text(PARTS)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "alone.toml").write_text("[axes]\ndata = 1\n")
    (tmp_path / "plan.toml").write_text("[axes]\ndata = 1\n")
    run_well(tmp_path, "job.toml", "--output", "whole")
    expected = losses_of(tmp_path / "whole")
    (tmp_path / "plan.toml").write_text(SERVED)
    lost = start("train", "job.toml", "--output", "lost", folder=tmp_path, module="served_often")
    saved = tmp_path / "lost" / "servers" / "saved-1"
    wait_for_step(tmp_path / "lost", 4)
    deadline = time.monotonic() + 60
    while not [one for one in common_snapshots(saved) if one >= 3]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(lost.pid, signal.SIGKILL)
    finish(lost)
    for plan in ("alone", "plan"):
        shutil.copytree(tmp_path / "lost", tmp_path / plan)
        run_well(tmp_path, "--resume", plan, "--plan", f"{plan}.toml")
        (first,) = [one for one in (tmp_path / plan / "checkpoints").iterdir() if one.name != f"step-{NUM_STEPS}"]
        step = int(first.name.removeprefix("step-"))
        assert 1 <= step < NUM_STEPS
        found = losses_of(tmp_path / plan)
        assert found.keys() >= set(range(step + 1, NUM_STEPS + 1))  # a line before may be lost with who wrote it
        assert [*found.values()] == pytest.approx([expected[one] for one in found], rel=1e-9)
        assert not (tmp_path / plan / "servers").exists()
