"""The order of blocks in which the kernels of LARS and LAMB go through tensors, and these kernels where Triton is."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.optim.block_jobs import COUNTED, NUM_FIELDS, SECOND, BlockJobs, flat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lag", [0, 1, 3, 100])
def test_a_tensors_second_pass_comes_after_its_first(lag: int) -> None:
    jobs = BlockJobs([10, 0, 3, 25], [None] * 4, block=4)
    order = jobs.interleaved(lag=lag)
    assert sorted(order) == sorted([*jobs.first, *jobs.second])
    for tensor, (begin, end) in enumerate(itertools.pairwise(jobs.ends)):
        places = {
            flag: [n for n, job in enumerate(order) if (job[0], job[4] & SECOND) == (tensor, flag)] for flag in (0, 1)
        }
        assert len(places[0]) == len(places[1]) == end - begin
        assert max(places[0], default=-1) < min(places[1], default=0)
    assert jobs.ends == [0, 3, 3, 4, 11]
    if lag == 1:  # drawn: tensor and pass
        drawn = "".join(f"{job[0]}{'ab'[job[4] & SECOND]} " for job in order)
        assert drawn == "0a 0a 0a 2a 0b 0b 0b 3a 2b 3a 3a 3a 3a 3a 3a 3b 3b 3b 3b 3b 3b 3b "


def test_blocks_end_where_counting_begins_or_ends() -> None:
    jobs = BlockJobs([10, 6, 5], [((0, 2), (7, 9)), (), None], block=4)
    assert [job[:3] for job in jobs.first if job[4] & COUNTED] == [(0, 0, 2), (0, 7, 9), (2, 0, 4), (2, 4, 5)]
    covered = [(tensor, entry) for tensor, start, stop, _, _ in jobs.first for entry in range(start, stop)]
    assert covered == [(tensor, entry) for tensor, numel in enumerate((10, 6, 5)) for entry in range(numel)]
    assert len(flat(jobs.first)) == NUM_FIELDS * len(jobs.first)


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
