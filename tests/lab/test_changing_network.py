"""A network that becomes slow, and fast again: `[data] delay = "auto"` follows it, alike on all ranks, and says so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated import needs_lab, run_script

SCRIPT = """
import functools, json, os, subprocess, sys, time
import torch
from torch import nn
from weft.plan.plan import Axes, Data, Plan
from weft.training.parallelize import parallelize

SLOW = "replace dev weft0 root tbf rate 5mbit burst 100kb latency 4s"
plan = Plan(axes=Axes(data=2), data=Data(sync="delayed", every=20, delay="auto"))
model = nn.Sequential(nn.Linear(32, 1000), nn.Linear(1000, 16))
optimizer = functools.partial(torch.optim.SGD, lr=0.01)
trainer = parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, device="cpu")

def steps_until(is_found, most):
    for step in range(most):
        time.sleep(0.02)
        trainer.step(torch.ones(4, 32), torch.zeros(4, dtype=torch.int64))
        if is_found(trainer.sync.delay):
            return True
    return False

steps_until(lambda delay: False, 100)
near = trainer.sync.delay
subprocess.run(["tc", "qdisc", *SLOW.split()], check=True)
grew = steps_until(lambda delay: delay > max(near, 2), 600)
steps_until(lambda delay: False, 200)
far = trainer.sync.delay
subprocess.run(["tc", "qdisc", "del", "dev", "weft0", "root"], check=True)
shrank = steps_until(lambda delay: delay < far, 1500)
found = {"near": near, "far": far, "grew": grew, "shrank": shrank, "changes": trainer.sync.auto.changes}
print(json.dumps(found), flush=True)
trainer.close()
"""

can_limit = shutil.which("tc") is not None and not subprocess.run(["tc", "qdisc"], capture_output=True).returncode


@needs_lab
@pytest.mark.skipif(not can_limit, reason="tc of iproute2 limits the rate of a host")
@pytest.mark.long
def test_the_delay_follows_the_network_alike_on_all_ranks(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT, "--hosts", "2", "--bandwidth", "1Gbit", "--delay", "1ms")
    assert ended.code == 0, ended.stderr
    first, second = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    assert first == second, "ranks decide alike"
    assert first["grew"] and first["shrank"] and first["far"] > first["near"]
    step, delay = first["changes"][-1]
    assert f"[data] delay: from {first['far']} to {delay} after step {step}, because " in ended.stderr
    assert ended.stderr.count("[data] delay: from ") == len(first["changes"]), "each change is told, once"
