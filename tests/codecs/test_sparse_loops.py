"""The compiled loops of topk and dgc against torch's operations, to the bit; and a GPU that nobody waits for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend_gpu import no_waits, pretended_gpu
from torch import Tensor

from weft.codecs import sparse
from weft.codecs.base import Bucket
from weft.codecs.dgc import Dgc
from weft.codecs.formats import sparse_message
from weft.codecs.make import make_codec
from weft.codecs.topk import TopK
from weft.plan.exchange.coded_tensor import coded_tensors
from weft.plan.exchange.sparse import sparse_layout
from weft.plan.plan import Codec

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
BOTH = pytest.mark.parametrize("name", ["topk", "dgc"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
STRIDED = 270_000
"""A tensor of which every 65th element is sampled."""


def make(name: str, numels: list[int], dtype: torch.dtype, can_fail: bool = True, **settings: Any) -> TopK | Dgc:
    tensors = coded_tensors([(f"weight{number}", (1, numel), numel) for number, numel in enumerate(numels)])
    codec = make_codec(
        Bucket(
            codec=Codec(**{"name": name, "memory": 0.9, "density": 0.01} | settings),
            tensors=tensors,
            numel=sum(numels),
            dtype=dtype,
            device=torch.device("cpu"),
            replica=1,
            num_replicas=2,
            can_fail=can_fail,
        )
    )
    assert isinstance(codec, TopK | Dgc)
    if isinstance(codec, Dgc):
        codec.momenta = [(0.8, bool(number % 2)) for number in range(len(tensors))]
    return codec


def play(codec: TopK | Dgc, given: list[Tensor]) -> list[Tensor]:
    """All messages, results and states of some exchanges, as bits."""
    bits = []
    for step, values in enumerate(given):
        (form,) = codec.begin(step, keep=0.7 if step == 1 else 1.0)
        message, own = torch.full((form.numel,), 77).to(getattr(torch, form.dtype)), values.clone()
        codec.encode(0, own, message, not_finite := torch.zeros(1))
        codec.decode(0, message if form.adds_up else torch.stack([message, message]), own, scale=0.3)
        codec.end(True)
        bits += [message, own, not_finite, *codec.tensors().values()]
    return [one.clone().view(torch.uint8) for one in bits]


def check(monkeypatch: pytest.MonkeyPatch, make_one: Callable[[], TopK | Dgc], given: list[Tensor]) -> None:
    compiled = play(make_one(), given)
    with monkeypatch.context() as patch:
        for module in (sparse, sparse_message):
            patch.setattr(module, "find_loops", lambda: None)
        plain = play(make_one(), given)
    assert len(compiled) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(compiled, plain, strict=True))


@needs_compiler
@BOTH
@DTYPES
@pytest.mark.parametrize(
    "settings", [{}, {"bits": 8}, {"bits": 2, "can_fail": False}, {"density": 1.0}, {"density": 0.2}]
)
def test_loops_are_torchs_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    numels = [1, 1023, 1024, 1025, 65_536, 65_537]
    given = [torch.randn(sum(numels), dtype=torch.float64).to(dtype) ** 3 for _ in range(3)]
    check(monkeypatch, lambda: make(name, numels, dtype, masking=len(settings) > 0, **settings), given)


@needs_compiler
@BOTH
@DTYPES
@pytest.mark.parametrize("kind", ["ties", "constant", "few", "zeros", "ascending", "subnormal", "low", "high"])
def test_loops_on_values_that_are_hard_to_choose_from(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, kind: str
) -> None:
    """`low`, `high`: the sample is of much smaller or larger values than all others, so the threshold lets nearly all
    or nearly none of them pass."""
    x = torch.randn(STRIDED, dtype=dtype)
    start, stride, _ = make(name, [STRIDED], dtype).sample(make(name, [STRIDED], dtype).bucket.tensors[0])
    assert stride == 65
    if kind == "ties":
        x = x.round()
    elif kind == "constant":
        x.fill_(-2.0)
    elif kind == "few":
        x *= torch.rand(STRIDED) < 0.001
    elif kind == "zeros":
        x.fill_(-0.0)
    elif kind == "ascending":
        x = torch.arange(STRIDED).to(dtype) ** 2
    elif kind == "subnormal":
        x *= torch.finfo(dtype).smallest_normal
    else:
        x[start::stride] *= 1e-3 if kind == "low" else 1e3
    check(monkeypatch, lambda: make(name, [STRIDED], dtype), [x, x.flip(0)])


@needs_compiler
@pytest.mark.parametrize(("counts", "expected"), [((2, 2), [1, 65_535, 65_539]), ((2, 3), []), ((-1, 2), [])])
def test_entries_of_a_damaged_message_that_belong_nowhere_are_left_out(
    counts: tuple[int, int], expected: list[int]
) -> None:
    codec = Codec(name="topk", density=4 / 65_540)
    tensors = coded_tensors([("weight", (1, 65_540), 65_540)])
    places = sparse_message.Places(sparse_layout(codec, tensors, "float32", 0), [(0, 65_540)])
    message = sparse_message.SparseMessage(
        places, torch.zeros(places.layout.num_bytes, dtype=torch.uint8), torch.float32
    )
    message.counts.copy_(torch.tensor(counts))
    message.offsets.copy_(torch.tensor([1, -1, 3, 10]))
    message.row.fill_(1.0)
    around = torch.zeros(65_540 + 100)
    sparse_message.add_entries([message], around, places)
    assert around.nonzero().flatten().tolist() == expected


@BOTH
@pytest.mark.parametrize("bits", [32, 8, 2])
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_a_gpu_is_never_waited_for(name: str, bits: int, density: float) -> None:
    """And it alone knows which steps were made."""
    codec, made = make(name, [2000, 70_000], torch.float32, bits=bits, density=density), [True, False, True]
    twin = make(name, [2000, 70_000], torch.float32, bits=bits, density=density)
    flags, keep = [torch.tensor(float(one)) for one in made], torch.tensor([0.5])
    for step, is_made in enumerate(made):
        given = torch.randn(72_000)
        results = []
        for one, waits in ((codec, False), (twin, True)):
            (form,) = one.begin(step, keep=0.5 if waits else keep)
            message, values = torch.zeros(form.numel, dtype=getattr(torch, form.dtype)), given.clone()
            not_finite, received = torch.zeros(1), message if form.adds_up else message.view(1, -1)
            if waits:
                one.encode(0, values, message, not_finite)
                one.decode(0, received, values)
                one.end(is_made)
            else:
                with pretended_gpu(), no_waits():
                    one.encode(0, values, message, not_finite)
                    one.decode(0, received, values)
                    one.end(flags[step])
            results.append(values)
        assert torch.equal(*results)
    state = twin.tensors()
    assert all(torch.equal(one, state[key]) for key, one in codec.tensors().items())
