"""A folder to work in, one unbroken run that many tests are compared with, and the command in this process.

`command.start` makes a real process, which imports torch twice (itself and in its forkserver) and so takes seconds.
`run_here` calls `main()` in this process: its ranks are forked from the test pool's server, which is several times
quicker, but what rank 0 prints goes to that server's output and cannot be caught. Both start real ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import SAMPLES, Outcome, Workspace, finish, job_text, start
from ranks import start_forkserver

from weft.cli.main import main


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "corpus.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300)))
    (folder / "weft_cli_samples.py").write_text(SAMPLES)
    dataset = f'name = "text"\nfiles = "{folder / "corpus.txt"}"\nheld_out = 0.1'
    (folder / "job.toml").write_text(job_text(folder, dataset=dataset))
    return Workspace(folder=folder, job=folder / "job.toml")


@pytest.fixture(autouse=True)
def in_workspace(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, where "module:function" is looked for, and whose path the ranks get."""
    monkeypatch.chdir(workspace.folder)
    monkeypatch.syspath_prepend(str(workspace.folder))


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """weft's `main` in this process; its exit code, and what it printed itself."""
    start_forkserver()

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = 0 if ended.code is None else ended.code
        printed = capsys.readouterr()
        return Outcome(code=code, stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture(scope="session")
def reference(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The unbroken run's directory, and what the command printed."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    outcome = finish(start("train", workspace.job, "--output", directory, folder=workspace.folder))
    assert outcome.code == 0, outcome.stderr
    return directory, outcome
