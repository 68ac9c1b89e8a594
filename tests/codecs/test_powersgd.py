"""Laws of PowerSGD: many replicas do what one would that is given their mean, exactly where the rank suffices; what is
not sent is kept; and no input, however degenerate, makes an exchange harmful."""

from __future__ import annotations

import pytest
import torch
from helpers.pretend_gpu import no_waits, pretended_gpu
from torch import Tensor

from weft.codecs.base import Bucket
from weft.codecs.low_rank import LowRank, TorchLowRank, find_low_rank
from weft.codecs.make import make_codec
from weft.codecs.powersgd import PowerSgd
from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors
from weft.plan.exchange.messages import messages_of
from weft.plan.plan import Codec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LowRank:
    """Every law holds with compiled loops, where there is a compiler, and with torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr("weft.codecs.powersgd.find_low_rank", lambda device, dtype: TorchLowRank())
        return TorchLowRank()
    return find_low_rank(CPU, torch.float32)


class Replicas:
    """Replicas of one bucket, exchanged in one process."""

    def __init__(
        self,
        tensors: tuple[CodedTensor, ...],
        num_replicas: int = 1,
        *,
        dtype: torch.dtype = torch.float64,
        can_fail: bool = True,
        **codec: float,
    ) -> None:
        self.tensors, self.dtype = tensors, dtype
        self.numel = max(one.offset + one.numel for one in tensors)
        self.codec = Codec(name="powersgd", **codec)  # type: ignore[arg-type]
        self.codecs = [
            make_codec(
                Bucket(
                    codec=self.codec,
                    tensors=tensors,
                    numel=self.numel,
                    dtype=dtype,
                    device=CPU,
                    replica=replica,
                    num_replicas=num_replicas,
                    can_fail=can_fail,
                )
            )
            for replica in range(num_replicas)
        ]
        self.not_finite = torch.zeros(1)

    def exchange(
        self, given: list[Tensor], *, step: int = 0, is_made: bool | Tensor = True, keep: float | Tensor = 1.0
    ) -> Tensor:
        """The mean over replicas of what was sent; all replicas must have the same."""
        values = [one.clone() for one in given]
        forms = [codec.begin(step, keep=keep) for codec in self.codecs][0]
        for number, form in enumerate(forms):
            assert form.adds_up
            messages = [torch.full((form.numel,), torch.nan, dtype=getattr(torch, form.dtype)) for _ in given]
            for codec, own, message in zip(self.codecs, values, messages, strict=True):
                codec.encode(number, own, message, self.not_finite)
                own[self._inside()] = torch.nan  # the values hold nothing after the first message
            total = torch.stack(messages).sum(0)
            for codec, own in zip(self.codecs, values, strict=True):
                codec.decode(number, total.clone(), own, scale=1 / len(given))
        for codec in self.codecs:
            codec.end(is_made)
        inside = self._inside()
        assert all(torch.equal(values[0][inside], other[inside]) for other in values[1:]) or self.not_finite.item()
        return values[0]

    def kept(self) -> Tensor:
        """The mean of what replicas have not sent."""
        return torch.stack([_residual(codec, self) for codec in self.codecs]).mean(0)

    def _inside(self) -> Tensor:
        inside = torch.zeros(self.numel, dtype=torch.bool)
        for one in self.tensors:
            inside[one.offset : one.offset + one.numel] = True
        return inside


def _residual(codec: PowerSgd, replicas: Replicas) -> Tensor:
    found, flat = codec.tensors(), torch.zeros(replicas.numel, dtype=replicas.dtype)
    for one in replicas.tensors:
        flat[one.offset : one.offset + one.numel] = found[f"residual/{one.name}"]
    return flat


def _whole(*shapes: tuple[int, ...]) -> tuple[CodedTensor, ...]:
    return coded_tensors([(f"layers.{i}.weight", shape, torch.Size(shape).numel()) for i, shape in enumerate(shapes)])


SHAPES = ((12, 20), (7, 3, 3), (12, 20), (12, 20), (5, 40), (7, 3, 3))


def _draw(numel: int, *, like: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(numel, dtype=like)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_rank_of_both_sides_gives_the_exact_sum(num_replicas: int) -> None:
    replicas = Replicas(_whole(*SHAPES), num_replicas, rank=12)
    for _ in range(4):  # also from a warm start
        given = [_draw(replicas.numel) for _ in range(num_replicas)]
        assert torch.allclose(replicas.exchange(given), torch.stack(given).mean(0), rtol=0, atol=1e-11)
        assert replicas.kept().abs().max() < 1e-11


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_many_replicas_equal_one_that_is_given_their_mean(rank: int) -> None:
    many, one = Replicas(_whole(*SHAPES), 3, rank=rank), Replicas(_whole(*SHAPES), rank=rank)
    for _ in range(6):
        given = [_draw(many.numel) for _ in range(3)]
        mean = torch.stack(given).mean(0)
        assert torch.allclose(many.exchange(given), one.exchange([mean]), rtol=0, atol=1e-10)
        assert torch.allclose(many.kept(), one.kept(), rtol=0, atol=1e-10)


def test_errors_kept_by_each_or_by_all_together_give_the_same_trajectory() -> None:
    """Published in both forms; the method sees only the mean of what is wanted."""
    local = Replicas(_whole(*SHAPES), 2, rank=2)
    together = Replicas(_whole(*SHAPES), 2, rank=2, memory=0.0)
    error = torch.zeros(local.numel, dtype=torch.float64)
    for _ in range(6):
        given = [_draw(local.numel) for _ in range(2)]
        sent = together.exchange([one + error for one in given])
        error = torch.stack(given).mean(0) + error - sent
        assert torch.allclose(local.exchange(given), sent, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("memory", [1.0, 0.9])
def test_what_is_given_is_sent_or_kept_and_what_is_kept_is_less(dtype: torch.dtype, memory: float) -> None:
    replicas = Replicas(_whole(*SHAPES), 3, rank=2, dtype=dtype, memory=memory)
    for _ in range(5):
        given = [_draw(replicas.numel, like=dtype) for _ in range(3)]
        before = replicas.kept().clone()
        wanted = torch.stack(given).mean(0) + memory * before
        sent = replicas.exchange(given)
        assert torch.allclose(sent + replicas.kept(), wanted, rtol=0, atol=4e-6 if dtype == torch.float32 else 1e-14)
        for one in replicas.tensors:
            part = slice(one.offset, one.offset + one.numel)
            sizes = [flat[part].norm() for flat in (replicas.kept(), sent, wanted)]
            assert sizes[0] < sizes[2]
            assert torch.allclose(sizes[0] ** 2 + sizes[1] ** 2, sizes[2] ** 2, rtol=1e-5)  # a projection


def test_matrices_in_one_call_equal_each_by_itself() -> None:
    together = Replicas(_whole(*SHAPES), 2, rank=2)
    alone = [
        Replicas((CodedTensor(name=one.name, shape=one.shape, offset=0, numel=one.numel),), 2, rank=2)
        for one in together.tensors
    ]
    for _ in range(3):
        given = [_draw(together.numel) for _ in range(2)]
        sent = together.exchange(given)
        for one, by_itself in zip(together.tensors, alone, strict=True):
            part = slice(one.offset, one.offset + one.numel)
            expected = by_itself.exchange([flat[part] for flat in given])
            assert torch.allclose(sent[part], expected, rtol=0, atol=1e-13)


def test_a_warm_start_finds_the_best_approximation_of_a_matrix_that_stays() -> None:
    replicas = Replicas(_whole((30, 20)), rank=3, memory=0.0)
    given = _draw(600)
    left, sizes, right = torch.linalg.svd(given.view(30, 20))
    best = (left[:, :3] * sizes[:3]) @ right[:3]
    errors = [(replicas.exchange([given]) - given).norm().item() for _ in range(60)]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(errors, errors[1:], strict=False))
    assert errors[0] > 1.05 * errors[-1]
    assert errors[-1] == pytest.approx((best.flatten() - given).norm().item(), rel=1e-3)


@pytest.mark.parametrize("is_made", [False, torch.tensor(0)])
def test_a_step_that_does_not_count_leaves_no_trace(is_made: bool | Tensor) -> None:
    replicas, undisturbed = (Replicas(_whole(*SHAPES), 2, rank=2) for _ in range(2))
    given = [[_draw(replicas.numel) for _ in range(2)] for _ in range(3)]
    for one in given:
        bad = [values.clone() for values in one]
        bad[1][5] = torch.inf
        replicas.exchange(bad, is_made=is_made)
        assert torch.equal(replicas.exchange(one), undisturbed.exchange(one))
    for codec, other in zip(replicas.codecs, undisturbed.codecs, strict=True):
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in codec.tensors().items())


def test_decisions_of_the_device_and_factors_there_give_the_same() -> None:
    on_host, on_device = (Replicas(_whole(*SHAPES), 2, rank=2) for _ in range(2))
    for is_made in (True, False, True, True):
        given = [_draw(on_host.numel) for _ in range(2)]
        expected = on_host.exchange(given, is_made=is_made, keep=0.5)
        sent = on_device.exchange(given, is_made=torch.tensor([int(is_made)]), keep=torch.tensor([0.5]))
        assert torch.allclose(sent, expected, rtol=0, atol=1e-12)
    assert torch.allclose(on_host.kept(), on_device.kept(), rtol=0, atol=1e-12)


def test_a_device_is_never_waited_for(arithmetic: LowRank) -> None:
    replicas = Replicas(_whole(*SHAPES), rank=3)
    codec, not_finite, values = replicas.codecs[0], torch.zeros(1), _draw(replicas.numel)
    messages = [torch.zeros(form.numel, dtype=torch.float64) for form in codec.begin(0)]
    is_made, keep = torch.ones(1), torch.full((1,), 0.5)
    with pretended_gpu(), no_waits():
        for step in range(3):
            codec.begin(step, keep=keep)
            for number, message in enumerate(messages):
                codec.encode(number, values, message, not_finite)
                codec.decode(number, message, values)
            codec.end(is_made)


def test_a_step_in_which_values_travel_without_the_codec_changes_nothing() -> None:
    replicas, undisturbed = (Replicas(_whole(*SHAPES), rank=2) for _ in range(2))
    for _ in range(3):
        given = [_draw(replicas.numel)]
        replicas.codecs[0].end(True)
        assert torch.equal(replicas.exchange(given), undisturbed.exchange(given))


def test_state_in_one_copy_gives_the_same() -> None:
    two, one = Replicas(_whole(*SHAPES), 2, rank=2), Replicas(_whole(*SHAPES), 2, rank=2, can_fail=False)
    for _ in range(3):
        given = [_draw(two.numel) for _ in range(2)]
        assert torch.equal(two.exchange(given), one.exchange(given))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 240 + 20, -1])
def test_a_value_that_is_not_finite_is_told(bad: float, place: int) -> None:
    tensors = (*_whole((12, 20)), CodedTensor(name="part", shape=(9, 40), offset=240, numel=90))
    replicas = Replicas(tensors, dtype=torch.float32, rank=2)
    given = _draw(replicas.numel, like=torch.float32)
    replicas.exchange([given])
    assert replicas.not_finite.item() == 0
    given[place] = bad
    replicas.exchange([given], is_made=False)
    assert replicas.not_finite.item() > 0


def test_ranges_send_elements_without_a_full_row_as_they_are_and_gaps_stay() -> None:
    tensors = (
        CodedTensor(name="a", shape=(12, 20), offset=3, numel=107),  # 5 rows and 7 elements
        CodedTensor(name="b", shape=(12, 20), offset=110, numel=19),  # not one row
        CodedTensor(name="c", shape=(12, 20), offset=140, numel=100),  # 5 rows
    )
    replicas = Replicas(tensors, 2, rank=2)
    given = [_draw(replicas.numel) for _ in range(2)]
    mean = torch.stack(given).mean(0)
    for _ in range(3):
        sent = replicas.exchange(given)
        assert torch.equal(sent[:3], given[0][:3]) and torch.equal(sent[129:140], given[0][129:140])
        assert torch.allclose(sent[103:129], mean[103:129], rtol=0, atol=1e-14)
        assert not replicas.kept()[103:129].any() and not replicas.kept()[:3].any()
        for part in (slice(3, 103), slice(140, 240)):
            assert torch.linalg.matrix_rank(sent[part].view(5, 20)) == 2
    expected = [(5 * 2 + 7) + 19 + 5 * 2, 2 * (2 * 20)]
    forms = messages_of(replicas.codec, tensors, "float64", num_replicas=2, step=0)
    assert [form.numel for form in forms] == expected
    assert forms == replicas.codecs[0].begin(0)


def test_ranges_without_any_row_have_an_empty_second_message() -> None:
    """Ranks that share a bucket must go through the same phases."""
    replicas = Replicas((CodedTensor(name="a", shape=(12, 20), offset=0, numel=19),), 2, rank=2)
    given = [_draw(19) for _ in range(2)]
    assert torch.allclose(replicas.exchange(given), torch.stack(given).mean(0), rtol=0, atol=1e-15)
    assert [form.numel for form in replicas.codecs[0].begin(0)] == [19, 0]
    assert [form.numel for form in messages_of(replicas.codec, (), "float32", num_replicas=2, step=0)] == [0, 0]


def test_bytes_are_rank_times_rows_and_columns() -> None:
    forms = messages_of(
        Codec(name="powersgd", rank=3), _whole((100, 10, 5), (2, 900)), "float32", num_replicas=4, step=0
    )
    assert [(form.numel, form.num_bytes) for form in forms] == [(304, 1216), (150 + 1800, 7800)]
    assert sum(form.sent_bytes(4) for form in forms) == 2 * 3 * (1216 + 7800) // 4


def test_values_travel_as_they_are_until_the_warm_up_is_over() -> None:
    tensors = (*_whole((12, 20)), CodedTensor(name="later", shape=(12, 20), offset=250, numel=240))
    replicas, without = Replicas(tensors, 2, rank=2, warmup_steps=2), Replicas(tensors, 2, rank=2)
    for step in range(2):
        given = [_draw(replicas.numel) for _ in range(2)]
        sent = replicas.exchange(given, step=step)
        assert torch.allclose(sent[250:], torch.stack(given).mean(0)[250:], rtol=0, atol=1e-15)
        assert torch.equal(sent[240:250], given[0][240:250])
        assert not replicas.kept().any()
    assert torch.equal(replicas.exchange(given, step=2), without.exchange(given))


DEGENERATE = {
    "zero": torch.zeros(12, 20),
    "one column": torch.zeros(12, 20).index_fill_(1, torch.tensor([3]), 1.0),
    "rank one": torch.arange(1.0, 13)[:, None] * torch.linspace(-1, 1, 20),
    "nearly rank one": torch.ones(12, 20) + 1e-7 * torch.eye(12, 20),
    "one entry": torch.zeros(12, 20).index_put_((torch.tensor(3), torch.tensor(4)), torch.tensor(2.0)),
}


@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-30, 1.0, 1e30, 1e36])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_nothing_is_invented_for_matrices_of_low_rank_and_any_size(kind: str, size: float) -> None:
    """What is sent is never larger than what is wanted, and what comes later has all directions again."""
    replicas = Replicas(_whole((12, 20), (12, 20)), rank=4, dtype=torch.float32)
    given = torch.cat([(DEGENERATE[kind] * size).flatten(), torch.randn(240)])
    for _ in range(3):
        sent = replicas.exchange([given])
        missing, largest = (sent - given)[:240].abs().max().item(), given[:240].abs().max().item()
        assert missing <= (1e-5 if size > 1e-38 else 1.0) * largest  # products may take subnormal numbers for zero
    assert replicas.not_finite.item() == 0
    for _ in range(4):  # starts that became parallel come apart one by one
        later = replicas.exchange([torch.randn(480)], keep=0.0)[:240].view(12, 20)
    assert torch.linalg.matrix_rank(later / later.abs().max(), rtol=1e-4) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_are_orthonormal_whatever_their_sizes_and_angles(arithmetic: LowRank, dtype: torch.dtype) -> None:
    eps, limit = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    rows = torch.randn(6, 4, 50, dtype=dtype)
    rows[1] *= limit
    rows[2] /= limit * 1e3
    rows[3, 1:] = rows[3, :1] + rows[3, 1:] * eps * 1e3  # nearly parallel
    rows[4, 2] = rows[4, 0] - 3 * rows[4, 1]  # dependent
    rows[5, 0] = 0.0
    spanned = rows.clone()
    (arithmetic if isinstance(arithmetic, TorchLowRank) else find_low_rank(CPU, dtype)).orthonormalise_(rows)
    expected = torch.eye(4, dtype=dtype).repeat(6, 1, 1)
    expected[4, 2, 2] = expected[5, 0, 0] = 0.0
    assert torch.allclose(rows @ rows.mT, expected, rtol=0, atol=20 * eps)
    for matrix, before in zip(rows, spanned, strict=True):
        before = before / before.abs().amax(1, keepdim=True).clamp_min(limit)
        assert torch.allclose(before @ matrix.mT @ matrix, before, rtol=0, atol=200 * eps)
