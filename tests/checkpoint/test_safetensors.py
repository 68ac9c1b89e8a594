"""Tensors in files: any split of a tensor is written and read back in its place, other tools agree, damage is seen."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weft.checkpoint.files import file_io as tensor_bytes
from weft.checkpoint.files.checksums import FileRecord, checksums, find_damage, pieces_of
from weft.checkpoint.files.file_io import Staging, write_runs
from weft.checkpoint.files.safetensors import Entry, TensorFile, TensorReader, pack
from weft.checkpoint.portable import share_of_replica
from weft.errors import CheckpointError
from weft.layout import Layout, Runs, Split

HOST = torch.device("cpu")
TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "last": torch.arange(3.0, dtype=torch.float64),
}


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "file.safetensors") -> TensorFile:
    entries = tuple(Entry(name=key, dtype=one.dtype, shape=tuple(one.shape)) for key, one in tensors.items())
    made = TensorFile(name=name, entries=entries, metadata={"format": "pt"})
    made.create(folder)
    file = os.open(folder / name, os.O_WRONLY)
    for key, one in tensors.items():
        runs = [Runs(there=0, here=0, numel=one.numel())] if one.numel() else []
        write_runs(file, made.starts[key], one, runs, Staging(HOST))
    os.close(file)
    return made


def test_what_is_written_is_read_by_others_and_here(tmp_path: Path) -> None:
    made = write(tmp_path, TENSORS)
    path = tmp_path / made.name
    assert path.stat().st_size == made.num_bytes
    theirs = load_file(path)
    with TensorReader(tmp_path, [made.name], HOST) as reader:
        assert sorted(reader.entries) == sorted(TENSORS)
        assert reader.metadata[made.name] == {"format": "pt"}
        for name, tensor in TENSORS.items():
            found = reader.read_whole(name)
            assert found.dtype == theirs[name].dtype == tensor.dtype
            assert torch.equal(found, tensor) and torch.equal(theirs[name], tensor)


def test_what_others_write_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs", {"note": "x"})
    with TensorReader(tmp_path, ["theirs"], HOST) as reader:
        assert reader.metadata["theirs"] == {"note": "x"}
        assert all(torch.equal(reader.read_whole(name), tensor) for name, tensor in TENSORS.items())


SPLITS: list[tuple[Split, ...]] = [
    (),
    (Split(dim=0, axis="tensor"),),
    (Split(dim=1, axis="tensor"),),
    (Split(dim=2, axis="tensor"),),
    (Split(dim=1, axis="tensor", parts=(((0, 2), (4, 5)), ((2, 4), (5, 6)))),),
]


def parts_of(whole: torch.Tensor, splits: tuple[Split, ...], kept: int) -> Iterator[tuple[torch.Tensor, Layout, int]]:
    """What each of two tensor ranks has of a tensor, cut into flat ranges of `kept` elements if that is not 0."""
    for place in range(2 if splits else 1):
        layout = Layout(global_shape=tuple(whole.shape), splits=splits)
        sizes, coordinates = {"tensor": 2}, {"tensor": place}
        local = torch.empty(layout.local_shape(sizes, coordinates), dtype=whole.dtype)
        for there, here in layout.windows(sizes, coordinates):
            local[here] = whole[there]
        if not kept:
            yield local, layout, place
        for first in range(0, local.numel() if kept else 0, max(kept, 1)):
            span = first, min(first + kept, local.numel())
            yield (
                local.flatten()[slice(*span)].clone(),
                Layout(global_shape=tuple(whole.shape), splits=splits, flat_range=span),
                place,
            )


@pytest.mark.parametrize("kept", [0, 7])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("kind", ["plain", "turned", "wider"])
def test_parts_find_their_places(
    tmp_path: Path, splits: tuple[Split, ...], kept: int, chunk_bytes: int, kind: str
) -> None:
    """Turned: not contiguous in memory. Wider: of another dtype than the file's."""
    whole = torch.randn(5, 6, 4)
    entry = Entry(name="x", dtype=whole.dtype, shape=(5, 6, 4))
    made = TensorFile(name="file", entries=(entry,), metadata={})
    made.create(tmp_path)
    file, staging = os.open(tmp_path / "file", os.O_WRONLY), Staging(HOST)

    def laid_out(part: torch.Tensor) -> torch.Tensor:
        if kind != "turned" or part.dim() < 2:
            return part.clone()
        return part.transpose(0, 1).contiguous().transpose(0, 1)

    with mock.patch.object(tensor_bytes, "CHUNK_BYTES", chunk_bytes):
        for part, layout, place in parts_of(whole, splits, kept):
            runs = layout.runs({"tensor": 2}, {"tensor": place})
            write_runs(file, made.starts["x"], laid_out(part), runs, staging)
        os.close(file)
        assert torch.equal(load_file(tmp_path / "file")["x"], whole)
        with TensorReader(tmp_path, ["file"], HOST) as reader:
            for part, layout, place in parts_of(whole, splits, kept):
                into = laid_out(torch.zeros_like(part, dtype=torch.float64 if kind == "wider" else part.dtype))
                reader.read("x", into, layout.runs({"tensor": 2}, {"tensor": place}))
                assert torch.equal(into, part.to(into.dtype))


