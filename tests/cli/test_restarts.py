"""Restarts: said with rank and reason, and not for an exception that came twice in the same way; logs of every rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from command import Workspace
from ranks import start_forkserver

from weft.errors import LaunchError
from weft.launch import launch
from weft.restarts import RankFailure, Restarts

BROKEN = RankFailure(rank=1, how="ended with code 1", error="KeyError: 'a'", traceback="", step=14)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (BROKEN, True),
        (replace(BROKEN, rank=0), True),  # ranks race for the same error
        (replace(BROKEN, step=15), False),
        (replace(BROKEN, error="KeyError: 'b'"), False),
        (replace(BROKEN, error=""), False),
        (None, False),
    ],
)
def test_failures_are_compared_by_exception_and_step(other: RankFailure | None, alike: bool) -> None:
    assert BROKEN.is_like(other) is alike


def test_addresses_and_further_lines_do_not_count() -> None:
    first, second = (replace(BROKEN, error=f"RuntimeError: <object at {at}>\n{at}") for at in ("0x7f01", "0x7fe2"))
    assert first.is_like(second)


def test_deaths_are_restarted_as_often_as_asked_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    killed = RankFailure(rank=3, how="was killed by SIGKILL", error="", traceback="", step=None)
    restarts = Restarts(2)
    assert [restarts.is_worth(killed) for _ in range(3)] == [True, True, False]
    assert not restarts.came_again
    assert capsys.readouterr().err.splitlines() == [
        f"rank 3 was killed by SIGKILL; all ranks are started again (restart {number} of 2)" for number in (1, 2)
    ]


def fail(*, folder: Path, attempt: int, kind: str, notes: Path) -> None:
    (notes / f"{attempt}-{os.environ['RANK']}").touch()
    if os.environ["RANK"] != "1":
        return
    if kind == "killed" and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ValueError("planted")
    error.add_note(f"while training step {7 if kind == 'same' else 7 + attempt}")
    raise error


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "attempts", "said", "message"),
    [
        (
            "same",
            2,
            ["ended with code 1 in step 7: ValueError: planted"],
            "again once in vain .the same error came again",
        ),
        (
            "killed",
            3,
            ["was killed by SIGKILL", "ended with code 1 in step 8: ValueError: planted"],
            "2 times in vain:",
        ),
    ],
)
def test_real_ranks(
    kind: str, attempts: int, said: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_forkserver()
    with pytest.raises(LaunchError, match=message):
        launch(fail, {"kind": kind, "notes": tmp_path}, num_ranks=2, max_restarts=2)
    assert {path.name[0] for path in tmp_path.iterdir()} == {str(number) for number in range(attempts)}
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"rank 1 {why}; all ranks are started again (restart {number} of 2)" for number, why in enumerate(said, 1)
    ]


FAILING = """
import torch
from weft.models.gpt import GPT, GPTConfig

class Failing(GPT):
    calls = 0

    def forward(self, tokens):
        Failing.calls += 1
        print("call", Failing.calls)
        if Failing.calls == 3:
            raise ValueError("planted in forward")
        return super().forward(tokens)

def failing():
    return Failing(GPTConfig(context=16, num_layers=1, hidden=16, heads=2))
"""


@pytest.mark.long
def test_logs_of_all_ranks_and_attempts_are_in_the_runs_folder(workspace: Workspace, tmp_path: Path) -> None:
    from weft.cli.train import _run_rank
    from weft.training.run.job import read_job

    start_forkserver()
    (workspace.folder / "weft_cli_failing.py").write_text(FAILING)
    job = tmp_path / "job.toml"
    rest = workspace.job.read_text().split("[dataset]")[1]
    job.write_text(f'[model]\nname = "weft_cli_failing:failing"\n[dataset]\ncontext = 16\n{rest}')
    directory = tmp_path / "run"
    arguments = {
        "job": read_job(job),
        "directory": directory,
        "resume": False,
        "trace": None,
        "replicas_in_process": False,
        "environment": {},
    }
    with pytest.raises(LaunchError, match="in step 3 and was started again once in vain"):
        launch(_run_rank, arguments, num_ranks=2, max_restarts=3)
    logs = sorted(path.name for path in (directory / "logs").iterdir())
    assert logs == [f"rank-{rank}-attempt-{attempt}.log" for rank in (0, 1) for attempt in (0, 1)]
    texts = [(directory / "logs" / name).read_text() for name in logs]
    assert all("call 2" in text for text in texts)
    assert sum("ValueError: planted in forward\nwhile training step 3" in text for text in texts) >= 2
