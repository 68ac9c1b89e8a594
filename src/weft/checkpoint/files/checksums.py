"""CRC-32 checksums of a checkpoint's files, per piece of 16 MiB, so that ranks share the work of computing them.

CRC-32, because zlib computes it several times faster than a disk reads, and it detects every burst of up to 32 bits.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.files.file_io import read_at
from weft.layout import part_of

PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's entry in a checkpoint's index."""

    name: str
    num_bytes: int
    crc32: Sequence[int]
    """The checksum of each piece."""
    piece_bytes: int = PIECE_BYTES


Piece = tuple[str, int]
"""A file's name and the number of one of its pieces."""


def pieces_of(counts: Iterable[tuple[str, int]], *, rank: int, num_ranks: int) -> list[Piece]:
    """This rank's share of the pieces of files, given by name and number of pieces."""
    pieces = [(name, number) for name, count in counts for number in range(count)]
    return pieces[slice(*part_of(len(pieces), rank, num_ranks))]


def num_pieces(num_bytes: int) -> int:
    return max(-(-num_bytes // PIECE_BYTES), 1)


def checksums(folder: Path, pieces: Iterable[Piece], piece_bytes: int = PIECE_BYTES) -> list[int]:
    """The checksum of each piece; pieces of one file must be consecutive."""
    found: list[int] = []
    memory = memoryview(bytearray(_READ_BYTES))
    for name, inside in itertools.groupby(pieces, key=lambda piece: piece[0]):
        with (folder / name).open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            for _, number in inside:
                value, place = 0, number * piece_bytes
                stop = min(place + piece_bytes, size)
                while place < stop:
                    chunk = memory[: min(_READ_BYTES, stop - place)]
                    read_at(file.fileno(), chunk, place)
                    value, place = zlib.crc32(chunk, value), place + len(chunk)
                found.append(value)
    return found


def find_damage(folder: Path, records: Sequence[FileRecord], *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Problems in this rank's share of the files, at most one per file."""
    by_name = {record.name: record for record in records}
    pieces = pieces_of([(each.name, len(each.crc32)) for each in records], rank=rank, num_ranks=num_ranks)
    by_file = itertools.groupby(pieces, key=lambda piece: piece[0])
    problems = (_damage_of(folder / name, by_name[name], list(inside)) for name, inside in by_file)
    return [problem for problem in problems if problem is not None]


def _damage_of(path: Path, record: FileRecord, pieces: Sequence[Piece]) -> str | None:
    try:
        found_bytes = path.stat().st_size
        if found_bytes != record.num_bytes:
            return f"{path} has {found_bytes} bytes, its index says {record.num_bytes}; it is cut short or replaced"
        found = checksums(path.parent, pieces, record.piece_bytes)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    for (_, number), value in zip(pieces, found, strict=True):
        if value != record.crc32[number]:
            return (
                f"{path} is damaged: the checksum of its piece {number + 1} of {len(record.crc32)} is {value:08x}, "
                f"its index says {record.crc32[number]:08x}"
            )
    return None
