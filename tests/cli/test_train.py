"""`weft train` as a user meets it: what it leaves on the disk, how it stops and resumes, and how it loses a rank."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    losses_of,
    start,
    start_torchrun,
    tensors_of,
    wait_for_step,
)
from typer.main import get_command
from typer.testing import CliRunner

from weft.checkpoint.folders import all_checkpoints
from weft.cli import which_run
from weft.cli.main import app
from weft.plan.plan import Axes, Plan
from weft.plan.text import read_plan
from weft.training.run.components import prepare
from weft.training.run.job import default_job, read_job
from weft.training.run.loop import read_run

RunHere = Callable[..., Outcome]
Reference = tuple[Path, Outcome]


def test_the_options_are_these() -> None:
    """About a dozen: everything else is in the job and the plan."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {
        name: sorted(option for parameter in command.params for option in parameter.opts if option.startswith("-"))
        for name, command in commands.items()
    }
    assert options == {
        "lab": (
            "--bandwidth --check --counters --delay --hosts --jitter --loss --per-host --preset --ranks-per-host "
            "--topology --traceback"
        ).split(),
        "profile": (
            "--advise --bandwidth --cluster --job --latency --output --parameters --preflight --quick --ranks "
            "--replicas --step-time --traceback"
        ).split(),
        "train": (
            "--join --key --listen --output --plan --ranks --replicas-in-process --restarts --resume --role --servers "
            "--steps --timeout --trace --traceback"
        ).split(),
        "verify": ["--batch", "--dtype", "--json", "--plan", "--steps", "--traceback"],
    }


