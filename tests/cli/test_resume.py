"""Going on with a run: from the newest whole checkpoint, by `--resume auto`, and under another plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import SAVE_EVERY, TOTAL_STEPS, Outcome, Workspace, assert_same_run, losses_of

from weft.cli.which_run import which_run
from weft.errors import JobError
from weft.plan.plan import Axes
from weft.plan.text import read_plan

RunHere = Callable[..., Outcome]
Reference = tuple[Path, Outcome]


@pytest.mark.long
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    run_here: RunHere, reference: Reference, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(reference[0], directory)
    checkpoints = directory / "checkpoints"
    damaged = checkpoints / f"step-{TOTAL_STEPS}" / "model-00001-of-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert run_here("train", "--resume", directory).code == 0
    assert_same_run(directory, reference[0])
    assert (checkpoints / f"step-{TOTAL_STEPS}.damaged" / damaged.name).exists()
    said = (directory / "logs" / "rank-0-attempt-0.log").read_text()
    assert f"{damaged} is damaged: the checksum of its piece 1 of 1 is" in said
    used = checkpoints / f"step-{TOTAL_STEPS - SAVE_EVERY}"
    assert f"put aside as step-{TOTAL_STEPS}.damaged, and the run goes on from {used}" in said
    assert said.count("--- rank 0, process") == 2, "the logs of the first run and of this one"


@pytest.mark.long
def test_resume_auto_begins_then_goes_on_under_any_plan(
    run_here: RunHere, workspace: Workspace, tmp_path: Path
) -> None:
    directory, plan = tmp_path / "run", tmp_path / "plan.toml"
    plan.write_text('[axes]\ndata = "all"\n[data]\nshard = "optimizer"\n')
    arguments = ("train", workspace.job, "--output", directory, "--resume", "auto", "--steps")
    assert run_here(*arguments, 3, "--ranks", 1).code == 0
    assert read_plan(directory / "plan.toml").axes == Axes(data=1)
    assert run_here(*arguments, 6, "--ranks", 2, "--plan", plan).code == 0
    used = read_plan(directory / "plan.toml")
    assert (used.axes, used.data.shard) == (Axes(data=2), "optimizer")
    assert list(losses_of(directory)) == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "runs").exists()


def find(job_file: Path | None, *, output: Path | None = None, resume: str | None = "auto") -> tuple[Path, bool]:
    run = which_run(job_file, output=output, resume=resume, plan_file=None, steps=None, restarted=False)
    return run.directory, run.resumes


def test_resume_auto_takes_the_newest_run_and_not_that_of_another_job(
    workspace: Workspace, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find(None) == (Path("runs/0001"), False)
    for name in ("0002", "0010"):
        shutil.copytree(reference[0], tmp_path / "runs" / name)
    assert find(None) == (Path("runs/0010"), True)
    assert find(workspace.job) == (Path("runs/0010"), True)
    assert find(workspace.job, output=Path("runs/0003")) == (Path("runs/0003"), False)
    other = tmp_path / "other.toml"
    other.write_text(workspace.job.read_text().replace("hidden = 32", "hidden = 64"))
    with pytest.raises(JobError, match="a run in runs/0010, whose model differs from .*other.toml; give the directory"):
        find(other)


def test_a_plan_file_replaces_the_runs_own(
    run_here: RunHere, workspace: Workspace, reference: Reference, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[axes]\ndatta = 2\n[data]\nsync = "server"\n')
    for arguments in (("train", workspace.job), ("train", "--resume", reference[0]), ("verify", workspace.job)):
        outcome = run_here(*arguments, "--plan", plan)
        assert (outcome.code, outcome.stderr.count('did you mean "data"?')) == (2, 1)
