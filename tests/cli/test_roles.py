"""`weft train --role server|worker`: servers and workers that are started by themselves, as real processes over TCP."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, finish, lines_of, start

from weft.errors import JobError, LaunchError
from weft.server.local_servers import LocalServers
from weft.server.protocol.ask_run import ask_run
from weft.server.protocol.keys import read_key, write_key
from weft.training.run.job import parse_job, read_job
from weft.training.run.loop import train
from weft.training.run.same_job import require_same_job, shared_facts

NUM_STEPS = 12
PARTS = """
import time

import torch
from torch import nn


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(DELAY_S)
        inputs = torch.arange(3.0) + index / 64
        return inputs, inputs.sum(0, keepdim=True)


DELAY_S = 0.0


def samples(*, delay_s=0.0):
    global DELAY_S
    DELAY_S = delay_s
    return Samples()


def model():
    return nn.Linear(3, 1)


def mean_square(output, targets):
    return nn.functional.mse_loss(output, targets)
"""
JOB = f"""
plan = "plan.toml"
[model]
name = "served_parts:model"
loss = "served_parts:mean_square"
[dataset]
name = "served_parts:samples"
[optimizer]
name = "adamw"
lr = 0.01
schedule = "constant"
[steps]
total = {NUM_STEPS}
global_batch = 8
save_every = 4
"""
PLAN = '[axes]\ndata = {workers}\n[data]\nsync = "server"\n[server]\nshards = {shards}\n'


class Job:
    """A folder with a job, and the commands that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "served_parts.py").write_text(PARTS)
        self.write("job.toml", JOB)
        self.plan()

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def plan(self, *, workers: int = 2, shards: int = 1, more: str = "") -> None:
        self.write("plan.toml", PLAN.format(workers=workers, shards=shards) + more)

    def start(self, *arguments: str | Path, module: str = "weft") -> subprocess.Popen[str]:
        self.started.append(start(*arguments, folder=self.folder, module=module))
        return self.started[-1]

    def serve(self, *flags: str) -> tuple[subprocess.Popen[str], list[str]]:
        """Servers, and the arguments with which a worker joins them, as they say."""
        servers = self.start("train", "job.toml", "--role", "server", *flags, "--output", "run")
        assert servers.stdout is not None
        for line in servers.stdout:
            if line.startswith("  weft "):
                return servers, shlex.split(line)[1:]
        raise AssertionError(finish(servers))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Job(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a command prints until it says this."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"{text!r} is not in {said}; {finish(process)}")


def losses_of(directory: Path) -> list[float]:
    return [line["loss"] for line in lines_of(directory) if "loss" in line]


def test_servers_and_workers_that_are_started_one_by_one(job: Job) -> None:
    """The second worker has another folder, as on a host of its own."""
    servers, joining = job.serve("--listen", "127.0.0.1")
    assert "--key" in joining and joining[joining.index("--join") + 1].startswith("tcp://127.0.0.1:")
    assert (job.folder / "run" / "job.key").stat().st_mode & 0o777 == 0o600
    workers = [job.start(*joining), job.start(*joining, "--output", "other")]
    for one in [finish(worker) for worker in workers]:
        assert one.code == 0 and f"done: {NUM_STEPS} steps" in one.stdout, one
    ended = finish(servers)
    assert ended.code == 0 and ended.stderr == "", ended
    assert f"all workers have ended\ndone after step {NUM_STEPS} and {NUM_STEPS} updates\n" in ended.stdout
    job.plan(workers=1)
    alone = read_job(job.write("alone.toml", JOB.replace('plan = "plan.toml"', "")))
    expected = losses_of(train(alone, directory="alone").directory)
    written = [path for path in (job.folder / "run", job.folder / "other") if losses_of(path)]
    assert len(written) == 1, "one of the workers writes"
    assert losses_of(written[0]) == pytest.approx(expected, rel=1e-4) and len(expected) == NUM_STEPS
    assert sorted(path.name for path in written[0].iterdir() if path.is_file() and path.suffix != ".key") == [
        "job.toml",
        "metrics.jsonl",
        "plan.toml",
    ]


@pytest.mark.long
def test_shards_of_two_hosts_and_a_second_server_of_one(job: Job) -> None:
    job.plan(workers=1, shards=2)
    first, joining = job.serve("--listen", "127.0.0.1", "--servers", "0")
    address, key = (joining[joining.index(flag) + 1] for flag in ("--join", "--key"))
    flags = ("--role", "server", "--servers", "1", "--listen", "127.0.0.1", "--join", address, "--key", key)
    second = job.start("train", "job.toml", *flags)
    read_until(second, "server 1 listens at tcp://127.0.0.1:")
    third = finish(job.start("train", "job.toml", *flags))
    assert third.code == 2 and third.stderr.startswith("weft: there is a server 1 already"), third
    assert finish(job.start(*joining)).code == 0
    for one in (finish(first), finish(second)):
        assert one.code == 0 and one.stderr == "", one
    assert len(losses_of(job.folder / "run")) == NUM_STEPS


@pytest.mark.long
def test_servers_wait_for_a_run_whose_only_worker_was_killed(job: Job) -> None:
    job.plan(workers=1)
    steps = 60
    slow = JOB.replace('samples"', 'samples"\ndelay_s = 0.01').replace(f"total = {NUM_STEPS}", f"total = {steps}")
    job.write("job.toml", slow)
    servers, joining = job.serve()
    assert joining[joining.index("--join") + 1].startswith("ipc://") and "--key" not in joining
    worker = job.start(*joining)
    read_until(servers, "step ")
    os.killpg(worker.pid, signal.SIGKILL)
    read_until(servers, "worker 0 is gone")
    joined = finish(job.start(*joining))
    assert joined.code == 0 and "this worker was started, and joins the run" in joined.stdout, joined
    ended = finish(servers)
    assert ended.code == 0 and f"done after step {steps}" in ended.stdout, ended


@pytest.mark.long
@pytest.mark.timeout(240)
def test_servers_that_are_started_by_themselves_go_on_from_their_snapshots(job: Job) -> None:
    """Both are killed, the leading one first; the run and its servers end as if nothing had been."""
    job.plan(workers=2, shards=2)
    steps = 150
    slow = JOB.replace('samples"', 'samples"\ndelay_s = 0.01').replace(f"total = {NUM_STEPS}", f"total = {steps}")
    job.write("job.toml", slow)
    servers, joining = job.serve()
    workers = [job.start(*joining), job.start(*joining, "--output", "other")]
    read_until(servers, "step ")
    pids = Path(f"/proc/{servers.pid}/task/{servers.pid}/children").read_text().split()
    processes = [pid for pid in pids if "weft.server.process" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(processes) == 2
    for pid in processes:
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(8)
    for one in [finish(worker) for worker in workers]:
        assert one.code == 0 and f"done: {steps} steps" in one.stdout, one
    ended = finish(servers)
    assert ended.code == 0 and f"done after step {steps} and {steps} updates" in ended.stdout, ended
    for number in (0, 1):
        assert f"server {number} was killed by signal 9; it is started again from its last snapshot" in ended.stderr


def test_a_job_that_is_another_one() -> None:
    job = parse_job(JOB.replace('plan = "plan.toml"', ""), source="job")
    described = shared_facts(job)
    require_same_job(job, {**described, "[axes] data": 2})
    require_same_job(job, {})
    with pytest.raises(JobError) as caught:
        require_same_job(job, {**described, "[steps] global_batch": 16, "[optimizer] schedule": "cosine"})
    assert len(caught.value.problems) == 2
    assert "[steps] global_batch is 8 here and 16 in the run that is to be joined" in str(caught.value)


LOOP = """
import functools

import torch
from torch import nn

import weft

inputs = torch.arange(96.0).view(32, 3) / 96
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
optimizer = functools.partial(torch.optim.SGD, lr=0.1)
with weft.parallelize(nn.Linear(3, 1), "plan.toml", loss=nn.functional.mse_loss, optimizer=optimizer) as trainer:
    for batch in weft.batches(dataset, trainer, global_batch=8, epochs=3):
        loss = trainer.step(*batch)
    print(f"step {trainer.steps_done}, worker {trainer.mesh.run.worker}, loss {float(loss):.6f}")
"""


@pytest.mark.long
def test_loops_of_ones_own_join_the_servers_of_a_plan(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One as a plain process, one by torchrun."""
    script = job.write("loop.py", LOOP)
    servers, joining = job.serve("--listen", "127.0.0.1")
    for name in ("join", "key"):
        monkeypatch.setenv(f"WEFT_{name.upper()}", joining[joining.index(f"--{name}") + 1])
    plain = job.start(module="loop")
    launched = job.start("--nproc-per-node", "1", script, module="torch.distributed.run")
    ended = [finish(one) for one in (plain, launched)]
    assert [one.code for one in ended] == [0, 0], ended
    said = sorted(one.stdout.strip().partition("step 12, worker ")[2] for one in ended)
    assert [one[:2] for one in said] == ["0,", "1,"] and said[0][3:] == said[1][3:], ended
    assert finish(servers).code == 0


@pytest.mark.long
def test_an_interrupt_ends_servers(job: Job) -> None:
    servers, _ = job.serve("--listen", "127.0.0.1:0")
    servers.send_signal(signal.SIGTERM)
    ended = finish(servers)
    assert ended.code == 130 and "servers are ended" in ended.stdout and ended.stderr == "", ended


def test_a_worker_with_the_key_of_another_job_never_joins(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    other = write_key(tmp_path / "other")
    options: dict[str, Any] = dict(most_frame_bytes=1 << 20, tcp_host="127.0.0.1", key_file=tmp_path / "key")
    with LocalServers(1, job="1-test", described={"[steps] total": 4}, **options) as servers:
        with pytest.raises(LaunchError, match=r"no server answers at tcp://127.*\(waited 1 s\).*key that of the same"):
            ask_run(servers.addresses[0], other, timeout_s=1.0)
        found = ask_run(servers.addresses[0], read_key(tmp_path / "key"), timeout_s=10.0)
        assert (found.job, found.worker, found.has_begun) == ("1-test", 0, False)
        assert found.described == {"[steps] total": 4}


Refuse = Callable[..., None]


@pytest.fixture
def refuse(run_here: Callable[..., Outcome], job: Job) -> Iterator[Refuse]:
    def run(*arguments: str | Path, says: str) -> None:
        outcome = run_here("train", "job.toml", *arguments)
        assert outcome.code == 2 and outcome.stdout == "", outcome
        assert outcome.stderr.count("weft:") == 1 and says in outcome.stderr and "Traceback" not in outcome.stderr

    yield run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--join", "ipc://x"], "--join goes with --role worker; add that, or leave --join out"),
        (["--servers", "0"], "--servers goes with --role server"),
        (["--key", "x"], "--key has no effect without --listen"),
        (["--role", "worker"], "give the address of its first server with --join"),
        (["--role", "worker", "--join", "ipc://x", "--listen", "h"], "--listen goes with --role server; leave it out"),
        (["--role", "worker", "--join", "ipc://x", "--ranks", "2"], "a worker of this plan has 1 ranks, not 2"),
        (["--role", "worker", "--join", "tcp://127.0.0.1:9"], "let nobody in without the job's key"),
        (["--role", "worker", "--join", "tcp://127.0.0.1:9", "--key", "no"], "cannot read the job's key no: No such"),
        (["--role", "server", "--servers", "1"], "names no servers of [server] shards = 1; give numbers from 0 to 0"),
        (["--role", "server", "--join", "ipc://x"], "is the address of server 0, which is started here"),
        (["--role", "server", "--ranks", "2"], "--role server starts no ranks; leave --ranks out"),
        (["--role", "server", "--listen", "0.0.0.0"], "stands for all of them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_flags_that_do_not_go_together(refuse: Refuse, arguments: list[str], says: str) -> None:
    refuse(*arguments, says=says)


def test_servers_that_cannot_be(refuse: Refuse, job: Job) -> None:
    job.plan(shards=2)
    refuse("--role", "server", "--servers", "1", says="--servers 1 is led by server 0, which is elsewhere")
    job.plan(more='mode = "bounded"\nbackups = 2\n')
    refuse("--role", "server", says="[server] backups = 2 has no effect with [server] mode")
    job.plan(more="backups = 2\n")
    refuse("--role", "server", says="[server] backups = 2 leaves none of the 2 workers to wait for")
    job.plan(more="staleness = 2\n")
    refuse("--role", "server", says='[server] staleness = 2 has no effect with [server] mode = "sync"')
    job.write("plan.toml", '[axes]\ndata = "all"\n[data]\nsync = "server"\n')
    refuse("--role", "server", says='[axes] data = "all" says how many workers a run begins with')
    job.write("plan.toml", "[axes]\ndata = 2\n")
    refuse("--role", "server", says='--role server has no effect without [data] sync = "server"')
    refuse("--listen", "127.0.0.1", says='--listen has no effect without [data] sync = "server"')


def test_addresses_and_keys_that_cannot_be(refuse: Refuse, job: Job) -> None:
    flags = ("--role", "server", "--listen", "192.0.2.1:5000")
    refuse(*flags, says="server 0 cannot listen at tcp://192.0.2.1:5000: Cannot assign requested address")
    (job.folder / "key").write_text("{}")
    (job.folder / "key").chmod(0o644)
    refuse("--role", "server", "--listen", "127.0.0.1", "--key", "key", says="can be read by others (mode 644")
    (job.folder / "key").chmod(0o600)
    refuse("--role", "server", "--listen", "127.0.0.1", "--key", "key", says="key is no key of a job")


def test_a_server_that_nobody_answers_at(refuse: Refuse, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    write_key(job.folder / "key")
    monkeypatch.setattr("weft.launch_servers.JOIN_TIMEOUT_S", 0.5)
    job.plan(shards=2)
    flags = ("--role", "server", "--servers", "1", "--join", "tcp://127.0.0.1:9", "--key", "key")
    refuse(*flags, says="no server answers at tcp://127.0.0.1:9 (waited 0.5 s)")
    assert json.loads((job.folder / "key").read_text())
