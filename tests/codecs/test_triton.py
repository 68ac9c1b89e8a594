"""The codecs in Triton's kernels send and keep what those in torch's functions do, where Triton is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.codecs.base import Bucket
from weft.codecs.kept import Kept
from weft.codecs.make import find_fused
from weft.codecs.triton_kernels.tables import Numbers, Table, Turns
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Codec as CodecSection

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.long
@pytest.mark.timeout(300)
def test_kernels_equal_torchs_functions() -> None:
    """In Triton's interpreter, which reads its variable when it is imported: in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "gpu_codecs.py"), "--interpreter"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and done.stdout.count(": equal") == 8, done.stdout + done.stderr


def test_tables_say_which_part_of_which_tensor_a_program_has() -> None:
    table = Table([2, 0, 3], [[10, 1], [20, 2], [30, 3]], CPU)
    assert table.num_programs == 5 and table.width == 3
    assert table.tensor_of.tolist() == [0, 0, 2, 2, 2]
    assert table.fields.tolist() == [[0, 10, 1], [2, 20, 2], [2, 30, 3]]


def test_kernels_are_given_the_copy_that_counts() -> None:
    kept, turns = Kept(1, torch.float32, CPU, can_fail=True), Turns(CPU)
    kept.end(True)
    first, second, turn = turns(kept)
    assert first is kept.pair[1] and second is kept.pair[0] and turn.tolist() == [0]
    kept.end(torch.tensor(1.0))
    first, second, turn = turns(kept)
    assert first is kept.pair[0] and turn.tolist() == [0]
    kept.end(torch.tensor(1.0))
    assert turns(kept)[0] is kept.pair[0] and turns(kept)[2].tolist() == [1]


def test_numbers_are_made_once_and_forgotten_where_they_always_change() -> None:
    numbers = Numbers(CPU)
    assert numbers.float64(0.5, 0.5) is numbers.float64(0.25) and numbers.float64(0.25).tolist() == [0.25]
    for step in range(100):
        assert numbers.float64(1.0 / (step + 1)).tolist() == [1.0 / (step + 1)]
    assert len(numbers._made) < 20
    assert numbers.float64(torch.tensor(0.5), 0.5).tolist() == [0.25]


def test_cpus_and_double_precision_have_no_kernels() -> None:
    tensors = (CodedTensor(name="a", shape=(2, 2), offset=0, numel=4),)
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float64)):
        bucket = Bucket(
            codec=CodecSection(name="sign"),
            tensors=tensors,
            numel=4,
            dtype=dtype,
            device=torch.device(device),
            replica=0,
            num_replicas=2,
        )
        assert find_fused(bucket) is None
