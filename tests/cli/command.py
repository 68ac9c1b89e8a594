"""A tiny job, the real command in a process of its own, and how to look at what a run left on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOTAL_STEPS = 60
SAVE_EVERY = 10

SAMPLES = '''"""The corpus as a dataset that takes its time and says which process reads it."""

import os
import time
from pathlib import Path

from weft.training.data.datasets import TokenWindows, split_held_out, text_files

HERE = Path(__file__).parent


class Slow(TokenWindows):
    delay_s = 0.0

    def take(self, indices):
        time.sleep(self.delay_s)
        return super().take(indices)


def slowly(*, delay_s, pids):
    if "RANK" in os.environ:
        written = Path(pids) / f".{os.getpid()}"
        written.write_text(str(os.getpid()))
        written.rename(Path(pids) / os.environ["RANK"])  # at once: a reader never finds an empty file
    train, held_out = split_held_out(text_files(HERE / "corpus.txt"), 0.1, 16)
    train = Slow(train, 16)
    train.delay_s = delay_s
    return train, TokenWindows(held_out, 16)
'''


def job_text(folder: Path, *, dataset: str, changes: str = "") -> str:
    return f"""
[model]
name = "gpt"
num_layers = 1
hidden = 32
heads = 2
context = 16
dropout = 0.1
[dataset]
{dataset}
[optimizer]
name = "adamw"
lr = 0.003
schedule = "warmup-cosine"
warmup_steps = 4
[steps]
total = {TOTAL_STEPS}
global_batch = 8
save_every = {SAVE_EVERY}
evaluate_every = 20
evaluate_batches = 2
{changes}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A folder with a corpus, a module that reads it slowly, and a job file."""

    folder: Path
    job: Path

    def slow_job(self, folder: Path, *, delay_s: float = 0.03) -> Path:
        """The same job at a speed that leaves time to interfere; its ranks write their ids under `folder`/pids."""
        (folder / "pids").mkdir()
        dataset = f'name = "weft_cli_samples:slowly"\ndelay_s = {delay_s}\npids = "{folder / "pids"}"'
        path = folder / "slow.toml"
        path.write_text(job_text(self.folder, dataset=dataset))
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def start(*arguments: str | Path, folder: Path, module: str = "weft.cli.main") -> subprocess.Popen[str]:
    """The real command, in a session of its own so that a whole process group can be signalled."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_torchrun(*arguments: str | Path, folder: Path, max_restarts: int = 0) -> subprocess.Popen[str]:
    """The command on two ranks of torchrun."""
    flags = ("--nproc-per-node", "2", "--max-restarts", str(max_restarts), "-m", "weft.cli.main")
    return start(*flags, *arguments, folder=folder, module="torch.distributed.run")


def finish(process: subprocess.Popen[str], *, timeout_s: float = 100.0) -> Outcome:
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Outcome(code=process.returncode, stdout=stdout, stderr=stderr)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses_of(directory: Path) -> dict[int, float]:
    """Loss by step. A step that has two lines is an error."""
    found: dict[int, float] = {}
    for line in lines_of(directory):
        if "loss" in line:
            assert line["step"] not in found
            found[line["step"]] = line["loss"]
    return found


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but the ranks' own."""
    return {
        f"{path.name.split('-')[0]} {name}": tensor
        for path in sorted(checkpoint.glob("*-of-*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_run(directory: Path, reference: Path) -> None:
    """The same losses, weights and optimizer state to the last bit."""
    assert losses_of(directory) == losses_of(reference)
    mine, theirs = (tensors_of(each / "checkpoints" / f"step-{TOTAL_STEPS}") for each in (directory, reference))
    assert mine.keys() == theirs.keys() and mine
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


def wait_for_step(directory: Path, step: int, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while max(losses_of(directory), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached in {timeout_s} s"
        time.sleep(0.01)
