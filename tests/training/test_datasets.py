"""Contents of the built-in datasets, loading of the user's files and functions, and the messages for mistakes."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.errors import DataError, JobError, ModelError
from weft.training.data import datasets
from weft.training.data.datasets import (
    TensorSamples,
    TokenWindows,
    digits,
    fetch,
    fingerprint,
    max_token,
    split_held_out,
    standard_library_text,
    text_files,
    token_file,
)
from weft.training.run.imports import call_function, load_function


def test_windows_follow_each_other_and_targets_are_shifted_by_one() -> None:
    windows = TokenWindows(np.arange(10, dtype=np.uint16), 3)
    assert len(windows) == 3
    inputs, targets = windows.take(np.array([2, 0]))
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2]] and targets.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_one_sample_equals_its_row_of_a_batch() -> None:
    windows = TokenWindows([5, 6, 7, 8, 9], 2)
    assert [(x.tolist(), y.tolist()) for x, y in windows] == [([5, 6], [6, 7]), ([7, 8], [8, 9])]  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="sample 2 of 2"):
        windows[2]


def test_windows_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="context 4 needs 5 tokens, there are 4"):
        TokenWindows(np.arange(4), 4)
    with pytest.raises(DataError) as caught:
        TokenWindows(np.zeros((2, 3)), 0)
    assert caught.value.problems == (
        "tokens are 2-dim float64; give 1-dim integers",
        "context is 0; give at least 1 token",
    )


def test_inputs_and_targets_must_be_as_many() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        TensorSamples(torch.zeros(3), torch.zeros(2))


def test_the_standard_library_is_read_without_its_tests() -> None:
    text = standard_library_text()
    assert text.dtype == np.uint8 and text.size > 1_000_000
    content = text.tobytes()
    root = Path(sysconfig.get_path("stdlib"))
    assert content.startswith((root / "__future__.py").read_bytes())
    assert (root / "json" / "decoder.py").read_bytes() in content
    assert b"class TestCase" in content and b"class JSONTestObject" not in content
    assert np.array_equal(text, standard_library_text())


def test_a_python_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "only.py").write_text("pass")
    monkeypatch.setattr(datasets.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=f"no .py file under {tmp_path}"):
        standard_library_text()


def test_text_files_come_in_order_and_each_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[-5])
    assert text_files(tmp_path / "b.txt").tobytes() == b"b"
    assert text_files(f"{tmp_path}/*.txt").tobytes() == b"a\nb"
    assert text_files([tmp_path / "b.txt", f"{tmp_path}/**/*.txt"]).tobytes() == b"b\na\nc"


def test_text_files_that_are_not_there_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        text_files([tmp_path, tmp_path / "gone.txt", f"{tmp_path}/*.md"])
    assert [problem.split(";")[-1] for problem in caught.value.problems] == [
        f' name its files, for instance "{tmp_path}/**/*.txt"',
        " check the spelling",
        " check the spelling",
    ]
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="the 1 text files hold 0 bytes"):
        text_files(tmp_path / "empty.txt")


def test_a_token_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    tokens = token_file(path)
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable
    windows = TokenWindows(tokens, 10)
    assert np.shares_memory(windows.tokens, tokens)
    assert windows[99 - 1][0].tolist() == list(range(980, 990))
    assert token_file(path, "int32").size == 500


def test_token_files_that_cannot_be_right(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"12345")
    with pytest.raises(DataError, match="has 5 bytes, which is no number of uint16 tokens of 2 bytes each"):
        token_file(path)
    with pytest.raises(DataError, match='dtype "uint61"; did you mean "uint16"'):
        token_file(path, "uint61")
    with pytest.raises(DataError, match="there is no token file"):
        token_file(tmp_path / "gone.bin")
    with pytest.raises(DataError, match="is a folder"):
        token_file(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        token_file(path)


def test_the_largest_token_is_found_in_any_chunk() -> None:
    tokens = np.arange(100, dtype=np.int32)[::-1]
    assert max_token(tokens) == max_token(tokens, chunk_tokens=7) == 99
    with pytest.raises(DataError, match="token -3 at position 5 is negative"):
        max_token(np.array([0, 1, 2, 3, 4, -3, 6]), chunk_tokens=4)
    with pytest.raises(DataError, match="0 tokens"):
        max_token(np.zeros(0, np.uint8))


def test_held_out_tokens_are_the_last() -> None:
    train, held_out = split_held_out(np.arange(100), 0.2, 10)
    assert train.tolist() == list(range(80)) and held_out.tolist() == list(range(80, 100))
    with pytest.raises(DataError, match="the held-out part has 10 of 100 tokens, one window of context 10 needs 11"):
        split_held_out(np.arange(100), 0.1, 10)
    with pytest.raises(DataError, match="the training part has 10 of 100 tokens"):
        split_held_out(np.arange(100), 0.9, 10)
    with pytest.raises(DataError, match="fraction is 1.5"):
        split_held_out(np.arange(100), 1.5, 10)


def test_digits_hold_every_digit_in_both_parts() -> None:
    train, held_out = digits()
    assert (len(train), len(held_out)) == (1437, 360)
    assert train.inputs.shape[1:] == (1, 8, 8) and train.inputs.dtype == torch.float32
    assert (train.inputs.min(), train.inputs.max()) == (0.0, 1.0)
    assert train.targets.dtype == torch.int64
    assert held_out.targets.bincount(minlength=10).min() >= 30


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_no_index_gives_no_sample() -> None:
    inputs, targets = fetch(TokenWindows(np.arange(10), 3), np.zeros(0, np.int64))
    assert inputs.shape == targets.shape == (0, 3) and inputs.dtype == torch.int64


def test_the_fingerprint_sees_length_content_and_type() -> None:
    tokens = np.arange(4000, dtype=np.uint16)
    same = fingerprint(TokenWindows(tokens, 16))
    assert same == fingerprint(TokenWindows(tokens.astype(np.int64), 16))
    changed = tokens.copy()
    changed[1700] += 1
    others = [TokenWindows(changed, 16), TokenWindows(tokens[:-16], 16), TokenWindows(tokens, 15)]
    floats = TensorSamples(torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16))
    ints = TensorSamples(torch.zeros(8), torch.zeros(8, dtype=torch.int16))
    prints = [same, *map(fingerprint, others), fingerprint(floats), fingerprint(ints)]
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_reads_little_of_large_data() -> None:
    class Counting:
        read = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> Any:
            Counting.read += 1
            return index, index % 7

    assert fingerprint(Counting()) == fingerprint(Counting())
    assert Counting.read <= 2 * (2 * 1024 + 1)


def test_a_dataset_that_augments_at_random_is_known_by_its_length() -> None:
    class Noise:
        def __init__(self, total: int) -> None:
            self.total = total

        def __len__(self) -> int:
            return self.total

        def __getitem__(self, index: int) -> Any:
            return torch.rand(4), index

    assert fingerprint(Noise(10)) == fingerprint(Noise(10)) != fingerprint(Noise(11))


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mycode.py").write_text(
        "size = 3\n"
        "def build(width, depth=2):\n    return width * depth\n"
        "class Shop:\n    @staticmethod\n    def make(**settings):\n        return settings\n"
    )
    (tmp_path / "mybroken.py").write_text("import no_such_library_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "mycode", raising=False)
    return tmp_path


def test_functions_are_found_in_the_current_directory(own_code: Path) -> None:
    assert load_function("mycode:build")(4) == 8
    assert call_function("mycode:build", {"width": 4, "depth": 3}) == 12
    assert call_function("mycode:Shop.make", {"any": 1}) == {"any": 1}
    assert sys.path.count(str(own_code)) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mycode", 'names no function; write "module:function"'),
        ("sub/mycode.py:build", 'name the module: "sub.mycode:build"'),
        ("mycod:build", 'no module "mycod" in .*; did you mean "mycode"'),
        ("mycode.sub:build", 'no module "mycode.sub"'),
        ("mycode:biuld", 'has no function "biuld"; did you mean "build"'),
        ("mycode:size", '"size" of module "mycode" .* is a int; name a function'),
    ],
)
def test_functions_that_are_not_there(own_code: Path, reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_function(reference, kind=ModelError)


def test_settings_that_do_not_fit_are_all_named(own_code: Path) -> None:
    with pytest.raises(JobError) as caught:
        call_function("mycode:build", {"dept": 3})
    assert caught.value.problems == (
        '"mycode:build" takes no setting "dept"; did you mean "depth"?',
        '"mycode:build" needs the setting "width"; add it',
    )


def test_an_error_inside_the_users_module_stays_as_it_is(own_code: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library_at_all"):
        load_function("mybroken:build")
