"""Laws of the 16-bit codec: exact on what it can represent, an error of at most 0.4 %, equal means on all replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.codecs.half import Half
from weft.codecs.make import make_codec
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.plan import Codec, Plan


def exchange(replicas: list[Tensor]) -> list[Tensor]:
    """The values of all replicas after an exchange, played in one process."""
    codecs = [make_codec(Plan(codec=Codec(name="half")), values.numel()) for values in replicas]
    values = [one.clone() for one in replicas]
    for number, form in enumerate(codecs[0].messages):
        messages = [torch.empty(form.numel, dtype=getattr(torch, form.dtype)) for _ in replicas]
        for codec, own, message in zip(codecs, values, messages, strict=True):
            codec.encode(number, own, message)
        assert all(torch.equal(own, given) for own, given in zip(values, replicas, strict=True))
        for codec, own in zip(codecs, values, strict=True):
            codec.decode(number, sum(messages), len(replicas), own)
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
    (message,) = Half(10).messages
    assert message == messages_of(Codec(name="half"), 10, "float64")[0]
    assert (message.num_bytes, message.sent_bytes(4), message.sent_bytes(1)) == (20, 30, 0)
    gathered = Message(numel=10, dtype="bfloat16", adds_up=False)
    assert (gathered.sent_bytes(4), gathered.sent_bytes(1)) == (60, 0)
    (dense,) = messages_of(Codec(), 10, "float64")
    assert (dense.num_bytes, dense.dtype, dense.adds_up) == (80, "float64", True)


def test_nothing_is_kept_and_no_codec_is_none() -> None:
    codec = Half(3)
    codec.encode(0, torch.ones(3), torch.empty(3, dtype=torch.bfloat16))
    assert codec.state() == {}
    assert make_codec(Plan(), 3) is None