def test_files_depend_on_names_and_sizes_alone() -> None:
    entries = [Entry(name=f"blocks.{n}.weight", dtype=torch.float32, shape=(10,)) for n in range(12)]
    entries.append(Entry(name="large", dtype=torch.float32, shape=(100,)))
    files = pack("model", random.sample(entries, len(entries)), 200)
    assert list(map(vars, files)) == list(map(vars, pack("model", entries, 200)))
    assert [file.name for file in files] == [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    assert [entry.name for file in files for entry in file.entries] == [entry.name for entry in entries]
    assert [sum(entry.num_bytes for entry in file.entries) for file in files] == [200, 200, 80, 400]
    assert pack("model", [], 200) == []


def test_every_tensor_starts_at_a_multiple_of_its_dtypes_size(tmp_path: Path) -> None:
    made = write(tmp_path, {"a": torch.tensor([True]), "b": torch.ones(1), "c": torch.ones(1, dtype=torch.float64)})
    assert all(made.starts[name] % size == 0 for name, size in (("a", 1), ("b", 4), ("c", 8)))
    with safe_open(tmp_path / made.name, framework="pt") as file:
        assert float(file.get_tensor("c")) == 1.0


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [0, 1, 1024, 5000, 100_000])
def test_replicas_write_everything_once(numel: int, num_replicas: int) -> None:
    for number in range(4):
        shares = [share_of_replica(numel, place, num_replicas, number) for place in range(num_replicas)]
        assert sorted(element for share in shares for element in range(*share)) == list(range(numel))


def test_small_tensors_go_to_all_replicas_in_turn() -> None:
    writers = [[share_of_replica(10, place, 3, number) for place in range(3)].index((0, 10)) for number in range(3)]
    assert sorted(writers) == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"{]",
        (2).to_bytes(8, "little") + b"[]",
        *(
            len(text := json.dumps({"x": one}).encode()).to_bytes(8, "little") + text
            for one in (
                {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                {"dtype": "F32", "shape": [4], "data_offsets": [0, 0]},
                {"dtype": "F7", "shape": [0], "data_offsets": [0, 0]},
                {"shape": [0]},
            )
        ),
    ],
)
def test_something_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="file is not a whole safetensors file"):
        TensorReader(tmp_path, ["file"], HOST)


def record_of(folder: Path, name: str, piece_bytes: int = 16) -> FileRecord:
    size = (folder / name).stat().st_size
    pieces = pieces_of([(name, max(-(-size // piece_bytes), 1))], rank=0, num_ranks=1)
    return FileRecord(
        name=name, num_bytes=size, crc32=tuple(checksums(folder, pieces, piece_bytes)), piece_bytes=piece_bytes
    )


def test_ranks_share_all_pieces_out() -> None:
    shares = [pieces_of([("a", 7), ("b", 1), ("c", 1)], rank=rank, num_ranks=4) for rank in range(4)]
    assert [piece for share in shares for piece in share] == [*(("a", n) for n in range(7)), ("b", 0), ("c", 0)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_every_bit_counts(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.arange(4.0)}, "file")
    record = record_of(tmp_path, "file")
    content = (tmp_path / "file").read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.randrange(8)
        (tmp_path / "file").write_bytes(damaged)
        found = [find_damage(tmp_path, [record], rank=rank, num_ranks=3) for rank in range(3)]
        assert sum(map(len, found)) == 1
        assert f"its piece {place // 16 + 1} of {len(record.crc32)} is" in next(one[0] for one in found if one)


def test_what_is_wrong_is_said_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(tmp_path, TENSORS, "file")
    record = record_of(tmp_path, "file")
    assert find_damage(tmp_path, [record]) == []
    os.truncate(path, 100)
    assert f"has 100 bytes, its index says {record.num_bytes}" in find_damage(tmp_path, [record])[0]
    path.unlink()
    assert find_damage(tmp_path, [record]) == [f"{path} cannot be read: No such file or directory"]
    path.mkdir()
    assert len(find_damage(tmp_path, [record])) == 1
