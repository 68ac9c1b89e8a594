"""`weft train --replicas-in-process`: what a run leaves, that real ranks go on with it, and what is refused at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import (
    SAVE_EVERY,
    TOTAL_STEPS,
    Outcome,
    Workspace,
    assert_same_run,
    finish,
    lines_of,
    start,
    wait_for_step,
)
from safetensors.torch import load_file

from weft.plan.text import read_plan

RunHere = Callable[..., Outcome]
PLAN = """
[axes]
data = 2
[data]
sync = "local"
every = 3
outer = "nesterov"
outer_lr = 0.7
outer_momentum = 0.9
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "diloco.toml"
    path.write_text(PLAN)
    return path


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All but random states, which real ranks have of their own."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
        if not name.startswith("rng/")
    }


@pytest.mark.long
def test_a_run_in_one_process_is_that_of_real_ranks_which_can_go_on_with_it(
    run_here: RunHere, workspace: Workspace, plan: Path, tmp_path: Path
) -> None:
    job, whole, broken = tmp_path / "job.toml", tmp_path / "whole", tmp_path / "broken"
    text = workspace.job.read_text().replace(f"total = {TOTAL_STEPS}", "total = 8")
    job.write_text(text.replace(f"save_every = {SAVE_EVERY}", "save_every = 4"))
    assert run_here("train", job, "--plan", plan, "--replicas-in-process", "--output", whole).code == 0
    lines = [line for line in lines_of(whole) if "loss" in line]
    assert [line["exchanged"] for line in lines] == [step % 3 == 0 for step in range(1, 9)]
    assert [line["spread"] is not None for line in lines] == [line["exchanged"] for line in lines]
    for line in lines:
        assert line["loss"] == pytest.approx(sum(line["replica_losses"]) / 2)
        assert not any(line["sent_bytes"].values())
    assert read_plan(whole / "plan.toml") == read_plan(plan)
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-8")
    assert run_here("train", "--resume", broken).code == 0  # two ranks, between two exchanges
    by_ranks = [line for line in lines_of(broken) if "loss" in line][4:]
    assert [line["loss"] for line in by_ranks] == [line["replica_losses"][0] for line in lines[4:]]
    assert [(line["exchanged"], line["spread"]) for line in by_ranks] == [
        (line["exchanged"], line["spread"]) for line in lines[4:]
    ]
    assert [line["sent_bytes"]["data"] > 0 for line in by_ranks] == [line["exchanged"] for line in by_ranks]
    assert all(line["replica_losses"] is None for line in by_ranks)
    found, expected = (tensors_in(run / "checkpoints" / "step-8") for run in (broken, whole))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def test_everything_is_refused_at_once_before_anything_starts(
    run_here: RunHere, workspace: Workspace, plan: Path, tmp_path: Path
) -> None:
    plan.write_text(PLAN.replace("data = 2", "data = 2\ntensor = 2"))
    outcome = run_here("train", workspace.job, "--plan", plan, "--replicas-in-process", "--ranks", 4)
    assert outcome.code == 2
    assert "a replica is 2 ranks" in outcome.stderr and "--ranks 4 has no effect" in outcome.stderr
    outcome = run_here("train", workspace.job, "--replicas-in-process", "--output", tmp_path / "run")
    assert outcome.code == 2 and 'set [data] sync = "local"' in outcome.stderr
    assert not (tmp_path / "run").exists()
    plan.write_text(PLAN.replace("every = 3", "every = 0"))
    outcome = run_here("train", workspace.job, "--plan", plan, "--replicas-in-process", "--ranks", 4)
    assert outcome.code == 2 and "every = 0" in outcome.stderr and "--ranks 4 has no effect" in outcome.stderr
    assert "all-reduce" not in outcome.stderr  # the default of a plan that could not be read


@pytest.mark.long
def test_a_run_without_any_exchange_is_warned_of(
    run_here: RunHere, workspace: Workspace, plan: Path, tmp_path: Path
) -> None:
    plan.write_text(PLAN.replace("every = 3", "every = 50"))
    outcome = run_here(
        "train", workspace.job, "--plan", plan, "--replicas-in-process", "--steps", 1, "--output", tmp_path / "run"
    )
    assert outcome.code == 0
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("*.log"))
    assert "[data] every = 50, and the run has 1 steps: replicas exchange nothing before its end" in logs


LATE = {
    "delayed": '[axes]\ndata = 2\n[data]\nsync = "delayed"\nevery = 2\ndelay = 7\n[codec]\nname = "topk"\n',
    "streaming": PLAN.replace("every = 3", "every = 6\nfragments = 1\ndelay = 4\nmix = 0.5"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LATE)
def test_a_peer_that_dies_while_exchanges_are_under_way_is_survived(
    name: str, run_here: RunHere, workspace: Workspace, tmp_path: Path
) -> None:
    """The ranks end, start again, and go on from a checkpoint with what was under way, to the bit."""
    plan, whole, killed = tmp_path / "late.toml", tmp_path / "whole", tmp_path / "killed"
    plan.write_text(LATE[name])
    assert run_here("train", workspace.job, "--plan", plan, "--output", whole).code == 0
    job = workspace.slow_job(tmp_path)
    process = start("train", job, "--plan", plan, "--output", killed, folder=workspace.folder)
    for rank, step in ((1, 13), (0, 35)):
        wait_for_step(killed, step)
        os.kill(int((tmp_path / "pids" / str(rank)).read_text()), signal.SIGKILL)
    outcome = finish(process)
    assert outcome.code == 0, outcome.stderr
    assert "rank 1 was killed by SIGKILL; all ranks are started again (restart 1 of 3)" in outcome.stderr
    assert_same_run(killed, whole)


@pytest.mark.long
def test_a_run_that_is_not_restarted_ends_cleanly_and_is_resumed(
    run_here: RunHere, workspace: Workspace, tmp_path: Path
) -> None:
    plan, whole, killed = tmp_path / "late.toml", tmp_path / "whole", tmp_path / "killed"
    plan.write_text(LATE["delayed"])
    assert run_here("train", workspace.job, "--plan", plan, "--output", whole).code == 0
    job = workspace.slow_job(tmp_path)
    process = start("train", job, "--plan", plan, "--output", killed, "--restarts", "0", folder=workspace.folder)
    wait_for_step(killed, 24)
    os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGKILL)
    outcome = finish(process, timeout_s=60.0)
    assert (outcome.code, outcome.stderr) == (2, "weft: rank 1 was killed by SIGKILL\n")
    assert run_here("train", "--resume", killed).code == 0
    assert_same_run(killed, whole)
