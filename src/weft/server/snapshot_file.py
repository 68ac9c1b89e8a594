"""A server's files: its last snapshot, whole or not there, and what the first server has decided since.

    saved-0/snapshot    length, JSON of the numbers and of the lengths of all frames, then the frames
    saved-0/decisions   a line of JSON for each, added before anybody is told
    saved-0/known       JSON of the numbers that were given to workers, and of the other servers

A snapshot is written beside the last one, to the disk, and then takes its name. Lines of decisions outlive the process,
not the machine: they are not waited for.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import LaunchError
from weft.server.snapshot import Snapshot

SNAPSHOT, DECISIONS, KNOWN = "snapshot", "decisions", "known"
_LENGTH = struct.Struct("<Q")


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Put a snapshot in the place of the last one."""
    lengths = [[[len(one) for one in frames] for frames in bucket] for bucket in snapshot.buckets]
    header = json.dumps({"plain": snapshot.plain, "lengths": lengths}).encode()
    beside = folder / f"{SNAPSHOT}.being-written"
    with beside.open("wb") as file:
        file.write(_LENGTH.pack(len(header)))
        file.write(header)
        for bucket in snapshot.buckets:
            for frames in bucket:
                for frame in frames:
                    file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(folder / SNAPSHOT)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_snapshot(folder: Path) -> Snapshot | None:
    """The last snapshot in a folder; None if there is none. Raises LaunchError if it is no snapshot."""
    try:
        file = (folder / SNAPSHOT).open("rb")
    except FileNotFoundError:
        return None
    with file:
        try:
            header = json.loads(_read(file, _LENGTH.unpack(_read(file, _LENGTH.size))[0]))
            buckets = [[tuple(_read(file, one) for one in frames) for frames in bucket] for bucket in header["lengths"]]
            return Snapshot(plain=header["plain"], buckets=tuple((state, weights) for state, weights in buckets))
        except (ValueError, KeyError, TypeError, struct.error):
            raise LaunchError(
                f"{folder / SNAPSHOT} is no whole snapshot of a server; begin again from the last checkpoint"
            ) from None


def _read(file: BinaryIO, length: int) -> bytes:
    if length > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("the file ends before")
    return file.read(length)


def write_known(folder: Path, known: dict[str, Any]) -> None:
    """Put plain values in the place of the last ones, for the next process of a server."""
    beside = folder / f"{KNOWN}.being-written"
    beside.write_text(json.dumps(known))
    beside.rename(folder / KNOWN)


def read_known(folder: Path) -> dict[str, Any] | None:
    """What an earlier process has written last; None if there is nothing."""
    try:
        found: dict[str, Any] = json.loads((folder / KNOWN).read_text())
    except FileNotFoundError:
        return None
    return found


class DecisionsFile:
    """Lines that are added one after another."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DECISIONS
        self._file: BinaryIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """All lines that are whole: the last one of a process that was killed may not be."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        self._file.write(_lines(records))

    def replace(self, records: Iterable[dict[str, Any]]) -> None:
        """These alone, at once."""
        beside = self._path.with_suffix(".being-written")
        beside.write_bytes(_lines(records))
        beside.rename(self._path)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(records: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in records)
