"""Safetensors files that many ranks write at once: every tensor's offset is known before any of it is written.

    8 bytes: the header's length │ header: JSON, {name: dtype, shape, first and last byte} │ tensors, no gaps

The `safetensors` library writes a file from one process that holds all of it, and reads only whole tensors or slices
along dims; here ranks write and read flat ranges. Which tensors a file has depends on names and sizes alone, never on
the ranks. Names and shapes are the unsplit model's, so any tool that reads safetensors reads these.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.files.file_io import Staging, read_at, read_runs, write_at
from weft.errors import CheckpointError
from weft.layout import Runs

MOST_FILE_BYTES = 5 * 10**9
"""Largest size of a file, unless one tensor is larger."""
_MOST_HEADER_BYTES = 100 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_WORDS = {dtype: word for word, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """The header and the offsets of a file, before it is written."""

    def __init__(self, *, name: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.name, self.entries = name, entries
        # Wide dtypes first, as readers that map a file want every tensor at a multiple of its dtype's size.
        ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        *places, end = itertools.accumulate((entry.num_bytes for entry in ordered), initial=0)
        for entry, place in zip(ordered, places, strict=True):
            offsets = [place, place + entry.num_bytes]
            word = DTYPE_WORDS[entry.dtype]
            described[entry.name] = {"dtype": word, "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        first = len(self.header)
        self.starts = {entry.name: first + place for entry, place in zip(ordered, places, strict=True)}
        """Each tensor's first byte in the file."""
        self.num_bytes = first + end

    def create(self, folder: Path) -> None:
        """Create the file with its header and its full length, without the tensors."""
        with (folder / self.name).open("xb", buffering=0) as file:
            file.truncate(self.num_bytes)
            write_at(file.fileno(), memoryview(self.header), 0)


def pack(kind: str, entries: Iterable[Entry], most_bytes: int) -> list[TensorFile]:
    """Distribute tensors over files in the order of their names, where block 10 comes after block 9."""
    files: list[list[Entry]] = []
    room = 0
    for entry in sorted(entries, key=lambda entry: _natural(entry.name)):
        if not files or entry.num_bytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(entry)
        room -= entry.num_bytes
    names = [f"{kind}-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    metadata = {"format": "pt"}  # transformers requires it
    return [TensorFile(name=name, entries=inside, metadata=metadata) for name, inside in zip(names, files, strict=True)]


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes alone."""
    return f"rank-{rank:05d}.safetensors"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name) if word]


class TensorReader:
    """Reads tensors, or parts of them, from files that stay open until the end of the context."""

    def __init__(self, folder: Path, file_names: Iterable[str], device: torch.device) -> None:
        """Open the files and read their headers; OSError or CheckpointError if that fails."""
        self._folder, self._staging = folder, Staging(device)
        self._files: dict[str, int] = {}
        self._starts: dict[str, tuple[str, int]] = {}
        self.entries: dict[str, Entry] = {}
        """Every tensor in the files, by name."""
        self.metadata: dict[str, dict[str, str]] = {}
        """The metadata of each file."""
        try:
            for name in file_names:
                file = self._files[name] = os.open(folder / name, os.O_RDONLY)
                found, self.metadata[name] = _read_header(file, folder / name)
                for entry, start in found:
                    self.entries[entry.name], self._starts[entry.name] = entry, (name, start)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, name: str, part: torch.Tensor, runs: Iterable[Runs]) -> None:
        """Read this rank's part of a tensor, given as runs."""
        file_name, start = self._starts[name]
        try:
            read_runs(self._files[file_name], start, self.entries[name].dtype, part, runs, self._staging)
        except OSError as error:
            raise CheckpointError(f"{self._folder / file_name} cannot be read: {error.strerror}") from error

    def read_whole(self, name: str) -> torch.Tensor:
        """A new host tensor with all of a tensor."""
        entry = self.entries[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, whole, [Runs(there=0, here=0, numel=whole.numel())] if whole.numel() else [])
        return whole


def _read_header(file: int, path: Path) -> tuple[list[tuple[Entry, int]], dict[str, str]]:
    """Each tensor of a file with its first byte, and the metadata."""
    file_bytes = os.fstat(file).st_size
    try:
        first = bytearray(8)
        read_at(file, memoryview(first), 0)
        header_bytes = int.from_bytes(first, "little")
        if header_bytes > min(file_bytes - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file_bytes}")
        text = bytearray(header_bytes)
        read_at(file, memoryview(text), 8)
        described = json.loads(bytes(text))
        metadata = described.pop("__metadata__", {})
        found = []
        for name, one in described.items():
            if one["dtype"] not in _DTYPES:
                raise ValueError(f'"{name}" has dtype {one["dtype"]}, which is not known')
            entry = Entry(name=name, dtype=_DTYPES[one["dtype"]], shape=tuple(one["shape"]))
            start, stop = one["data_offsets"]
            if stop - start != entry.num_bytes or start < 0 or 8 + header_bytes + stop > file_bytes:
                raise ValueError(f'"{name}" would take bytes {start} to {stop}, which does not fit it or the file')
            found.append((entry, 8 + header_bytes + start))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    return found, metadata
