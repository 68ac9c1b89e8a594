"""`weft profile` as a user meets it: a table and a file, a comparison of ranks, and exit codes a script can rely on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Outcome, Workspace, finish, start, start_torchrun

from weft.measure.exchanges import TIMED
from weft.profiles.cluster_text import read_cluster

RunHere = Callable[..., Outcome]

# Rank 1 reads other samples than rank 0.
OTHER_DATA = """
import os
import torch


def dataset():
    return torch.utils.data.TensorDataset(torch.full((64, 4), float(os.environ["RANK"])), torch.zeros(64, 1))
"""


@pytest.mark.long
def test_it_writes_a_cluster(run_here: RunHere, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert run_here("profile", "--quick", "--output", path) == Outcome(code=0, stdout="", stderr="")
    cluster = read_cluster(path)
    assert (cluster.name, cluster.measured, cluster.num_ranks, cluster.num_hosts) == ("mine", True, 2, 1)
    assert {each.collective for each in cluster.timings} == set(TIMED)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.long
def test_data_that_differs_is_a_problem_with_exit_code_1(workspace: Workspace, tmp_path: Path) -> None:
    (workspace.folder / "weft_cli_other.py").write_text(OTHER_DATA)
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "convnet"\n[dataset]\nname = "weft_cli_other:dataset"\n')
    outcome = finish(start("profile", "--preflight", "--job", job, folder=workspace.folder))
    assert outcome.code == 1 and outcome.stderr == ""
    problems = [line for line in outcome.stdout.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1 and problems[0].startswith("problem: data (sampled) differs: ")
    assert "on rank 0, " in problems[0] and problems[0].endswith(" on rank 1; make them equal")
    assert "2 ranks compared: a run would break" in outcome.stdout and "torch" in outcome.stdout
    assert not (workspace.folder / "cluster.toml").exists()


def test_a_preflight_of_a_good_job_exits_with_0(run_here: RunHere, workspace: Workspace) -> None:
    assert run_here("profile", "--preflight", "--job", workspace.job, "--ranks", 3).code == 0
    assert run_here("profile", "--preflight", "--job", "nowhere.toml").code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--preflight", "--quick"], "--preflight measures nothing and writes nothing"),
        (["--preflight", "--output", "x.toml"], "--preflight measures nothing and writes nothing"),
        (["--output", "no/such/folder/x.toml"], "there is no directory no/such/folder"),
    ],
)
def test_what_it_refuses_before_it_starts(run_here: RunHere, arguments: list[str], told: str) -> None:
    outcome = run_here("profile", *arguments)
    assert outcome.code == 2 and outcome.stderr.count(told) == 1 and outcome.stderr.count("weft:") == 1


def test_a_launcher_decides_the_number_of_ranks(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    outcome = run_here("profile", "--ranks", "2")
    assert outcome.code == 2 and "--ranks 2 has no effect here: a launcher started 4 already" in outcome.stderr


@pytest.mark.long
def test_it_joins_torchrun_and_compares_first(workspace: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    outcome = finish(start_torchrun("profile", "--output", path, folder=workspace.folder))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.index("2 ranks compared: nothing differs") < outcome.stdout.index(f"wrote {path}")
    assert outcome.stdout.count("wrote") == 1 and read_cluster(path).num_ranks == 2
