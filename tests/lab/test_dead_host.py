"""A host that cannot be reached any more is named while the others wait for it, long before its connection is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated import needs_lab, run_script

SCRIPT = """
import functools, os, subprocess, time
import torch
from torch import nn
from weft.comm.failures import watch
from weft.comm.failures.limits import Limits
from weft.plan.plan import Axes, Comm, Plan
from weft.training.parallelize import parallelize

watch.limits = Limits(slack_s=1.0)
plan = Plan(axes=Axes(data=2), comm=Comm(timeout_s=6.0))
optimizer = functools.partial(torch.optim.SGD, lr=0.1)
trainer = parallelize(nn.Linear(8, 4), plan, loss="cross-entropy", optimizer=optimizer, device="cpu")
for step in range(100):
    if step == 6 and os.environ["RANK"] == "1":
        subprocess.run(["ip", "link", "set", "weft0", "down"], check=True)
        print("cut off", flush=True)
        time.sleep(1000)
    trainer.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
"""


@needs_lab
@pytest.mark.long
def test_a_host_that_is_cut_off_is_named(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT, "--hosts", "2")
    assert "cut off" in ended.stdout and ended.code != 0
    told, last, _ = (line for line in ended.stderr.splitlines() if line.startswith("weft: "))  # and the lab itself
    for line in (told, last):
        assert " along data/gradients, ranks 0, 1), in trainer.step (" in line
        assert "rank 1: does not answer (on " in line and "it is stopped, or its host cannot be reached" in line
    assert told.endswith("; the run keeps waiting") and " failed, and ends this run: rank 0 has waited " in last
