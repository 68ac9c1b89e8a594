"""Laws of the 16-bit codec: exact on what it can represent, an error of at most 0.4 %, equal means on all replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.codecs.base import Bucket
from weft.codecs.half import Half
from weft.codecs.make import make_codec
from weft.plan.exchange.coded_tensor import coded_tensors
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.plan import Codec
from weft.sync.in_process import exchange_in_process


def bucket(numel: int, dtype: torch.dtype = torch.float32, *, replica: int = 0, num_replicas: int = 1) -> Bucket:
    return Bucket(
        codec=Codec(name="half"),
        tensors=coded_tensors([("weight", (numel,), numel)]),
        numel=numel,
        dtype=dtype,
        device=torch.device("cpu"),
        replica=replica,
        num_replicas=num_replicas,
    )


def exchange(replicas: list[Tensor]) -> list[Tensor]:
    """The means of all replicas after an exchange, played in one process."""
    size = len(replicas)
    codecs = [make_codec(bucket(len(one), one.dtype, replica=k, num_replicas=size)) for k, one in enumerate(replicas)]
    values = [one.clone() for one in replicas]
    exchange_in_process(codecs, values, step=0, scale=1 / size)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_exact_on_what_16_bits_hold(dtype: torch.dtype) -> None:
    replicas = [torch.tensor([1.0, -0.5, 3e38, 0.0]).to(dtype), torch.tensor([3.0, 0.5, -3e38, 0.0]).to(dtype)]
    replicas = [one.bfloat16().to(dtype) for one in replicas]
    expected = torch.stack(replicas).mean(0)
    for values in exchange(replicas):
        assert values.dtype == dtype
        assert torch.equal(values, expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_the_error_is_relative_at_any_size_of_the_values(scale: float) -> None:
    (values,) = exchange([given := torch.randn(1000) * scale])
    assert ((values - given).abs() <= given.abs() / 256).all()
    assert not torch.equal(values, given)


def test_replicas_end_with_the_same_bits() -> None:
    first, *others = exchange([torch.randn(100) for _ in range(3)])
    assert all(torch.equal(first, other) for other in others)


def test_the_message_is_the_one_that_the_wire_counts() -> None:
    one = bucket(10, torch.float64)
    (message,) = Half(one).begin(0)
    assert messages_of(Codec(name="half"), one.tensors, "float64", num_replicas=4, step=0) == (message,)
    assert (message.num_bytes, message.sent_bytes(4), message.sent_bytes(1)) == (20, 30, 0)
    gathered = Message(numel=10, dtype="bfloat16", adds_up=False)
    assert (gathered.sent_bytes(4), gathered.sent_bytes(1)) == (60, 0)
    (dense,) = messages_of(Codec(), one.tensors, "float64", num_replicas=4, step=0)
    assert (dense.num_bytes, dense.dtype, dense.adds_up) == (80, "float64", True)


def test_nothing_is_kept() -> None:
    assert Half(bucket(3)).tensors() == {}
