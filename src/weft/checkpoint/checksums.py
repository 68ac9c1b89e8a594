"""Checksums of a checkpoint's files, piece by piece, so that all ranks share the work of taking and comparing them.

CRC-32, because zlib's runs at several times a disk's speed on one core and finds every burst of up to 32 bits.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.file_io import read_at
from weft.layout import part_of

PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a checkpoint's index says of one file."""

    name: str
    num_bytes: int
    crc32: tuple[int, ...]
    """Of every piece."""
    piece_bytes: int = PIECE_BYTES

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> FileRecord:
        """As read from an index; in format 1 a file has one checksum."""
        if isinstance(values["crc32"], int):
            whole = max(values["num_bytes"], 1)
            return cls(name=values["name"], num_bytes=values["num_bytes"], crc32=(values["crc32"],), piece_bytes=whole)
        return cls(**{**values, "crc32": tuple(values["crc32"])})


Piece = tuple[str, int]
"""A file's name, and the number of a piece of it."""


def pieces_of(sizes: Iterable[tuple[str, int, int]], *, rank: int, num_ranks: int) -> list[Piece]:
    """This rank's share of all pieces of files given by (name, bytes, bytes of a piece); an empty file has one."""
    pieces = [
        (name, number)
        for name, num_bytes, piece_bytes in sizes
        for number in range(max(-(-num_bytes // piece_bytes), 1))
    ]
    return pieces[slice(*part_of(len(pieces), rank, num_ranks))]


def checksums(folder: Path, pieces: Sequence[Piece], piece_bytes: int = PIECE_BYTES) -> list[int]:
    """Of pieces of files; those of one file come one after another."""
    found: list[int] = []
    memory = memoryview(bytearray(_READ_BYTES))
    for name, inside in itertools.groupby(pieces, key=lambda piece: piece[0]):
        file = os.open(folder / name, os.O_RDONLY)
        try:
            size = os.fstat(file).st_size
            for _, number in inside:
                value, place = 0, number * piece_bytes
                stop = min(place + piece_bytes, size)
                while place < stop:
                    chunk = memory[: min(_READ_BYTES, stop - place)]
                    read_at(file, chunk, place)
                    value, place = zlib.crc32(chunk, value), place + len(chunk)
                found.append(value)
        finally:
            os.close(file)
    return found


def find_damage(folder: Path, records: Sequence[FileRecord], *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """What is wrong with this rank's share of the files, a problem a file at most."""
    by_name = {record.name: record for record in records}
    mine: dict[str, list[int]] = {}
    sizes = [(record.name, record.num_bytes, record.piece_bytes) for record in records]
    for name, number in pieces_of(sizes, rank=rank, num_ranks=num_ranks):
        mine.setdefault(name, []).append(number)
    problems = (_damage_of(folder / name, by_name[name], numbers) for name, numbers in mine.items())
    return [problem for problem in problems if problem is not None]


def _damage_of(path: Path, record: FileRecord, numbers: Sequence[int]) -> str | None:
    try:
        found_bytes = path.stat().st_size
        if found_bytes != record.num_bytes:
            return f"{path} has {found_bytes} bytes, its index says {record.num_bytes}; it is cut short or replaced"
        found = checksums(path.parent, [(path.name, number) for number in numbers], record.piece_bytes)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    for number, value in zip(numbers, found, strict=True):
        if value != record.crc32[number]:
            return (
                f"{path} is damaged: the checksum of its piece {number + 1} of {len(record.crc32)} is {value:08x}, "
                f"its index says {record.crc32[number]:08x}"
            )
    return None
