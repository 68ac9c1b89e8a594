"""Laws of the codecs that send few bits of every entry: onebit, sign, qsgd and terngrad, and of error feedback."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from helpers.pretend_gpu import no_waits, pretended_gpu
from torch import Tensor

from weft.codecs.base import Bucket, Codec
from weft.codecs.feedback import Feedback
from weft.codecs.formats.packed_bits import pack, unpack
from weft.codecs.formats.random_bits import key_of, normals, random_bits, uniforms
from weft.codecs.make import make_codec
from weft.codecs.onebit import OneBit
from weft.codecs.quantised import Quantised
from weft.codecs.random_rounding import Qsgd, TernGrad
from weft.codecs.sign import Sign
from weft.plan.exchange.coded_tensor import CodedTensor, is_coded
from weft.plan.exchange.messages import messages_of
from weft.plan.plan import Codec as CodecSection

NAMES = ("onebit", "sign", "qsgd", "terngrad")
UNBIASED = ("qsgd", "terngrad")
DTYPES = (torch.float32, torch.float64)
QUANTISERS: dict[str, type[Quantised]] = {"onebit": OneBit, "sign": Sign, "qsgd": Qsgd, "terngrad": TernGrad}
TENSORS = (
    CodedTensor(name="whole", shape=(37, 24), offset=0, numel=888),
    CodedTensor(name="range", shape=(80, 4, 5), offset=900, numel=1073),  # after a gap; 13 entries fill no row
    CodedTensor(name="less than a row", shape=(9, 100), offset=1973, numel=70),
    CodedTensor(name="one column", shape=(1029, 1), offset=2043, numel=1029),
)
NUMEL = 3080


def bucket_of(
    name: str,
    *,
    tensors: Sequence[CodedTensor] = TENSORS,
    numel: int = NUMEL,
    dtype: torch.dtype = torch.float32,
    replica: int = 0,
    num_replicas: int = 1,
    can_fail: bool = True,
    **options: float,
) -> Bucket:
    section = CodecSection(name=name, **options)  # type: ignore[arg-type]
    device = torch.device("cpu")
    return Bucket(
        codec=section, tensors=tuple(tensors), numel=numel, dtype=dtype, device=device, replica=replica,
        num_replicas=num_replicas, can_fail=can_fail,
    )  # fmt: skip


def sent_by(codec: Codec, values: Tensor, step: int = 0, *, keep: float = 1.0) -> tuple[Tensor, bool]:
    """One replica's message of these values, and whether it was found finite."""
    (form,) = codec.begin(step, keep=keep)
    message = torch.zeros(form.numel, dtype=getattr(torch, form.dtype))
    not_finite = torch.zeros(1)
    codec.encode(0, values.clone(), message, not_finite)
    return message, not_finite.item() == 0


def alone(codec: Codec, values: Tensor, step: int = 0, *, keep: float = 1.0) -> Tensor:
    """What arrives of one replica's values."""
    message, is_finite = sent_by(codec, values, step, keep=keep)
    assert is_finite
    arrived = values.clone()
    codec.decode(0, message if codec.begin(step, keep=keep)[0].adds_up else message[None], arrived)
    return arrived


def together(codecs: Sequence[Codec], replicas: Sequence[Tensor], *, scale: float = 1.0) -> list[Tensor]:
    """The values of all replicas after an exchange."""
    received = torch.stack([sent_by(codec, given)[0] for codec, given in zip(codecs, replicas, strict=True)])
    arrived = [given.clone() for given in replicas]
    for codec, values in zip(codecs, arrived, strict=True):
        codec.decode(0, received, values, scale=scale)
    return arrived


def parts(values: Tensor) -> list[Tensor]:
    return [values[one.offset : one.offset + one.numel] for one in TENSORS]


