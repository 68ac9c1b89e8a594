"""Laws of topk and dgc: given = sent + kept, contraction, exactness, tensors by themselves, dense at density 1, the
rules of momentum, state that a skipped step leaves alone, and messages as long as the wire counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.codecs.base import Bucket
from weft.codecs.dgc import Dgc
from weft.codecs.make import make_codec
from weft.codecs.topk import TopK
from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.sparse import num_sent, sparse_layout
from weft.plan.plan import Codec

Sparse = TopK | Dgc
SHAPES = [("first", (30, 40), 1200), ("second", (7, 11), 77), ("range", (400, 500), 70_001), ("one", (1, 3), 3)]
NUMEL = sum(numel for _, _, numel in SHAPES)


def make(
    tensors: tuple[CodedTensor, ...],
    *,
    replica: int = 0,
    num_replicas: int = 2,
    dtype: torch.dtype = torch.float32,
    numel: int = 0,
    can_fail: bool = True,
    **settings: Any,
) -> Sparse:
    bucket = Bucket(
        codec=Codec(**{"name": "topk"} | settings),
        tensors=tensors,
        numel=numel or max(one.offset + one.numel for one in tensors),
        dtype=dtype,
        device=torch.device("cpu"),
        replica=replica,
        num_replicas=num_replicas,
        can_fail=can_fail,
    )
    codec = make_codec(bucket)
    assert isinstance(codec, TopK | Dgc)
    return codec


def exchange(
    codecs: list[Sparse],
    given: list[Tensor],
    step: int = 0,
    *,
    is_made: bool = True,
    scale: float = 1.0,
    keep: float = 1.0,
    is_finite: bool = True,
) -> list[Tensor]:
    """The values of all replicas after an exchange, played in one process."""
    values, messages = [one.clone() for one in given], []
    for codec, own in zip(codecs, values, strict=True):
        (form,) = codec.begin(step, keep=keep)
        not_finite = torch.zeros(1)
        messages.append(torch.empty(form.numel, dtype=getattr(torch, form.dtype)))
        codec.encode(0, own, messages[-1], not_finite)
        assert is_finite == (not not_finite.any())
    received = torch.stack(messages)
    if form.adds_up:
        received = received.sum(0)
    for codec, own in zip(codecs, values, strict=True):
        codec.decode(0, received, own, scale=scale)
        codec.end(is_made)
    return values


def alone(numel: int, **settings: Any) -> Sparse:
    """A codec of one tensor, as if there were many replicas, so that its messages are gathered."""
    return make(coded_tensors([("weight", (1, numel), numel)]), **settings)


def sent_by(codec: Sparse, values: Tensor, step: int = 0) -> Tensor:
    return exchange([codec], [values], step)[0]


def residual(codec: Sparse) -> Tensor:
    return torch.cat([one for name, one in codec.tensors().items() if name.startswith("residual/")])


BOTH = pytest.mark.parametrize("name", ["topk", "dgc"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@BOTH
@DTYPES
@pytest.mark.parametrize("can_fail", [True, False])
def test_given_is_sent_and_kept_exactly(name: str, dtype: torch.dtype, can_fail: bool) -> None:
    """In numbers whose sums are exact; and every entry is either sent or kept as it is."""
    codec = make(coded_tensors(SHAPES), name=name, density=0.05, dtype=dtype, can_fail=can_fail)
    total_given, total_sent = torch.zeros(2, NUMEL, dtype=dtype)
    for step in range(4):
        given = torch.randint(-(2**12), 2**12, (NUMEL,)).to(dtype)
        before, sent = residual(codec).clone(), sent_by(codec, given, step)
        total = before + given
        assert torch.equal(torch.where(sent == 0, 0, total), sent)
        assert torch.equal(torch.where(sent == 0, total, 0), residual(codec))
        total_given, total_sent = total_given + given, total_sent + sent
    assert torch.equal(total_given, total_sent + residual(codec))


@DTYPES
@pytest.mark.parametrize("density", [0.001, 0.03, 0.4])
def test_topk_sends_the_largest_and_what_is_kept_shrinks(dtype: torch.dtype, density: float) -> None:
    for seed in range(3):
        x = torch.randn(5000, dtype=dtype, generator=torch.Generator().manual_seed(seed)) ** 3
        sent, k = sent_by(alone(5000, density=density, dtype=dtype), x), num_sent(density, 5000)
        order = x.abs().argsort(descending=True, stable=True)[:k]
        assert torch.equal(sent, torch.zeros_like(x).index_put((order,), x[order]))
        assert (x - sent).square().sum() <= (1 - k / 5000) * x.square().sum()


def test_of_equal_entries_the_first_are_sent() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0, 3.0, 2.0, 0.0])
    for name in ("topk", "dgc"):
        sent = sent_by(alone(8, name=name, density=0.4), x)
        assert sent.tolist() == [0, -2, 2, 0, 0, 3, 0, 0]
    zeros = sent_by(alone(100_000, name="dgc", density=0.01), torch.zeros(100_000))
    assert not zeros.any()


@BOTH
@pytest.mark.parametrize("bits", [32, 8, 2])
def test_few_entries_are_sent_whole(name: str, bits: int) -> None:
    """What has no more entries than may be sent, of sizes that the bits tell apart, leaves nothing behind."""
    x = torch.zeros(70_000)
    x[[5, 17, 65_535, 65_536, 69_999]] = torch.tensor([127.0, -1.0, 1.0, -1.0, 127.0])
    codec = alone(70_000, name=name, density=0.002, bits=bits)
    assert torch.equal(sent_by(codec, x), x)
    assert not residual(codec).any()


@BOTH
@pytest.mark.parametrize(("bits", "num_replicas"), [(32, 2), (8, 2), (2, 2), (32, 8)])
def test_tensors_of_one_bucket_are_compressed_each_by_itself(name: str, bits: int, num_replicas: int) -> None:
    """Also with gaps between them, which stay as they are."""
    tensors, offset = [], 3
    for tensor_name, shape, numel in SHAPES:
        tensors.append(CodedTensor(name=tensor_name, shape=shape, offset=offset, numel=numel))
        offset += numel + 5
    settings: dict[str, Any] = {"name": name, "bits": bits, "density": 0.2, "num_replicas": num_replicas}
    together = make(tuple(tensors), numel=offset, **settings)
    apart = [make(coded_tensors([one]), **settings) for one in SHAPES]
    for step in range(3):
        given = torch.randint(-999, 999, (offset,)).float()
        values = exchange([together] * num_replicas, [given] * num_replicas, step, is_made=False)[0]
        together.end(True)
        rest = given.clone()
        for tensor, codec in zip(tensors, apart, strict=True):
            part = slice(tensor.offset, tensor.offset + tensor.numel)
            own = exchange([codec] * num_replicas, [given[part]] * num_replicas, step, is_made=False)[0]
            codec.end(True)
            assert torch.equal(own, values[part])
            assert torch.equal(residual(codec), together.tensors()[f"residual/{tensor.name}"])
            rest[part] = values[part]
        assert torch.equal(rest, values)


@BOTH
@DTYPES
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("density", [1.0, 0.25, 0.01])
def test_replicas_end_with_the_sum_of_what_each_sent(
    name: str, dtype: torch.dtype, num_replicas: int, density: float
) -> None:
    """Entries are gathered, or spread over zeros and summed; at density 1 it is the sum of what was given."""
    tensors = coded_tensors(SHAPES)
    settings: dict[str, Any] = {"name": name, "density": density, "dtype": dtype, "num_replicas": num_replicas}
    codecs = [make(tensors, replica=replica, **settings) for replica in range(num_replicas)]
    for step in range(2):
        given = [torch.randint(-99, 99, (NUMEL,)).to(dtype) for _ in codecs]
        kept = [residual(codec).clone() for codec in codecs]
        values = exchange(codecs, given, step, scale=0.5)
        assert all(torch.equal(values[0], other) for other in values)
        sent = [g + old - residual(codec) for g, old, codec in zip(given, kept, codecs, strict=True)]
        assert torch.equal(values[0], 0.5 * torch.stack(sent).sum(0))
        if density == 1:
            assert torch.equal(values[0], 0.5 * torch.stack(given).sum(0))


@BOTH
@pytest.mark.parametrize("density", [1.0, 0.02])
def test_a_step_that_is_not_made_leaves_nothing_behind(name: str, density: float) -> None:
    codec = make(coded_tensors(SHAPES), name=name, density=density, masking=False)
    if isinstance(codec, Dgc):
        codec.momenta = [(0.9, False)] * len(SHAPES)
    sent_by(codec, torch.randn(NUMEL))
    before = {key: one.clone() for key, one in codec.tensors().items()}
    assert name == "topk" or any(one.any() for one in before.values())
    for bad in (math.nan, math.inf, -math.inf):
        for where in (0, 1000, NUMEL - 1):
            given = torch.randn(NUMEL)
            given[where] = bad
            exchange([codec], [given], 1, is_made=False, is_finite=False)
    exchange([codec], [torch.full((NUMEL,), math.nan)], 1, is_made=False, is_finite=False)
    exchange([codec], [torch.randn(NUMEL)], 1, is_made=False)
    after = codec.tensors()
    assert after.keys() == before.keys() and all(torch.equal(one, after[key]) for key, one in before.items())


@BOTH
def test_what_is_kept_is_scaled_by_memory_and_by_keep(name: str) -> None:
    codec = alone(4, name=name, density=0.25, memory=0.5)
    assert sent_by(codec, torch.tensor([8.0, 4.0, 2.0, 0.0])).tolist() == [8, 0, 0, 0]
    assert exchange([codec], [torch.zeros(4)], 1, keep=2.0)[0].tolist() == [0, 4, 0, 0]
    assert residual(codec).tolist() == [0, 0, 2, 0]


@DTYPES
@pytest.mark.parametrize("is_nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_dgc_at_density_1_is_sgd(dtype: torch.dtype, is_nesterov: bool, masking: bool) -> None:
    """With momentum without masking, and without momentum with it."""
    codec = alone(60, name="dgc", density=1.0, masking=masking, dtype=dtype, num_replicas=1)
    assert isinstance(codec, Dgc)
    codec.momenta = [(0.9, is_nesterov)]
    weight = torch.nn.Parameter(torch.zeros(60, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0 if masking else 0.9, nesterov=is_nesterov and not masking)
    expected_factor = 1.9 if masking and is_nesterov else 1.0  # u + g with u = μ g
    total = torch.zeros(60, dtype=dtype)
    for step in range(6):
        weight.grad = torch.randn(60, dtype=dtype) * expected_factor
        optimizer.step()
        total -= sent_by(codec, weight.grad / expected_factor, step)
    torch.testing.assert_close(total, weight.detach(), rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("is_nesterov", [False, True])
def test_dgc_by_its_rule(masking: bool, is_nesterov: bool) -> None:
    """Against a plain loop over numbers that are exact, in a tensor so small that all of it is sampled."""
    codec = alone(40, name="dgc", density=0.1, masking=masking, memory=0.5)
    assert isinstance(codec, Dgc)
    codec.momenta = [(0.5, is_nesterov)]
    u, v = torch.zeros(2, 40).tolist()
    for step in range(6):
        g = torch.randint(-99, 99, (40,)).float()
        for i, own in enumerate(g.tolist()):
            u[i] = 0.5 * (u[i] + own) if is_nesterov else 0.5 * u[i] + own
            v[i] = 0.5 * v[i] + u[i] + (own if is_nesterov else 0)
        order = sorted(range(40), key=lambda i: (-abs(v[i]), i))[:4]
        expected = [v[i] if i in order else 0.0 for i in range(40)]
        assert sent_by(codec, g, step).tolist() == expected
        for i in order:
            v[i] = 0.0
            u[i] = 0.0 if masking else u[i]
        state = codec.tensors()
        assert state["residual/weight"].tolist() == v and state["momentum/weight"].tolist() == u


def test_dgc_sends_what_passes_a_sampled_threshold() -> None:
    """At most k entries, mostly exactly k; all of them at least as large as any that is kept."""
    numbers = []
    for seed in range(8):
        x = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
        codec = alone(200_000, name="dgc", density=0.01)
        sent = sent_by(codec, x, step=seed)
        numbers.append(int((sent != 0).sum()))
        assert sent[sent != 0].abs().min() >= residual(codec).abs().max()
    assert max(numbers) == 2000 and min(numbers) > 1200 and numbers.count(2000) >= 5


@BOTH
@DTYPES
@pytest.mark.parametrize("bits", [8, 2])
def test_values_in_few_bits(name: str, dtype: torch.dtype, bits: int) -> None:
    """Against the rule, entry by entry; what rounding takes is kept."""
    x = torch.randn(3000, dtype=dtype)
    codec = alone(3000, name=name, density=0.1, bits=bits, dtype=dtype)
    sent = sent_by(codec, x)
    chosen = x[sent != 0]
    assert len(chosen) > 200 and chosen.abs().min() >= torch.where(sent == 0, x, 0).abs().max()
    if bits == 8:
        scale = chosen.abs().max() / 127
        expected = (chosen / scale).round() * scale
        assert torch.equal(residual(codec) + sent, x)
    else:
        is_upper = chosen.abs() > chosen.abs().mean()
        means = chosen.abs()[~is_upper].mean(), chosen.abs()[is_upper].mean()
        expected = torch.where(is_upper, means[1], means[0]) * chosen.sign()
    torch.testing.assert_close(sent[sent != 0], expected)
    torch.testing.assert_close(residual(codec), x - sent, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bits", [32, 8, 2])
def test_messages_are_as_long_as_the_wire_counts(name: str, dtype: str, bits: int) -> None:
    tensors = coded_tensors(SHAPES)
    codec = make(tensors, name=name, bits=bits, density=0.01, warmup_steps=10, dtype=getattr(torch, dtype))
    (form,) = codec.begin(10)
    k, item = 12 + 1 + 700 + 1, torch.finfo(getattr(torch, dtype)).bits // 8
    sections = [5 * 4, 8 * item if bits < 32 else 0, 2 * k, k * item if bits == 32 else -(-k * bits // 8)]
    assert form.num_bytes == form.sent_bytes(2) == sum(-(-section // 16) * 16 for section in sections)
    assert (form.dtype, form.adds_up) == ("uint8", False)
    for step in (0, 3, 10):
        (counted,) = messages_of(codec.bucket.codec, tensors, dtype, num_replicas=2, step=step)
        assert codec.begin(step) == (counted,)
    layout = sparse_layout(codec.bucket.codec, tensors, dtype, 0)
    assert [stop - first for first, stop in layout.entries] == [300, 19, 17_500, 1]


def test_entries_are_spread_where_that_sends_no_more() -> None:
    tensors = coded_tensors(SHAPES)
    for density, num_replicas, adds_up in [(0.25, 2, False), (0.25, 16, True), (1, 2, True), (0.01, 16, False)]:
        codec = Codec(name="topk", density=density)
        (form,) = messages_of(codec, tensors, "float32", num_replicas=num_replicas, step=0)
        assert form.adds_up == adds_up
        assert form.sent_bytes(num_replicas) <= Message(numel=NUMEL, dtype="float32").sent_bytes(num_replicas)


@pytest.mark.parametrize("bits", [32, 8, 2])
def test_whether_entries_are_spread_does_not_depend_on_the_bucket(bits: int) -> None:
    """What is rounded would depend on it."""
    tensors = coded_tensors([("a", (3, 4), 12), ("b", (600, 100), 60_000)])
    for density in (0.001, 0.05, 0.2, 0.3, 0.5, 0.9):
        for num_replicas in (2, 3, 8, 30):
            codec = Codec(name="topk", density=density, bits=bits)
            forms = [
                messages_of(codec, bucket, "float32", num_replicas=num_replicas, step=0)[0]
                for bucket in (tensors, tensors[:1], tensors[1:])
            ]
            assert len({form.adds_up for form in forms}) == 1
