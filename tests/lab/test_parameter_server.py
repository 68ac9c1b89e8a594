"""Three emulated hosts: servers on one, workers on the others, started by themselves and by torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from emulated import needs_lab, run_script

pytestmark = [needs_lab, pytest.mark.long, pytest.mark.timeout(240)]

STEPS = 20
PREPARE = f"""
import os, runpy, subprocess, sys, time
from pathlib import Path

host, here = int(os.environ["WEFT_LAB_HOST"]), Path(sys.argv[1])
address = os.environ["WEFT_LAB_ADDRESS"]
os.chdir(here)
JOB = '''
plan = "plan.toml"
[model]
name = "gpt"
num_layers = 1
hidden = 32
heads = 2
context = 16
[dataset]
name = "text"
files = "corpus.txt"
held_out = 0.1
[optimizer]
name = "adamw"
lr = 0.003
schedule = "constant"
[steps]
total = {STEPS}
global_batch = 8
save_every = 0
'''

def weft(*arguments, module=("weft",)):
    return subprocess.run([sys.executable, "-m", *module, "train", "job.toml", *arguments]).returncode
"""
BY_ROLE = f"""{PREPARE}
key = here / "job.key"
if host == 0:
    sys.exit(weft("--role", "server", "--listen", f"{{address}}:5000", "--key", key))
while not key.exists():
    time.sleep(0.1)
time.sleep(5)
join = ("--role", "worker", "--join", "tcp://host0:5000", "--key", key)
sys.exit(weft(*join, "--output", f"run-{{host}}"))
"""
BY_TORCHRUN = f"""{PREPARE}
flags = ("--listen", address) if host == 0 else ()
torchrun = ("torch.distributed.run", "-m", "weft")
sys.exit(weft("--key", "job.key", *flags, "--output", "run", module=torchrun))
"""
PLAN = '[axes]\ndata = {workers}\n[data]\nsync = "server"\n[server]\nshards = 2\n'


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, *, workers: int) -> None:
    (folder / "corpus.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300)))
    (folder / "job.toml").write_text(PREPARE.split("'''")[1])
    (folder / "plan.toml").write_text(PLAN.format(workers=workers))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def losses_of(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_servers_on_one_host_and_workers_on_two_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch, workers=2)
    flags = ("--hosts", "3", "--delay", "2ms", "--per-host")
    ended = run_script(tmp_path, BY_ROLE, *flags, words=[str(tmp_path)])
    assert ended.code == 0, ended
    assert "server 0 listens at tcp://10." in ended.stdout and "all workers have ended" in ended.stdout
    assert f"after step {STEPS}" in ended.stdout
    (written,) = [path for path in tmp_path.glob("run-*") if (path / "metrics.jsonl").exists()]
    losses = losses_of(written)
    assert len(losses) == STEPS and losses[-1] < losses[0]
    for worker in (1, 2):
        weights_bytes = 4 * 20_000
        assert ended.pair(0, worker)["bytes"] > STEPS * weights_bytes / 2
        assert ended.pair(worker, 0)["bytes"] > STEPS * weights_bytes / 2
    assert ended.pair(1, 2)["bytes"] < 10_000, "workers know nothing of each other"


def test_torchrun_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch, workers=2)
    ended = run_script(tmp_path, BY_TORCHRUN, "--hosts", "2", "--per-host", words=[str(tmp_path)])
    assert ended.code == 0, ended
    losses = losses_of(tmp_path / "run")
    assert len(losses) == STEPS and losses[-1] < losses[0]
