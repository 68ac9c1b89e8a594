"""Servers and workers that one command starts: a worker that dies is started again while the others go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from weft import launch_workers as launch_workers_module
from weft.errors import JobError, LaunchError
from weft.launch import STOP_FILE
from weft.launch_workers import launch_workers
from weft.plan.partition.one_worker import WORKER
from weft.plan.plan import Axes, Data, Plan, Server
from weft.server.local_servers import LocalServers
from weft.training.run import loop
from weft.training.run.job import Job, Part, Steps
from weft.training.run.loop import Summary, train

TOTAL, NUM_STEPS = 256, 12


class Samples:
    """Linear targets."""

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.arange(3.0) + index / TOTAL
        return inputs, inputs.sum(0, keepdim=True)


def samples() -> Samples:
    return Samples()


def model() -> nn.Module:
    return nn.Linear(3, 1)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def plan_of(workers: int, **server: Any) -> Plan:
    return Plan(axes=Axes(data=workers), data=Data(sync="server"), server=Server(**server))


def job_of(plan: Plan, *, loss: str = f"{__name__}:mean_square", **steps: Any) -> Job:
    return Job(
        model=Part(name=f"{__name__}:model"),
        loss=loss,
        dataset=Part(name=f"{__name__}:samples"),
        optimizer=Part(name="adamw", settings={"lr": 0.01}),
        schedule=Part(name="constant"),
        steps=Steps(**{"total": NUM_STEPS, "global_batch": 8, "save_every": 4, **steps}),
        plan=plan,
    )


def work(*, folder: Path, attempt: int, job: Job, directory: Path, kills: dict[str, int], always: bool) -> Summary:
    """The work of a rank. `kills`: the step in which a worker kills itself, by its number; only once, or `always`."""
    dies_at = kills.get(os.environ[WORKER], -1) if always or attempt == 0 else -1
    original = loop._Run._step

    def step(run: Any, inputs: Any, targets: Any) -> None:
        if run.trainer.steps_done >= dies_at >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(run, inputs, targets)

    with mock.patch.object(loop._Run, "_step", step):
        return train(job, directory=directory, resume=attempt > 0, stop_file=folder / STOP_FILE)


def launched(
    plan: Plan,
    directory: Path,
    *,
    kills: dict[str, int] | None = None,
    always: bool = False,
    restarts: int = 3,
    **job: Any,
) -> list[Summary]:
    arguments = {"job": job_of(plan, **job), "directory": directory, "kills": kills or {}, "always": always}
    return launch_workers(work, arguments, plan=plan, seed=1, max_restarts=restarts)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_workers_train_as_one_process_does(tmp_path: Path) -> None:
    found = launched(plan_of(2, shards=2), tmp_path / "run")
    alone = train(job_of(Plan()), directory=tmp_path / "alone")
    assert [one.steps_done for one in found] == [NUM_STEPS] * 2
    losses = [[line["loss"] for line in lines_of(one)] for one in (tmp_path / "run", alone.directory)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == NUM_STEPS
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-12", "step-4", "step-8"]
    longer = job_of(Plan(), total=14)  # any plan goes on with it
    assert train(longer, directory=tmp_path / "run", resume=True).steps_done == 14


@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_worker_that_dies_joins_again(dies: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = 400  # as many as take longer than a start
    found = launched(plan_of(2), tmp_path / "run", kills={dies: 5}, total=steps, save_every=0)
    assert [one.steps_done for one in found] == [steps] * len(found)
    assert any(f"worker {dies} was killed by signal 9; the others go on" in one.getMessage() for one in caplog.records)
    written = [line["step"] for line in lines_of(tmp_path / "run")]
    assert written == sorted(set(written)) and written[-1] == steps
    assert len(written) >= steps - 4  # some are lost where another worker writes on
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps}").is_dir()


def kill_servers(made: list[LocalServers], directory: Path, at: Sequence[int]) -> None:
    """Kill one server after another, each when so many steps are written."""
    for place, step in enumerate(at):
        while not ((path := directory / "metrics.jsonl").exists() and path.read_text().count("\n") >= step):
            time.sleep(0.01)
        os.kill(made[0].pids[place % len(made[0].pids)], signal.SIGKILL)


def test_servers_that_die_are_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The leading one and another, and the run does not notice."""
    made: list[LocalServers] = []

    def starting(*args: Any, **options: Any) -> LocalServers:
        made.append(LocalServers(*args, **options))
        return made[0]

    steps = 300
    killing = threading.Thread(target=kill_servers, args=(made, tmp_path / "run", (40, 150)), daemon=True)
    killing.start()
    with mock.patch.object(launch_workers_module, "LocalServers", starting):
        found = launched(plan_of(2, shards=2), tmp_path / "run", total=steps, save_every=0)
    alone = train(job_of(Plan(), total=steps, save_every=0), directory=tmp_path / "alone")
    assert [one.steps_done for one in found] == [steps] * 2
    losses = [[line["loss"] for line in lines_of(one)] for one in (tmp_path / "run", alone.directory)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-4) and len(losses[0]) == steps
    for number in (0, 1):
        assert f"server {number} was killed by signal 9; it is started again from its last snapshot" in caplog.text


def test_others_go_on_without_a_worker_that_always_dies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = launched(plan_of(2), tmp_path / "run", kills={"1": 3}, always=True, restarts=1)
    assert [one.steps_done for one in found] == [NUM_STEPS]
    assert any(
        "worker 1 was killed by signal 9, and is not started again" in one.getMessage() for one in caplog.records
    )


def test_a_worker_that_comes_back_after_the_last_step(tmp_path: Path) -> None:
    found = launched(plan_of(2), tmp_path / "run", kills={"1": NUM_STEPS - 1})
    assert [one.steps_done for one in found] == [NUM_STEPS] * 2
    assert [line["step"] for line in lines_of(tmp_path / "run")] == list(range(1, NUM_STEPS + 1))


def test_a_run_without_workers_is_over(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no worker is left"):
        launched(plan_of(1), tmp_path / "run", kills={"0": 3}, always=True, restarts=0)


def test_a_mistake_of_the_user_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nowhere"):
        launched(plan_of(2), tmp_path / "run", loss=f"{__name__}:nowhere")