@pytest.mark.parametrize("command", ["profile", "train", "verify"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example:  weft {command}" in result.output
    assert all(line == line.rstrip() for line in result.output.splitlines())


@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_is_never_cut(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a narrow terminal too: sentences are wrapped, and end."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    for command in ([], ["profile"], ["lab"], ["train"], ["verify"]):
        text = CliRunner().invoke(app, [*command, "--help"]).output
        sentences = text.partition("\n")[2].replace(" ... -m", "")  # those of torchrun's own options
        assert "..." not in sentences and "…" not in sentences, text
        for parameter in get_command(app).commands[command[0]].params if command else ():  # type: ignore[attr-defined]
            assert " ".join((parameter.help or "").split()) in " ".join(text.split())


def test_version_and_bare_command() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("weft 0.")
    bare = CliRunner().invoke(app, [])
    assert "train" in bare.output and "verify" in bare.output


def test_a_run_leaves_its_files(reference: Reference, workspace: Workspace) -> None:
    directory, _ = reference
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["checkpoints", "job.toml", "logs", "metrics.jsonl", "plan.toml"]
    assert read_plan(directory / "plan.toml") == Plan(axes=Axes(data=2))
    job = read_job(workspace.job)
    assert (read_run(directory).steps, read_run(directory).model) == (job.steps, job.model)
    kept = [path.name for path in all_checkpoints(directory / "checkpoints")]
    assert kept == [f"step-{TOTAL_STEPS - 2 * SAVE_EVERY}", f"step-{TOTAL_STEPS - SAVE_EVERY}", f"step-{TOTAL_STEPS}"]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == kept


def test_a_run_has_one_line_of_metrics_a_step(reference: Reference) -> None:
    steps = [line for line in lines_of(reference[0]) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, TOTAL_STEPS + 1))
    names = "step loss lr unit units_per_s step_s exchange_s bubble_s compute_s sent_bytes memory_bytes grad_norm "
    names += "num_skipped loss_scale spike exchanged spread delay staleness num_dropped replica_losses shares straggler"
    for line in steps:
        assert list(line) == names.split()
        assert line["unit"] == "tokens" and line["units_per_s"] > 0
        assert line["exchange_s"] >= 0 and line["compute_s"] + line["exchange_s"] == pytest.approx(line["step_s"])
        assert line["bubble_s"] == 0
        assert line["sent_bytes"]["data"] > 0 and line["memory_bytes"] > 0
    assert steps[0]["lr"] == pytest.approx(0.003 / 4) and steps[-1]["lr"] == pytest.approx(0.0003)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1


def test_a_run_is_evaluated_and_writes_a_sample(reference: Reference) -> None:
    directory, outcome = reference
    evaluated = {line["step"]: line["held_out_loss"] for line in lines_of(directory) if "held_out_loss" in line}
    assert list(evaluated) == [20, 40, 60] and evaluated[60] < evaluated[20]
    assert f"held-out loss after step 60: {evaluated[60]:.3f}" in outcome.stdout
    sample = outcome.stdout.split("a sample of its text:\n\n")[1].split("\ndone: ")[0]
    assert sample.startswith("def ") and len(sample) > 50
    assert f"run directory: {directory}" in outcome.stdout
    assert f"saved {directory / 'checkpoints' / 'step-60'}" in outcome.stdout
    assert outcome.stderr == ""


@pytest.mark.long
def test_a_finished_run_resumes_to_nothing_new(run_here: RunHere, reference: Reference, tmp_path: Path) -> None:
    os.system(f"cp -r {reference[0]} {tmp_path / 'run'}")
    assert run_here("train", "--resume", tmp_path / "run").code == 0
    assert_same_run(tmp_path / "run", reference[0])


def test_few_steps_shorten_a_warm_up_that_would_take_them_all() -> None:
    job = default_job()
    warmup_steps = job.schedule.settings["warmup_steps"]
    short = which_run._of_length(job, warmup_steps)
    assert short.steps.total == warmup_steps and short.schedule.settings["warmup_steps"] == warmup_steps // 10
    prepare(short)
    assert which_run._of_length(job, warmup_steps + 1).schedule == job.schedule


@pytest.mark.long
def test_more_steps_go_on_from_the_end(run_here: RunHere, reference: Reference, tmp_path: Path) -> None:
    os.system(f"cp -r {reference[0]} {tmp_path / 'run'}")
    assert run_here("train", "--resume", tmp_path / "run", "--steps", TOTAL_STEPS + 5).code == 0
    losses = losses_of(tmp_path / "run")
    assert list(losses) == list(range(1, TOTAL_STEPS + 6))
    assert losses.items() >= losses_of(reference[0]).items()
    assert read_run(tmp_path / "run").steps.total == TOTAL_STEPS + 5


@contextmanager
def after_step(directory: Path, step: int, act: Callable[[], None]) -> Iterator[None]:
    """Context in which `act` is called once the run has done a step."""
    thread = threading.Thread(target=lambda: (wait_for_step(directory, step), act()))
    thread.start()
    try:
        yield
    finally:
        thread.join()  # or its error would be reported in a later test


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_to_the_parent_stops_and_resume_goes_on(
    run_here: RunHere, workspace: Workspace, reference: Reference, tmp_path: Path, number: signal.Signals
) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path)
    with after_step(directory, SAVE_EVERY + 3, lambda: os.kill(os.getpid(), number)):
        outcome = run_here("train", job, "--output", directory)
    assert outcome.code == 130
    assert outcome.stderr.strip() == "stopping after this step; Ctrl-C again to end at once"
    done = max(losses_of(directory))
    assert SAVE_EVERY + 3 <= done < TOTAL_STEPS
    assert all_checkpoints(directory / "checkpoints")[-1].name == f"step-{done}"
    assert run_here("train", "--resume", directory).code == 0
    assert_same_run(directory, reference[0])


@pytest.mark.long
def test_ctrl_c_in_a_terminal_stops_and_says_how_to_resume(
    run_here: RunHere, workspace: Workspace, reference: Reference, tmp_path: Path
) -> None:
    """A terminal sends it to the whole process group: parent, forkserver and ranks."""
    directory = tmp_path / "run"
    process = start("train", workspace.slow_job(tmp_path), "--output", directory, folder=workspace.folder)
    wait_for_step(directory, SAVE_EVERY + 3)
    os.killpg(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130
    assert outcome.stderr.strip() == "stopping after this step; Ctrl-C again to end at once"
    done = max(losses_of(directory))
    stopped = f"stopped after step {done} of {TOTAL_STEPS}; go on with:\n  weft train --resume {directory}\n"
    assert stopped in outcome.stdout  # a busy machine may add that a rank was slow
    assert run_here("train", "--resume", directory).code == 0
    assert_same_run(directory, reference[0])


def kill_rank(folder: Path, rank: int) -> None:
    os.kill(int((folder / "pids" / str(rank)).read_text()), signal.SIGKILL)


@pytest.mark.long
def test_a_rank_killed_before_the_first_checkpoint_starts_from_the_beginning(
    run_here: RunHere, workspace: Workspace, reference: Reference, tmp_path: Path
) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path)
    with after_step(directory, 3, lambda: kill_rank(tmp_path, 1)):
        assert run_here("train", job, "--output", directory).code == 0
    assert_same_run(directory, reference[0])


@pytest.mark.long
def test_a_real_run_survives_three_kills_and_says_so(
    workspace: Workspace, reference: Reference, tmp_path: Path
) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path, delay_s=0.1)
    process = start("train", job, "--output", directory, folder=workspace.folder)
    for number, step in enumerate((13, 27, 44)):
        wait_for_step(directory, step)
        kill_rank(tmp_path, number % 2)
    outcome = finish(process)
    assert outcome.code == 0
    assert outcome.stderr.splitlines() == [
        f"rank {rank} was killed by SIGKILL; all ranks are started again (restart {restart} of 3)"
        for restart, rank in ((1, 0), (2, 1), (3, 0))
    ]
    for restart, step in ((1, 10), (2, 20), (3, 40)):
        said = f"all ranks were started again (restart {restart}), going on from step {step}"
        assert outcome.stdout.count(said) == 1
    assert_same_run(directory, reference[0])


