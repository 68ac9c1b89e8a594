"""`weft profile` as a user meets it: a table and a file, a comparison of ranks, and exit codes a script can rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from command import Outcome, Workspace, finish, start, start_torchrun
from rich.console import Console

from weft.cli.compression import ModelOptions, print_codecs, read_count
from weft.measure.codecs import MEASURED
from weft.measure.exchanges import TIMED
from weft.profiles.cluster import Compression
from weft.profiles.cluster_text import read_cluster
from weft.profiles.presets import preset

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
    assert [each.codec for each in cluster.compressions] == list(MEASURED)
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
        (["--preflight", "--parameters", "1M"], "--preflight measures nothing and writes nothing"),
        (["--job", "x.toml", "--parameters", "1M"], "--job and --parameters both give the size of the model"),
        (["--parameters", "many"], "--parameters many is not a number of parameters; write one such as 124M"),
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


@pytest.mark.parametrize(("text", "count"), [("124M", 124_000_000), ("1.3b", 1_300_000_000), ("7000", 7000)])
def test_a_number_of_parameters_has_a_unit(text: str, count: int) -> None:
    assert read_count(text) == count and read_count(None) is None


def test_codecs_are_compared_for_a_size_or_for_the_model_of_a_job(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Compression(name="half", alpha_s=0.0, element_ns=1.0, replica_element_ns=0.0)

    def printed(question: ModelOptions) -> str:
        console = Console(file=StringIO(), width=200)
        print_codecs(console, replace(preset("1gbe"), compressions=(half,)), question)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    given = printed(ModelOptions(num_parameters=8_000_000, num_replicas=16))
    assert "a model of 8.0 M parameters, exchanged between 16 replicas" in given
    # 2 × 15 / 16 × 2 bytes saved per element, in 0.5 ns: each of two ranks of a host compresses half
    assert (
        "2.0×" in given
        and "4.0 ms" in given
        and "faster at 936 Mbit/s" in given
        and "any optimizer, between local steps" in given
    )
    of_job = printed(ModelOptions(job=workspace.job))
    assert f"gradients of {workspace.job.name} (" in of_job and "between 4 replicas" in of_job
    (workspace.folder / "weft_cli_greedy.py").write_text("def model():\n    raise MemoryError")
    greedy = workspace.folder / "greedy.toml"
    greedy.write_text('[model]\nname = "weft_cli_greedy:model"\n')
    monkeypatch.syspath_prepend(workspace.folder)
    told = "a model of 25.0 M parameters (the model of greedy.toml cannot be built without memory)"
    assert told in printed(ModelOptions(job=greedy))
