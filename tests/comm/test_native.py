"""The compiled loops against torch's own operations, to the bit, and a machine that cannot compile them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.comm.shared_memory import native, reduction
from weft.comm.shared_memory.native import LEAST_BYTES, copy, find_kernels
from weft.comm.shared_memory.reduction import add_into, reduce_into

NUMELS = (1, 2, 7, 1023, 1024, 1025, 5000, 40_000)
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
pytestmark = pytest.mark.usefixtures("_clean_cache")


@pytest.fixture
def _clean_cache() -> Iterator[None]:
    """Forget the result of the search for a compiler after each test."""
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


@pytest.fixture
def _compile_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go through the compiled loops too."""
    monkeypatch.setattr(native, "LEAST_BYTES", 1)
    monkeypatch.setattr(reduction, "LEAST_BYTES", 1)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_kernels", lambda: None)
    monkeypatch.setattr(reduction, "find_kernels", lambda: None)


def numbers(numel: int, dtype: torch.dtype, seed: int, *, offset: int = 0) -> torch.Tensor:
    """Numbers of very different sizes, so that every order of additions rounds differently; infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel + offset, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-6, 7, (numel + offset,), generator=generator)
    values[offset::97] = float("inf")
    return values.to(dtype)[offset:]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@needs_compiler
@pytest.mark.usefixtures("_compile_everything")
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("num_terms", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_are_torchs_to_the_bit(dtype: torch.dtype, num_terms: int, offset: int) -> None:
    kernels = find_kernels()
    assert kernels is not None and kernels.sums(dtype)
    for numel in NUMELS:
        given = [numbers(numel, dtype, seed, offset=offset * (seed % 2)) for seed in range(num_terms)]
        total = given[0].clone()
        for term in given[1:]:
            total += term
        for targets in ("all", "last", "other"):
            terms = [term.clone() for term in given]
            to = {"all": terms, "last": terms[-1:], "other": [torch.empty_like(terms[0])]}[targets]
            reduce_into(to, terms, "sum")
            assert all(same_bits(target, total) for target in to)
        terms = [term.clone() for term in given]
        add_into(terms[1], terms, add=False)
        assert same_bits(terms[1], total)
        grown = numbers(numel, dtype, 99)
        expected = grown + total
        add_into(grown, given, add=True)
        assert same_bits(grown, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("num_terms", [2, 3, 5])
def test_with_and_without_a_compiler_alike(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_terms: int) -> None:
    numel = 3 * LEAST_BYTES // dtype.itemsize + 5
    given = [numbers(numel, torch.float32, seed).clamp(-1e4, 1e4).to(dtype) for seed in range(num_terms)]

    def all_of_it() -> list[torch.Tensor]:
        results = []
        for op in ("sum", "max", "min"):
            terms = [term.clone() for term in given]
            reduce_into([terms[-1]], terms, op)  # type: ignore[arg-type]
            results.append(terms[-1])
        for add in (False, True):
            for wide in {dtype, torch.promote_types(dtype, torch.float32)}:
                output = torch.ones(numel, dtype=wide)
                add_into(output, given, add=add)
                results.append(output)
        copied = torch.empty(numel, dtype=dtype)
        copy(copied, given[0])
        return [*results, copied]

    first = all_of_it()
    without_kernels(monkeypatch)
    assert all(same_bits(a, b) for a, b in zip(first, all_of_it(), strict=True))
    assert same_bits(first[-1], given[0])


@pytest.mark.parametrize("num_terms", [3, 4])
def test_halves_are_added_in_float32_and_rounded_once(num_terms: int) -> None:
    terms = [numbers(1000, torch.float32, seed).clamp(-9, 9).to(torch.bfloat16) for seed in range(num_terms)]
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    target = torch.empty_like(terms[0])
    reduce_into([target], terms, "sum")
    assert same_bits(target, total.to(torch.bfloat16))


@needs_compiler
@pytest.mark.usefixtures("_compile_everything")
@pytest.mark.parametrize("to", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("of", [0, 1, 8])
def test_copies_at_every_alignment(to: int, of: int) -> None:
    """And nothing before or after the target is touched."""
    for num_bytes in (1, 15, 16, 63, 64, 65, 1000, 70_000):
        source = torch.randint(256, (of + num_bytes,), dtype=torch.uint8)[of:]
        around = torch.full((to + num_bytes + 64,), 7, dtype=torch.uint8)
        copy(around[to : to + num_bytes], source)
        assert torch.equal(around[to : to + num_bytes], source)
        assert around[:to].tolist() == [7] * to and around[to + num_bytes :].tolist() == [7] * 64


@pytest.mark.usefixtures("_compile_everything")
def test_copies_of_tensors_that_are_not_what_they_look_like() -> None:
    """Conjugated when read, negated when read, transposed, with gaps, of another dtype, of one element for all."""
    given = torch.randn(40, 30, dtype=torch.complex64)
    sources = [given.conj(), given.conj().imag, given.t(), given[::2], given.real.double(), given[:1].expand(40, 30)]
    for source in sources:
        for target in (torch.empty(source.shape, dtype=source.dtype), torch.empty_like(source)):
            copy(target, source)
            assert torch.equal(target, source)
    target = torch.zeros(40, 60, dtype=torch.complex64)
    copy(target[:, ::2], given)
    assert torch.equal(target[:, ::2], given) and not target[:, 1::2].any()
    lazily = torch.zeros(40, 30, dtype=torch.complex64).conj()
    copy(lazily, given)
    assert torch.equal(lazily, given)


@pytest.mark.usefixtures("_compile_everything")
def test_sums_into_a_tensor_with_gaps() -> None:
    target, terms = torch.zeros(200), [torch.ones(100), torch.full((100,), 2.0)]
    add_into(target[::2], terms, add=False)
    assert target[::2].tolist() == [3.0] * 100 and not target[1::2].any()
    spread = [torch.arange(200.0)[::2], torch.ones(200)[::2]]
    reduce_into([spread[0]], spread, "sum")
    assert torch.equal(spread[0], torch.arange(200.0)[::2] + 1)


@needs_compiler
def test_the_library_is_built_once_and_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert find_kernels() is not None
    (built,) = (tmp_path / "cache" / "weft").glob("*.so")
    assert built.name.startswith("kernels-") and built.parent.stat().st_mode & 0o777 == 0o700
    when = built.stat().st_mtime_ns
    find_kernels.cache_clear()
    assert find_kernels() is not None and built.stat().st_mtime_ns == when


@pytest.mark.parametrize("obstacle", ["no compiler", "a compiler that fails", "no home", "a folder that is a file"])
def test_everything_works_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if obstacle == "no compiler":
        monkeypatch.setenv("CC", "a-compiler-nobody-has")
    elif obstacle == "a compiler that fails":
        monkeypatch.setenv("CC", "false")
    elif obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
    else:
        (tmp_path / "weft").write_text("")
    assert find_kernels() is None
    terms = [torch.ones(LEAST_BYTES), torch.ones(LEAST_BYTES)]
    reduce_into(terms, terms, "sum")
    assert bool((terms[1] == 2).all())


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
