"""The codecs in Triton's kernels send and keep what those in torch's functions do, where Triton is."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from weft.codecs.base import Bucket
from weft.codecs.kept import Kept
from weft.codecs.make import find_fused, make_codec
from weft.codecs.triton_kernels.tables import Numbers, Table, Turns
from weft.plan.exchange.codec_memory import kernel_bytes
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.gpu_scratch import scratch_bytes
from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", ["topk", "dgc", "onebit", "powersgd"])
def test_what_kernels_allocate_is_predicted(name: str) -> None:
    from weft.codecs.fused import FUSED

    shapes, tensors, offset = ((300, 1_000), (64, 4_096), (7, 50_001), (4_000, 9)), [], 0
    for place, shape in enumerate(shapes):
        tensors.append(CodedTensor(name=str(place), shape=shape, offset=offset, numel=math.prod(shape)))
        offset += math.prod(shape)
    section = CodecSection(name=name)
    bucket = Bucket(
        codec=section, tensors=tuple(tensors), numel=offset, dtype=torch.float32, device=CPU, replica=0, num_replicas=2
    )
    codec = FUSED[name](bucket)
    kernels = codec._kernels  # type: ignore[attr-defined]
    owners = [kernels, *(vars(kernels)[one] for one in ("_of_samples", "_of_noted") if hasattr(kernels, one))]
    found = [tensor for owner in owners for tensor in vars(owner).values() if isinstance(tensor, torch.Tensor)]
    found += codec._means.pair if name == "onebit" else ()  # type: ignore[attr-defined]
    assert sum(one.nbytes for one in found) == scratch_bytes(section, tensors, "float32", num_copies=2)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", ["topk", "dgc", "onebit", "sign", "qsgd", "terngrad", "powersgd"])
def test_codecs_of_parts_without_a_whole_row(name: str) -> None:
    """Under ZeRO a rank may have less than a row of a wide matrix."""
    from weft.codecs.fused import FUSED

    tensors = (CodedTensor(name="a", shape=(4, 4_096), offset=0, numel=1_000, start=500),)
    bucket = Bucket(
        codec=CodecSection(name=name),
        tensors=tensors,
        numel=1_000,
        dtype=torch.float32,
        device=CPU,
        replica=0,
        num_replicas=2,
    )
    assert FUSED[name](bucket).begin(0)[0].numel > 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.long
def test_what_another_plan_kept_of_a_rest_is_sent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import test_triton; test_triton.compare_rests()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compare_rests() -> None:
    """Exchanges of kernels and of torch's functions, from a state in which something is kept of elements that fill no
    row. The first does not count, and from the third on only the device knows whether one does."""
    from weft.codecs.fused import FUSED

    tensors = (CodedTensor(name="a", shape=(9, 8), offset=0, numel=43),)
    given = torch.randn(7, 43, generator=torch.Generator().manual_seed(0))
    for name in ("onebit", "powersgd"):
        bucket = Bucket(
            codec=CodecSection(name=name, rank=2),
            tensors=tensors,
            numel=43,
            dtype=torch.float32,
            device=CPU,
            replica=0,
            num_replicas=2,
        )
        results = []
        for codec in (make_codec(bucket), FUSED[name](bucket)):
            codec.tensors()["residual/a"].copy_(given[0])
            found = []
            for step in range(6):
                values = given[step + 1].clone()
                for number, message in enumerate(codec.begin(step, keep=0.5)):
                    sent = torch.zeros(message.numel, dtype=getattr(torch, message.dtype))
                    codec.encode(number, values, sent, torch.zeros(1))
                    received = sent * 2 if message.adds_up else torch.stack([sent, sent])
                    codec.decode(number, received, values)
                codec.end(step > 0 if step < 2 or not results else torch.tensor(1.0))
                found.append(values)
            results.append([*found, codec.tensors()["residual/a"]])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
        assert not results[1][-1][40:].any()


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


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "has_kernels"),
    [
        ("cuda", torch.float32, (2, 2), True),
        ("cpu", torch.float32, (2, 2), False),
        ("cuda", torch.float64, (2, 2), False),
        ("cuda", torch.float32, (2, 2**27 + 1), False),
    ],
)
def test_what_has_kernels(device: str, dtype: torch.dtype, shape: tuple[int, int], has_kernels: bool) -> None:
    """Not CPUs, double precision, nor matrices so wide that eight rows have more places than 32 bits tell apart."""
    bucket = Bucket(
        codec=CodecSection(name="sign"),
        tensors=(CodedTensor(name="a", shape=shape, offset=0, numel=math.prod(shape)),),
        numel=math.prod(shape),
        dtype=dtype,
        device=torch.device(device),
        replica=0,
        num_replicas=2,
    )
    with mock.patch("weft.codecs.make._fused_codecs", lambda: {"sign": make_codec}):
        assert (find_fused(bucket) is not None) == has_kernels


@pytest.mark.parametrize(
    ("name", "least", "most"), [("topk", 0.15, 0.17), ("onebit", 0.7, 0.9), ("powersgd", 0.4, 0.6)]
)
def test_bytes_of_kernels_per_element(name: str, least: float, most: float) -> None:
    """A matrix of four million elements, as a bucket has. Nothing on the host, nor where there are no kernels."""
    numel = 2_048 * 2_048
    tensors = (CodedTensor(name="a", shape=(2_048, 2_048), offset=0, numel=numel),)
    values, groups = CodedValues(tensors=tensors, numel=numel, dtype="float32"), CodecGroups(num_across=2)
    of_kind = {
        kind: kernel_bytes([values], CodecSection(name=name, rank=4), groups, num_copies=2, device=kind)
        for kind in ("cpu", "cuda")
    }
    assert of_kind["cpu"] == 0 and least < of_kind["cuda"] / numel < most
    assert scratch_bytes(CodecSection(name=name, rank=4), tensors, "float64", num_copies=2) == 0
    assert scratch_bytes(CodecSection(name="powersgd", rank=9), tensors, "float32", num_copies=2) == 0
