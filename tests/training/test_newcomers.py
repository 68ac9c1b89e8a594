"""The newcomers' scripts give one process's losses under four plans each, and run as their first lines say."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6
DATA, ZERO_1, ZERO_3 = (
    f'[axes]\ndata = "all"\n[data]\nshard = "{shard}"\n' for shard in ("nothing", "optimizer", "parameters")
)
PIPELINE = "[axes]\npipeline = 2\n"
PLANS = {
    "newcomer_gpt": {
        "data, clipped": f"{DATA}[step]\nclip_norm = 1.0\n",
        "ZeRO-3": ZERO_3,
        "pipeline": f"{PIPELINE}[step]\nmicrobatches = 4\n",
        "tensor": "[axes]\ntensor = 2\n",
    },
    "newcomer_resnet": {
        "data": DATA,
        "ZeRO-3": ZERO_3,
        "pipeline": PIPELINE,
        "rows": "[axes]\nring = 2\n",
    },
    "newcomer_dict_batches": {
        "data": DATA,
        "ZeRO-1, microbatches": f"{ZERO_1}[step]\nmicrobatches = 2\n",
        "ZeRO-3": ZERO_3,
        "full recomputation": f'{DATA}[recompute]\npolicy = "full"\n',
    },
}
CASES = [(script, name) for script, plans in PLANS.items() for name in plans]


def run(script: str, plan: Path, steps: int = STEPS) -> torch.Tensor:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return torch.tensor(importlib.import_module(script).main(plan, steps=steps), dtype=torch.float64)


@functools.cache
def alone(script: str, clipped: bool, folder: Path) -> list[float]:
    plan = folder / "alone.toml"
    plan.write_text("[step]\nclip_norm = 1.0\n" if clipped else "")
    return run(script, plan).tolist()


@ranks(2)
def check_on_two(script: str, plan: Path, expected: list[float]) -> None:
    torch.testing.assert_close(run(script, plan), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2, long=3)
@pytest.mark.parametrize(("script", "name"), CASES, ids=[f"{script}, {name}" for script, name in CASES])
def test_a_newcomers_script_gives_the_losses_of_one_process(script: str, name: str, tmp_path: Path) -> None:
    text, plan = PLANS[script][name], tmp_path / "plan.toml"
    plan.write_text(text)
    check_on_two(script=script, plan=plan, expected=alone(script, "clip_norm" in text, tmp_path))


def test_a_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    script = "newcomer_dict_batches"
    whole = alone(script, clipped=False, folder=tmp_path)
    main = importlib.import_module(script).main
    plan, checkpoint = tmp_path / "alone.toml", tmp_path / "checkpoint"
    first, second = (main(plan, checkpoint, steps=STEPS // 2) for _ in range(2))
    assert first[:-2] + second == whole, "three steps and three more are six"


@pytest.mark.long
def test_a_script_runs_by_torchrun_as_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(EXAMPLES / "newcomer_gpt.py"), str(EXAMPLES / "plans" / "zero.toml")],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    said = [line.split(": loss ") for line in result.stdout.splitlines()]
    assert [step for step, _ in said] == [f"step {number}" for number in (10, 20, 30, 40, 50)], "once, by one rank"
    assert float(said[-1][1]) < float(said[0][1])