@pytest.mark.sampled(long=2)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_kills_at_any_moment_of_a_run_that_always_saves(
    run_here: RunHere, workspace: Workspace, reference: Reference, tmp_path: Path, seed: int
) -> None:
    """A checkpoint after every step, so that most kills fall into one."""
    directory, job, chance = tmp_path / "run", workspace.slow_job(tmp_path, delay_s=0.0), random.Random(seed)
    job.write_text(job.read_text().replace(f"save_every = {SAVE_EVERY}", "save_every = 1"))

    def kill() -> None:
        for step in (3, 20, 40):
            wait_for_step(directory, step)
            time.sleep(chance.uniform(0.0, 0.05))
            with suppress(ProcessLookupError):
                kill_rank(tmp_path, chance.randrange(2))

    with after_step(directory, 0, kill):
        assert run_here("train", job, "--output", directory).code == 0
    assert_same_run(directory, reference[0])
    kept = [f"step-{step}" for step in (TOTAL_STEPS - 2, TOTAL_STEPS - 1, TOTAL_STEPS)]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == kept


@pytest.mark.long
def test_more_deaths_than_restarts_end_the_run(workspace: Workspace, tmp_path: Path) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path)
    process = start("train", job, "--output", directory, "--restarts", "0", folder=workspace.folder)
    wait_for_step(directory, 13)
    kill_rank(tmp_path, 1)
    outcome = finish(process)
    assert (outcome.code, outcome.stderr) == (2, "weft: rank 1 was killed by SIGKILL\n")
    assert [path.name for path in all_checkpoints(directory / "checkpoints")] == ["step-10"]


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once(workspace: Workspace, tmp_path: Path) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path, delay_s=1.0)
    process = start("train", job, "--output", directory, folder=workspace.folder)
    wait_for_step(directory, 1)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    outcome = finish(process, timeout_s=10.0)
    assert outcome.code == 130 and outcome.stderr == ""
    assert not is_alive(tmp_path, 0) and not is_alive(tmp_path, 1)


