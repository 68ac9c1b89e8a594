"""`weft verify` as a user meets it: a table, a verdict, and an exit code that a script can rely on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Outcome, Workspace, finish, start, start_torchrun

from weft.cli.verify import _finite

RunHere = Callable[..., Outcome]


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)]


@pytest.mark.long
def test_it_prints_a_table_and_a_verdict(workspace: Workspace, tmp_path: Path) -> None:
    before = files_in(workspace.folder)
    outcome = finish(start("verify", workspace.job, "--steps", "2", folder=workspace.folder))
    assert (outcome.code, outcome.stderr) == (0, "")
    rows = {line.split("│")[1].strip(): line.split("│")[2:] for line in outcome.stdout.splitlines() if "│" in line}
    assert {"loss", "gradient", "weight"} <= rows.keys()
    for what in ("loss", "gradient", "weight"):
        error, _, rank, step, _ = rows[what]
        assert 0 <= float(error) <= 1e-10 and int(rank) in (0, 1) and int(step) in (1, 2)
    assert "equal to one process over 2 steps (tolerance 1e-10)" in outcome.stdout
    assert "NOT" not in outcome.stdout
    assert files_in(workspace.folder) == before


MODELS = '''
import os

from weft.models.gpt import GPT, GPTConfig


class Crooked(GPT):
    """One rank computes something else."""

    def forward(self, tokens):
        scale = 1.001 if os.environ.get("RANK") == "1" else 1.0
        return super().forward(tokens) * scale


def crooked():
    return Crooked(GPTConfig(context=16, num_layers=1, hidden=16, heads=2))
'''


def test_a_plan_that_is_not_equal_exits_with_1(run_here: RunHere, workspace: Workspace, tmp_path: Path) -> None:
    (workspace.folder / "weft_cli_crooked.py").write_text(MODELS)
    text = workspace.job.read_text().split("[dataset]")[1]
    job, report = tmp_path / "job.toml", tmp_path / "outcome.json"
    job.write_text(f'[model]\nname = "weft_cli_crooked:crooked"\n[dataset]\ncontext = 16\n{text}')
    outcome = run_here("verify", job, "--steps", "1", "--json", report)
    assert (outcome.code, outcome.stderr) == (1, "")
    assert "NOT equal to one process over 1 steps" in outcome.stdout
    assert "the first difference: loss, step 1, phase forward, off by" in outcome.stdout
    assert "Likely cause: no simple one" in outcome.stdout
    written = json.loads(report.read_text())
    assert written["ok"] is False and written["first"]["what"] == "loss" and written["first"]["ranks"] == [0, 1]
    assert {one["what"] for one in written["differences"]} >= {"loss", "gradient", "weight"}


def test_a_lossy_plan_says_how_far_it_is(run_here: RunHere, workspace: Workspace, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[axes]\ndata = 2\n[precision]\ncompute = "bf16"\n')
    outcome = run_here("verify", workspace.job, "--plan", plan, "--steps", 1)
    assert outcome.code == 0, outcome.stderr
    assert "equal to one process over 1 steps" in outcome.stdout
    assert "deviation from one process in float32: loss" in outcome.stdout


@pytest.mark.long
def test_local_steps_are_held_to_their_rule(run_here: RunHere, workspace: Workspace, tmp_path: Path) -> None:
    """Every 50 steps, three of them would compare no exchange, so replicas meet sooner, and a note says so."""
    plan = tmp_path / "plan.toml"
    outer = 'outer = "nesterov"\nouter_lr = 0.7\nouter_momentum = 0.9\n'
    plan.write_text(f'[axes]\ndata = 2\n[data]\nsync = "local"\nevery = 50\n{outer}')
    outcome = run_here("verify", workspace.job, "--plan", plan)
    assert outcome.code == 0, outcome.stderr
    told = " ".join(outcome.stdout.split())
    assert "equal to one process that plays all replicas over 3 steps (tolerance 1e-10)" in told
    assert "replicas exchanged every 2 steps instead of 50, to be seen in 3 steps" in told
    assert "deviation from synchronous training in one process: loss" in told


@pytest.mark.long
def test_in_single_it_compares_losses(run_here: RunHere, workspace: Workspace) -> None:
    outcome = run_here("verify", workspace.job, "--dtype", "float32", "--steps", 1)
    assert outcome.code == 0 and "(tolerance 1e-05)" in outcome.stdout and "gradient" not in outcome.stdout


@pytest.mark.long
def test_a_plan_of_its_own_and_another_batch(run_here: RunHere, workspace: Workspace, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[axes]\ndata = 4\n[step]\nmicrobatches = 2\nclip_norm = 0.1\n")
    assert run_here("verify", workspace.job, "--plan", plan, "--batch", 11, "--steps", 1).code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--batch", "1"], "a global batch of 1 is smaller than the 2 data ranks"),
        (["--steps", "1000"], "1000 steps of 8 samples need 8000, the data holds"),
    ],
)
def test_what_it_cannot_verify(run_here: RunHere, workspace: Workspace, arguments: list[str], told: str) -> None:
    outcome = run_here("verify", workspace.job, *arguments)
    assert outcome.code == 2 and outcome.stderr.count(told) == 1 and outcome.stderr.count("weft:") == 1


@pytest.mark.long
def test_it_verifies_the_default_job_and_joins_torchrun(workspace: Workspace, tmp_path: Path) -> None:
    outcome = finish(start("verify", "--steps", "1", "--batch", "4", folder=tmp_path))
    assert outcome.code == 0 and "equal to one process" in outcome.stdout
    outcome = finish(start_torchrun("verify", workspace.job, folder=workspace.folder))
    assert outcome.code == 0 and outcome.stdout.count("equal to one process") == 1


def test_numbers_that_json_does_not_know_are_null() -> None:
    values = {"error": float("inf"), "loss": [float("nan"), 1.5], "name": "a", "ranks": (0, 1)}
    assert _finite(values) == {"error": None, "loss": [None, 1.5], "name": "a", "ranks": [0, 1]}