def residuals(codec: Codec) -> Tensor:
    return torch.cat([codec.tensors()[f"residual/{one.name}"] for one in TENSORS])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("can_fail", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_given_is_sent_plus_kept(name: str, can_fail: bool, dtype: torch.dtype) -> None:
    """Over many exchanges, for each codec inside error feedback; each sum is rounded once, so the bound is one unit in
    the last place of its largest term, per exchange."""
    bucket = bucket_of(name, dtype=dtype, can_fail=can_fail)
    codec = Feedback(QUANTISERS[name](bucket), bucket)
    given, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    bound = torch.zeros_like(residuals(codec), dtype=torch.float64)
    for step in range(5):
        values = torch.randn(NUMEL, dtype=dtype)
        before = residuals(codec).clone()
        arrived = alone(codec, values, step)
        codec.end(True)
        given, sent = given + values, sent + arrived
        terms = (torch.cat(parts(values)), before, torch.cat(parts(arrived)))
        bound += torch.finfo(dtype).eps * sum(term.abs() for term in terms)
    kept = residuals(codec).double()
    error = (torch.cat(parts(given)) - torch.cat(parts(sent)) - kept).abs()
    assert (error <= bound).all()
    assert kept.abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_column_of_the_residual_of_onebit_has_mean_zero(dtype: torch.dtype) -> None:
    codec = make_codec(bucket_of("onebit", dtype=dtype))
    alone(codec, torch.randn(NUMEL, dtype=dtype))
    codec.end(True)
    for one in TENSORS:
        kept = codec.tensors()[f"residual/{one.name}"]
        assert (kept[one.num_rows * one.num_columns :] == 0).all()
        if one.num_rows:
            columns = kept[: one.num_rows * one.num_columns].view(one.num_rows, one.num_columns)
            assert columns.abs().max() > 0.1
            assert (columns.double().mean(0).abs() <= 4 * torch.finfo(dtype).eps).all()


def test_onebit_sends_the_means_of_each_sign() -> None:
    tensor = CodedTensor(name="w", shape=(4, 2), offset=0, numel=9)  # and one that fills no row
    codec = make_codec(bucket_of("onebit", tensors=[tensor], numel=9))
    values = torch.tensor([1.0, 0.0, -1.0, -2.0, 3.0, 5.0, -3.0, 7.0, 0.3])
    expected = torch.tensor([2.0, 4.0, -2.0, -2.0, 2.0, 4.0, -2.0, 4.0, 0.3])
    message, _ = sent_by(codec, values)
    assert torch.equal(alone(codec, values), expected)
    assert torch.equal(message[:16].view(torch.float32), torch.tensor([2.0, 4.0, -2.0, -2.0]))
    assert torch.equal(message[16:20].view(torch.float32), torch.tensor([0.3]))
    assert message[20:].tolist() == [0b01001100, *[0] * 11]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_exact_on_what_it_can_represent(name: str, dtype: torch.dtype) -> None:
    """One size of entries of either sign; of qsgd one entry per block, and zeros."""
    signs = torch.where(torch.rand(NUMEL) < 0.5, -1.0, 1.0).to(dtype)
    if name == "qsgd":
        sparse = torch.zeros(NUMEL, dtype=dtype)
        for own in parts(sparse):
            own[::512] = 0.37
        values = sparse * signs
    elif name == "terngrad":
        values = signs * 0.37 * (torch.rand(NUMEL) < 0.7)
    elif name == "onebit":  # powers of two: their means are exact
        values = torch.where(signs < 0, -0.5, 0.25).to(dtype)
    else:
        values = signs
    assert torch.equal(alone(make_codec(bucket_of(name, dtype=dtype)), values), values)
    if name != "sign":
        zeros = torch.zeros(NUMEL, dtype=dtype)
        assert torch.equal(alone(make_codec(bucket_of(name, dtype=dtype)), zeros), zeros)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_together_are_as_one_at_a_time_and_gaps_stay(name: str) -> None:
    values = torch.randn(NUMEL)
    arrived = alone(make_codec(bucket_of(name, levels=16)), values, step=3)
    for one in TENSORS:
        moved = CodedTensor(name=one.name, shape=one.shape, offset=2, numel=one.numel)
        own = torch.cat([torch.zeros(2), values[one.offset : one.offset + one.numel]])
        codec = make_codec(bucket_of(name, tensors=[moved], numel=own.numel(), levels=16))
        assert torch.equal(alone(codec, own, step=3)[2:], arrived[one.offset : one.offset + one.numel])
    for gap in (slice(888, 900), slice(3072, NUMEL)):
        assert torch.equal(arrived[gap], values[gap])
    assert not torch.equal(arrived, values)


@pytest.mark.parametrize(("name", "levels"), [("terngrad", 4), ("qsgd", 4), ("qsgd", 16), ("qsgd", 256)])
def test_it_is_unbiased(name: str, levels: int) -> None:
    """z-scores of 512 entries, drawn 100 times in each of 20 steps."""
    num_copies, num_steps, numel = 100, 20, 512
    given = torch.randn(numel, dtype=torch.float64)
    tensor = CodedTensor(name="w", shape=(num_copies, numel), offset=0, numel=num_copies * numel)
    bucket = bucket_of(name, tensors=[tensor], numel=tensor.numel, dtype=torch.float64, levels=levels)
    codec, values = make_codec(bucket), given.repeat(num_copies)
    draws = torch.cat([alone(codec, values, step).view(num_copies, numel) for step in range(num_steps)])
    deviation = draws.std(0)
    is_random = deviation > 0.1 * deviation.max()  # others are next to a value that can be sent, and seldom leave it
    z = (draws.mean(0) - given) * math.sqrt(draws.shape[0]) / deviation.clamp(min=0.1 * deviation.max())
    assert is_random.sum() > 0.9 * numel
    assert z.abs().max() < 4.5  # 1 in 300 if all is right; the draws are the same in every run
    assert 0.8 < z[is_random].square().mean() < 1.2


def test_random_numbers_of_steps_replicas_and_tensors_differ_and_of_copies_are_alike() -> None:
    values = torch.randn(NUMEL)
    for name in UNBIASED:
        first = alone(make_codec(bucket_of(name)), values, step=5)
        assert torch.equal(alone(make_codec(bucket_of(name)), values, step=5), first)
        assert not torch.equal(alone(make_codec(bucket_of(name)), values, step=6), first)
        assert not torch.equal(alone(make_codec(bucket_of(name, replica=1)), values, step=5), first)
    keys = {key_of(name, step, replica) for name in "abc" for step in range(50) for replica in range(50)}
    assert len(keys) == 3 * 50 * 50


def test_random_numbers_are_those_of_the_definition_and_uniform() -> None:
    numel, device = 2**16, torch.device("cpu")
    key = key_of("layers.0.weight", 7, 3)
    assert (key_of("", 0, 0), key) == (0x5E6A1F98, 0xE28D28F9)
    bits = random_bits(key, numel, device)
    for i in (0, 1, 65535):
        x = i ^ key
        x = ((x ^ x >> 16) * 0x21F0AAAD + key * 0x9E3779B9) % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        assert bits[i] == x ^ x >> 15
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(bits >> shift & 255, minlength=256).double()
        assert abs(((counts - 256).square() / 256).sum() - 255) < 4 * math.sqrt(2 * 255)
    draws = uniforms(key, numel, torch.float32, device)
    assert torch.equal(draws.double() * 2**24, (bits >> 8).double())
    other = uniforms(key_of("layers.0.weight", 7, 2), numel, torch.float32, device)
    for pair in ((draws, other), (draws[1:], draws[:-1])):
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 4 / math.sqrt(numel)
    normal = normals(key, numel, torch.float64, device)
    assert abs(normal.mean()) < 4 / math.sqrt(numel)
    assert abs(normal.square().mean() - 1) < 0.02


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_the_majority_of_signs_wins_and_ties_and_zeros_are_positive(num_replicas: int) -> None:
    replicas = [torch.randn(NUMEL).round() for _ in range(num_replicas)]  # four of ten are 0
    codecs = [make_codec(bucket_of("sign", replica=k, num_replicas=num_replicas)) for k in range(num_replicas)]
    votes = torch.stack([torch.where(given < 0, -1.0, 1.0) for given in replicas]).sum(0)
    for arrived, given in zip(together(codecs, replicas, scale=0.25), replicas, strict=True):
        for own, vote in zip(parts(arrived), parts(votes), strict=True):
            assert torch.equal(own, torch.where(vote < 0, -1.0, 1.0))
        assert torch.equal(arrived[888:900], given[888:900])


@pytest.mark.parametrize("name", ["onebit", "qsgd", "terngrad"])
def test_what_the_replicas_sent_is_added_and_scaled(name: str) -> None:
    replicas = [torch.randn(NUMEL) for _ in range(3)]
    codecs = [make_codec(bucket_of(name, replica=k, num_replicas=3)) for k in range(3)]
    first, second, third = (alone(codec, given) for codec, given in zip(codecs, replicas, strict=True))
    for arrived in together(codecs, replicas, scale=0.5):
        for own, a, b, c in zip(parts(arrived), parts(first), parts(second), parts(third), strict=True):
            assert torch.equal(own, (a + b + c) * 0.5)


def test_onebit_loses_less_than_it_sends() -> None:
    """A contraction: means are projections, so the error is shorter than the values, by the part that was sent."""
    bucket = bucket_of("onebit", dtype=torch.float64)
    values = torch.randn(NUMEL, dtype=torch.float64) * torch.randn(NUMEL, dtype=torch.float64).exp()
    arrived = alone(make_codec(bucket), values)
    for given, sent in zip(parts(values), parts(arrived), strict=True):
        assert torch.isclose((given - sent).square().sum() + sent.square().sum(), given.square().sum(), rtol=1e-12)
        assert sent.square().sum() > 0.1 * given.square().sum()


@pytest.mark.parametrize("can_fail", [True, False])
def test_memory_and_keep_scale_what_is_remembered(can_fail: bool) -> None:
    codec = make_codec(bucket_of("onebit", dtype=torch.float64, memory=0.5, can_fail=can_fail))
    fresh = make_codec(bucket_of("onebit", dtype=torch.float64))
    alone(codec, torch.randn(NUMEL, dtype=torch.float64))
    codec.end(True)
    values = torch.randn(NUMEL, dtype=torch.float64)
    remembered = values.clone()
    for own, error in zip(parts(remembered), codec.tensors().values(), strict=True):
        own += error * 0.125
    expected = alone(fresh, remembered)
    for own, other in zip(parts(alone(codec, values, keep=0.25)), parts(expected), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("is_device", [False, True], ids=["host decides", "device decides"])
def test_an_exchange_that_does_not_count_leaves_the_residual(is_device: bool) -> None:
    def end(codec: Codec, is_made: bool) -> None:
        codec.end(torch.tensor(float(is_made)) if is_device else is_made)

    bucket = bucket_of("onebit")
    codec, expected = make_codec(bucket), make_codec(bucket)
    first, second, third = (torch.randn(NUMEL) for _ in range(3))
    poisoned = second.clone()
    poisoned[5] = math.nan
    for step, (values, is_made) in enumerate([(first, True), (poisoned, False), (second, False), (third, True)]):
        sent_by(codec, values, step)
        end(codec, is_made)
        if is_made:
            sent_by(expected, values, step)
            expected.end(True)
    assert torch.equal(residuals(codec), residuals(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_is_not_finite_is_reported(name: str, dtype: torch.dtype) -> None:
    for place in (0, 887, 900, 1972, 1980, 3071):
        for bad in (math.nan, math.inf, -math.inf):
            for warmup_steps in (0, 1):
                values = torch.randn(NUMEL, dtype=dtype)
                values[890] = bad  # in a gap: of no one's interest
                codec = make_codec(bucket_of(name, dtype=dtype, warmup_steps=warmup_steps))
                assert sent_by(codec, values)[1]
                values[place] = bad
                assert not sent_by(codec, values)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30])
def test_tiny_and_huge_values_survive(scale: float, dtype: torch.dtype) -> None:
    for name in ("onebit", "qsgd", "terngrad"):
        values = torch.randn(NUMEL, dtype=torch.float64).mul(scale).to(dtype)
        for own, given in zip(
            parts(alone(make_codec(bucket_of(name, dtype=dtype)), values)), parts(values), strict=True
        ):
            assert own.isfinite().all()
            assert own.abs().max() > 0.1 * given.abs().max()
            assert (own * given >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "levels", "sizes"),
    [
        ("onebit", 256, ((2 * 24, 0, 111), (2 * 20, 13, 133), (0, 70, 0), (2, 0, 129))),
        ("sign", 256, ((0, 0, 111), (0, 0, 135), (0, 0, 9), (0, 0, 129))),
        ("terngrad", 256, ((1, 0, 222), (1, 0, 269), (1, 0, 18), (1, 0, 258))),
        ("qsgd", 4, ((2, 0, 222), (3, 0, 269), (1, 0, 18), (3, 0, 258))),
        ("qsgd", 16, ((2, 0, 444), (3, 0, 537), (1, 0, 35), (3, 0, 515))),
        ("qsgd", 256, ((2, 0, 888), (3, 0, 1073), (1, 0, 70), (3, 0, 1029))),
    ],
)
def test_a_message_is_as_long_as_its_contents(
    name: str, levels: int, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Scales, entries of the rest, bytes of codes, per tensor; each tensor is filled up to 16 bytes."""
    bucket = bucket_of(name, levels=levels, dtype=dtype)
    (message,) = make_codec(bucket).begin(0)
    num_bytes = [(scales + rest) * dtype.itemsize + codes for scales, rest, codes in sizes]
    assert message.num_bytes == sum(-(-one // 16) * 16 for one in num_bytes)
    assert (message.dtype, message.adds_up) == ("uint8", False)
    assert message.sent_bytes(4) == 3 * message.num_bytes
    assert (message,) == messages_of(bucket.codec, TENSORS, str(dtype)[6:], num_replicas=1, step=0)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_onebit_leaves_few_rows_as_they_are(num_rows: int) -> None:
    """Two means per column would be no less than two rows."""
    section = CodecSection(name="onebit", dense_below=1)
    assert is_coded(section, (num_rows, 40)) == (num_rows > 2)
    part = CodedTensor(name="a", shape=(9, 40), offset=0, numel=40 * num_rows + 7, start=80)
    bucket = dataclasses.replace(bucket_of("onebit"), tensors=(part,), numel=part.numel, codec=section)
    codec, values = make_codec(bucket), torch.randn(part.numel)
    (form,) = codec.begin(0)
    assert form.num_bytes <= 4 * part.numel + 15
    assert torch.equal(alone(codec, values), values) == (num_rows <= 2)
    codec.end(True)
    assert bool(codec.tensors()["residual/a"].any()) == (num_rows > 2)


@pytest.mark.parametrize("name", NAMES)
def test_values_travel_as_they_are_until_the_warm_up_is_over(name: str) -> None:
    codec = make_codec(bucket_of(name, warmup_steps=2))
    values = torch.randn(NUMEL)
    (form,) = codec.begin(1)
    assert (form.numel, form.dtype, form.adds_up) == (3060, "float32", True)
    assert torch.equal(alone(codec, values, step=1), values)
    codec.end(True)
    assert all((kept == 0).all() for kept in codec.tensors().values())
    assert not torch.equal(alone(codec, values, step=2), values)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 8, 100])
def test_codes_are_packed_low_bits_first(bits: int, numel: int) -> None:
    codes = torch.randint(2**bits, (numel,), dtype=torch.uint8)
    packed = torch.full((-(-numel * bits // 8),), 255, dtype=torch.uint8)
    pack(codes, bits, packed)
    number = sum(code << place * bits for place, code in enumerate(codes.tolist()))
    assert bytes(packed.tolist()) == number.to_bytes(packed.numel(), "little")
    assert torch.equal(unpack(packed, bits, numel), codes)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait_for_a_gpu(name: str) -> None:
    bucket = bucket_of(name)
    codec = make_codec(bucket)
    (form,) = codec.begin(0)
    message, not_finite, values = torch.zeros(form.numel, dtype=torch.uint8), torch.zeros(1), torch.randn(NUMEL)
    is_made, keep = torch.ones(1), torch.full((1,), 0.5)
    with pretended_gpu(), no_waits():
        for step in range(3):
            codec.begin(step, keep=keep)
            codec.encode(0, values, message, not_finite)
            codec.decode(0, message.expand(2, -1), values, scale=0.5)
            codec.end(is_made)