def is_alive(folder: Path, rank: int) -> bool:
    """True if a rank still runs; a zombie does not."""
    try:
        status = Path("/proc", (folder / "pids" / str(rank)).read_text(), "stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.long
def test_ctrl_c_does_not_reach_the_server_that_ranks_are_forked_from() -> None:
    """It would die in the middle of its imports, with a traceback."""
    script = (
        "import signal, pathlib\n"
        "from multiprocessing import forkserver\n"
        "from weft.launch import start_server\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a shell's background
        "start_server()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "pid = forkserver._forkserver._forkserver_pid\n"
        "status = pathlib.Path(f'/proc/{pid}/status').read_text()\n"
        "ignored = int(status.split('SigIgn:')[1].split()[0], 16)\n"
        "assert ignored & 1 << signal.SIGINT - 1\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_ranks_do_not_outlive_a_killed_parent(workspace: Workspace, tmp_path: Path) -> None:
    """A resumed run would otherwise meet them in its directory."""
    directory = tmp_path / "run"
    process = start("train", workspace.slow_job(tmp_path), "--output", directory, folder=workspace.folder)
    wait_for_step(directory, 13)
    process.kill()
    assert finish(process, timeout_s=10.0).code == -signal.SIGKILL  # their end closed the pipes that this waits for
    assert not is_alive(tmp_path, 0) and not is_alive(tmp_path, 1)


@pytest.mark.long
def test_inside_torchrun_the_command_joins_its_world(
    workspace: Workspace, reference: Reference, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    outcome = finish(start_torchrun("train", workspace.job, "--output", directory, folder=workspace.folder))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("done: 60 steps") == 1
    assert_same_run(directory, reference[0])


@pytest.mark.long
def test_torchrun_restarts_a_killed_rank(workspace: Workspace, reference: Reference, tmp_path: Path) -> None:
    directory, job = tmp_path / "run", workspace.slow_job(tmp_path)
    process = start_torchrun("train", job, "--output", directory, folder=workspace.folder, max_restarts=2)
    wait_for_step(directory, 13)
    kill_rank(tmp_path, 1)
    outcome = finish(process)
    assert outcome.code == 0, outcome.stderr
    assert "going on from step 10" in outcome.stdout
    assert_same_run(directory, reference[0])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_arguments_it_trains_the_default(tmp_path: Path) -> None:
    for number in (1, 2):
        outcome = finish(start("train", "--steps", "20", folder=tmp_path), timeout_s=140.0)
        assert outcome.code == 0, outcome.stderr
        directory = tmp_path / "runs" / f"{number:04d}"
        assert max(losses_of(directory)) == 20
        assert f"run directory: runs/{number:04d}" in outcome.stdout
    assert tensors_of(directory / "checkpoints" / "step-20").keys() >= {"model embedding.weight"}
    one, two = (losses_of(tmp_path / "runs" / name) for name in ("0001", "0002"))
    assert one == two


@pytest.mark.long
def test_four_ranks_and_one_agree_to_rounding(run_here: RunHere, workspace: Workspace, tmp_path: Path) -> None:
    """The same data in the same order whatever the number of ranks; dropout is off, for ranks draw their own."""
    job = tmp_path / "job.toml"
    job.write_text(workspace.job.read_text().replace("dropout = 0.1", "dropout = 0.0"))
    for ranks in (1, 4):
        directory = tmp_path / f"by-{ranks}"
        assert run_here("train", job, "--ranks", ranks, "--steps", 10, "--output", directory).code == 0
    one, four = (list(losses_of(tmp_path / f"by-{ranks}").values()) for ranks in (1, 4))
    torch.testing.assert_close(torch.tensor(one), torch.tensor(four), rtol=1e-5, atol=0)
    assert json.loads((tmp_path / "by-4" / "checkpoints" / "step-10" / "checkpoint.json").read_text())["step"] == 10
