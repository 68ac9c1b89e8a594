"""The compiled loops of onebit, sign, qsgd and terngrad give the bits of torch's operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from weft.codecs import quantised
from weft.codecs.base import Bucket, Codec
from weft.codecs.make import make_codec
from weft.codecs.native.quantised import find_loops
from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors
from weft.plan.plan import Codec as CodecSection

SHAPES = ((1, 1), (1, 700), (3, 64), (7, 8), (8, 9), (64, 72), (65, 333), (100, 1), (129, 264), (300, 2, 3), (2, 1100))
NUM_REPLICAS = 3
CODECS = (("onebit", 256), ("sign", 256), ("terngrad", 256), ("qsgd", 4), ("qsgd", 16), ("qsgd", 256))


def tensors_of(shapes: tuple[tuple[int, ...], ...]) -> tuple[CodedTensor, ...]:
    """Of each shape a whole tensor, and a range that fills no last row."""
    return coded_tensors(
        [
            (f"{shape}-{cut}", shape, cut, math.prod(shape) - cut)
            for shape in shapes
            for cut in (0, 3)
            if math.prod(shape) > cut
        ]
    )


def exchange(codecs: list[Codec], replicas: list[Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
    """All messages, and the values and residuals after the exchange."""
    messages, results = [], []
    for codec, given in zip(codecs, replicas, strict=True):
        (form,) = codec.begin(step, keep=0.75)
        message, not_finite = torch.full((form.numel,), 255, dtype=torch.uint8), torch.zeros(1)
        codec.encode(0, given.clone(), message, not_finite)
        assert not_finite.item() == 0
        messages.append(message)
    received = torch.stack(messages)
    for codec, given in zip(codecs, replicas, strict=True):
        values = given.clone()
        codec.decode(0, received, values, scale=0.3)
        codec.end(True)
        results += [values, *codec.tensors().values()]
    return received, [one.clone() for one in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "levels"), CODECS)
def test_compiled_loops_give_the_same_bits(
    name: str, levels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_loops(dtype) is None:
        pytest.skip("needs a C compiler")
    tensors = tensors_of(SHAPES)
    numel = tensors[-1].offset + tensors[-1].numel
    buckets = [
        Bucket(
            codec=CodecSection(name=name, levels=levels), tensors=tensors, numel=numel, dtype=dtype,
            device=torch.device("cpu"), replica=replica, num_replicas=NUM_REPLICAS,
        )
        for replica in range(NUM_REPLICAS)
    ]  # fmt: skip
    compiled, plain = ([make_codec(bucket) for bucket in buckets] for _ in range(2))
    for step in range(2):
        replicas = [torch.randn(numel, dtype=dtype) for _ in range(NUM_REPLICAS)]
        for given in replicas:
            given[torch.rand(numel) < 0.1] = 0.0
            given[torch.rand(numel) < 0.1] = -0.0
        replicas[0][: numel // 2] = 0.0  # whole blocks and tensors
        replicas[1][: numel // 2] = -0.0
        found = exchange(compiled, replicas, step)
        with monkeypatch.context() as patch:
            patch.setattr(quantised, "find_loops", lambda dtype: None)
            expected = exchange(plain, replicas, step)
        assert torch.equal(found[0], expected[0])
        for one, other in zip(found[1], expected[1], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("name", ["onebit", "sign", "terngrad", "qsgd"])
@pytest.mark.parametrize("num_replicas", [1, 2, 16, 35])
def test_any_number_of_messages_is_added_in_the_same_order(
    name: str, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_loops(torch.float32) is None:
        pytest.skip("needs a C compiler")
    tensors = tensors_of(((9, 33), (4, 128)))
    numel = tensors[-1].offset + tensors[-1].numel
    codec = make_codec(
        Bucket(
            codec=CodecSection(name=name), tensors=tensors, numel=numel, dtype=torch.float32,
            device=torch.device("cpu"), replica=0, num_replicas=num_replicas,
        )
    )  # fmt: skip
    (form,) = codec.begin(0)
    received = torch.zeros(num_replicas, form.numel, dtype=torch.uint8)
    for message in received:
        codec.encode(0, torch.randn(numel), message, torch.zeros(1))
    found, expected = torch.zeros(numel), torch.zeros(numel)
    codec.decode(0, received, found, scale=0.7)
    monkeypatch.setattr(quantised, "find_loops", lambda dtype: None)
    codec.decode(0, received, expected, scale=0.7)
    assert torch.equal(found, expected)
    assert found.abs().max() > 0
