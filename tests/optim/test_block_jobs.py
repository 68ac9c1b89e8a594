"""The blocks in which the kernels of LARS and LAMB go through tensors, and these kernels where Triton is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.optim.block_jobs import NUM_FIELDS, BlockJobs, flat

ROOT = Path(__file__).parents[2]


def test_blocks_end_where_counting_begins_or_ends() -> None:
    made = BlockJobs([10, 6, 0, 5], [((0, 2), (7, 9)), (), None, None], block=4)
    assert [job[:3] for job in made.jobs if job[3]] == [(0, 0, 2), (0, 7, 9), (3, 0, 4), (3, 4, 5)]
    covered = [(tensor, entry) for tensor, start, stop, _ in made.jobs for entry in range(start, stop)]
    assert covered == [(tensor, entry) for tensor, numel in enumerate((10, 6, 0, 5)) for entry in range(numel)]
    assert made.ends == [0, 5, 7, 7, 9]
    assert len(flat(made.jobs)) == NUM_FIELDS * len(made.jobs)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_equal_torchs_functions() -> None:
    """In Triton's interpreter, which reads its variable when it is imported: in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "optimizers.py"), "--check"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.count(": equal") == 6, done.stdout + done.stderr
