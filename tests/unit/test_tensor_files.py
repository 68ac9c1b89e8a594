"""Tensors in files: shared out evenly, read back whole or in part, and no damage goes unseen."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weft.errors import CheckpointError
from weft.training.tensor_files import (
    FileRecord,
    TensorReader,
    checksum_file,
    find_damage,
    share_out,
    write_tensors,
)


@pytest.mark.parametrize("num_writers", [1, 2, 3, 8])
def test_shares_hold_everything_once_and_are_even(num_writers: int) -> None:
    sizes = {f"tensor {number}": random.randrange(1, 1000) for number in range(50)}
    shares = share_out(sizes, num_writers)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_shares_do_not_depend_on_the_order_of_names() -> None:
    sizes = {"b": 3, "a": 3, "d": 5, "c": 1}
    turned = dict(reversed(sizes.items()))
    assert share_out(sizes, 2) == share_out(turned, 2) == [["d", "c"], ["a", "b"]]


def test_few_tensors_go_to_the_first_writers() -> None:
    assert share_out({"a": 1}, 3) == [["a"], [], []]
    assert share_out({}, 2) == [[], []]
    assert share_out({"a": 5, "empty": 0, "void": 0}, 4) == [["a"], ["empty", "void"], [], []]


TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "turned": torch.arange(12.0).view(3, 4).T,
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "wide": torch.ones(2).expand(3, 2),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    record = write_tensors(path, TENSORS, {"note": "x"})
    assert record == FileRecord(name=path.name, num_bytes=path.stat().st_size, crc32=zlib.crc32(path.read_bytes()))
    assert find_damage(tmp_path, record) is None
    reader = TensorReader(tmp_path, dict.fromkeys(TENSORS, path.name))
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.read(name), tensor) and torch.equal(load_file(path)[name], tensor)
    assert torch.equal(reader.read("matrix", (slice(1, 3), slice(0, 2))), TENSORS["matrix"][1:3, 0:2])
    with pytest.raises(CheckpointError, match='holds no tensor "other"'):
        reader.read("other")


def test_who_may_read_the_folder_may_read_the_file(tmp_path: Path) -> None:
    for mode, expected in ((0o755, 0o644), (0o700, 0o600), (0o775, 0o664)):
        tmp_path.chmod(mode)
        write_tensors(tmp_path / "file", TENSORS, {})
        assert (tmp_path / "file").stat().st_mode & 0o777 == expected


def test_a_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = os.urandom((1 << 21) + 5)  # more than two chunks
    path.write_bytes(content)
    assert checksum_file(path) == zlib.crc32(content)


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "nowhere" / "file", TENSORS, {})


def test_every_bit_counts(tmp_path: Path) -> None:
    record = write_tensors(tmp_path / "file", {"a": torch.arange(4.0)}, {})
    content = (tmp_path / "file").read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.randrange(8)
        (tmp_path / "file").write_bytes(damaged)
        assert "is damaged: its checksum is" in (find_damage(tmp_path, record) or "")


def test_what_is_wrong_is_said_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    record = write_tensors(path, TENSORS, {})
    os.truncate(path, 100)
    assert f"has 100 bytes, its index says {record.num_bytes}" in (find_damage(tmp_path, record) or "")
    path.unlink()
    assert find_damage(tmp_path, record) == f"{path} cannot be read: No such file or directory"
    path.mkdir()
    assert find_damage(tmp_path, record) is not None
    shutil.rmtree(path)
