"""Tensors in safetensors files: who writes which, with a checksum of every file, and reading back just a part.

The names and shapes are the unsplit model's, so any tool that reads safetensors reads these.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a checkpoint's index says of one file."""

    name: str
    num_bytes: int
    crc32: int


def share_out(sizes: Mapping[str, int], num_writers: int) -> list[list[str]]:
    """Which writer writes which tensor: largest first, each to the writer with least to do."""
    shares: list[list[str]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += sizes[name]
    return shares


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> FileRecord:
    """Write tensors to a file that is safely on the disk when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # it wraps what the system said, such as a full disk
        raise OSError(0, str(error), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files for its user alone, whatever the umask
    return seal(path)


def seal(path: Path) -> FileRecord:
    """Force a file to the disk and take its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(name=path.name, num_bytes=path.stat().st_size, crc32=checksum_file(path))


def checksum_file(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def find_damage(directory: Path, record: FileRecord) -> str | None:
    """What is wrong with a file, or None."""
    path = directory / record.name
    try:
        found_bytes = path.stat().st_size
        if found_bytes != record.num_bytes:
            return f"{path} has {found_bytes} bytes, its index says {record.num_bytes}; it is cut short or replaced"
        found = checksum_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found != record.crc32:
        return f"{path} is damaged: its checksum is {found:08x}, its index says {record.crc32:08x}"
    return None


class TensorReader:
    """Reads tensors, or regions of them, out of the files of a checkpoint; each file is opened once."""

    def __init__(self, directory: Path, file_of: Mapping[str, str]) -> None:
        self._directory = directory
        self._file_of = file_of
        self._open: dict[str, object] = {}

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or a region of it."""
        if region is None:
            whole: torch.Tensor = self._file(name).get_tensor(name)
            return whole
        part: torch.Tensor = self._file(name).get_slice(name)[region]
        return part

    def read_range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some elements of the flattened tensor; only the rows that hold them are read."""
        shape = self.shape(name)
        row = math.prod(shape[1:])
        if not shape or row == 0:
            return self.read(name).flatten()[start:stop]
        first, last = start // row, -(-stop // row)
        rows = self.read(name, (slice(first, max(last, first)),))
        return rows.flatten()[start - first * row : stop - first * row]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        file_name = self._file_of.get(name)
        if file_name is None:
            raise CheckpointError(f'{self._directory} holds no tensor "{name}"')
        if file_name not in self._open:
            self._open[file_name] = safe_open(self._directory / file_name, framework="pt")
        return self._open[file_name]
