"""`weft train` with a pipeline: it runs, resumes to the bit under the cuts it chose, and writes its trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Outcome, Workspace, lines_of, tensors_of

from weft.plan.text import read_plan

PLAN = """
[axes]
pipeline = 2
[step]
microbatches = 4
[pipeline]
schedule = "{schedule}"
"""


def job_with(workspace: Workspace, folder: Path, schedule: str) -> Path:
    (folder / "plan.toml").write_text(PLAN.format(schedule=schedule))
    text = workspace.job.read_text().replace("num_layers = 1", "num_layers = 2\ntied = false")
    (folder / "job.toml").write_text(f'plan = "{folder / "plan.toml"}"\n{text}')
    return folder / "job.toml"


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["2bw", pytest.param("1f1b", marks=pytest.mark.long)])
def test_a_pipeline_trains_resumes_and_leaves_a_trace(
    run_here: Callable[..., Outcome], workspace: Workspace, tmp_path: Path, schedule: str
) -> None:
    job = job_with(workspace, tmp_path, schedule)
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run_here("train", job, "--output", whole, "--steps", "20", "--trace", tmp_path / "trace.json").code == 0
    assert read_plan(whole / "plan.toml").pipeline.cuts == (1,), "where it was cut is part of the run"
    steps = [line for line in lines_of(whole) if "loss" in line]
    assert len(steps) == 20 and steps[-1]["sent_bytes"]["pipeline"] > 0 and steps[-1]["bubble_s"] > 0
    assert (steps[0]["loss"] is None) == (schedule == "2bw") and steps[-1]["loss"] < steps[1]["loss"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    forwards = [event for event in events if event.get("cat") == "forward"]
    assert {event["pid"] for event in forwards} == {0, 1}
    assert len(forwards) >= 20 * 4 * 2, "every step is in it"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step-20")
    assert run_here("train", "--resume", again).code == 0
    ends = [tensors_of(run / "checkpoints" / "step-20") for run in (whole, again)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
