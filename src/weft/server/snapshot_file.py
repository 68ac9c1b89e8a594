"""A server's files: its last snapshot, whole or not there, and what the first server has decided since.

    saved-0/snapshot    length, JSON of the numbers and of the lengths of all frames, then the frames
    saved-0/fixed       the same of what is not trained, written once, before the first snapshot
    saved-0/common-120  a snapshot again, which all servers took of this version, and the one before it
    saved-0/decisions   a line of JSON for each, added before anybody is told
    saved-0/known       JSON of the numbers that were given to workers, and of the other servers

A snapshot is written beside the last one, to the disk, and then takes its name. Lines of decisions outlive the process,
not the machine: they are not waited for.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import LaunchError
from weft.server.protocol.message import Buffer
from weft.server.snapshot import Snapshot

SNAPSHOT, DECISIONS, FIXED, KNOWN, COMMON = "snapshot", "decisions", "fixed", "known", "common-"
_COMMON_KEPT = 2
"""Of these: another server may not have written the last one yet. There is a further one when all have."""
_LENGTH = struct.Struct("<Q")


def write_snapshot(folder: Path, snapshot: Snapshot, *, is_common: bool = False) -> None:
    """Put a snapshot in the place of the last one. What is not trained is written with the first one. `is_common`: all
    servers take one of this version."""
    if snapshot.fixed and not (folder / SNAPSHOT).exists():
        _write(folder, FIXED, {"lengths": [_lengths(one) for one in snapshot.fixed]}, snapshot.fixed)
    lengths = [[_lengths(frames) for frames in bucket] for bucket in snapshot.buckets]
    header = {"plain": snapshot.plain, "lengths": lengths, "has_fixed": bool(snapshot.fixed)}
    _write(folder, SNAPSHOT, header, itertools.chain.from_iterable(snapshot.buckets))
    if is_common:
        common = folder / f"{COMMON}{snapshot.version}"
        common.unlink(missing_ok=True)
        try:
            os.link(folder / SNAPSHOT, common)
        except OSError:  # a file system without links
            shutil.copyfile(folder / SNAPSHOT, common)
        for version in common_snapshots(folder)[:-_COMMON_KEPT]:
            (folder / f"{COMMON}{version}").unlink()


def remove_snapshots(parent: Path) -> None:
    """Delete the folders of all servers in this one, and it, if nothing else is there."""
    for folder in parent.glob("saved-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        parent.rmdir()


def common_snapshots(folder: Path) -> list[int]:
    """The versions of which all servers took snapshots, the last one last."""
    found = (path.name.removeprefix(COMMON) for path in folder.glob(f"{COMMON}*"))
    return sorted(int(one) for one in found if one.isdigit())


def _lengths(frames: Iterable[Buffer]) -> list[int]:
    return [len(one) for one in frames]


def _write(folder: Path, name: str, header: dict[str, Any], frames: Iterable[Iterable[Buffer]]) -> None:
    """Write a file beside the one of this name, then let it take the name."""
    beside, head = folder / f"{name}.being-written", json.dumps(header).encode()
    with beside.open("wb") as file:
        file.write(_LENGTH.pack(len(head)))
        file.write(head)
        for frame in itertools.chain.from_iterable(frames):
            file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_snapshot(folder: Path, name: str = SNAPSHOT) -> Snapshot | None:
    """A snapshot in a folder, the last one unless it is named; None if there is none. Raises LaunchError if it is no
    snapshot."""
    if not (folder / name).exists():
        return None
    try:
        with (folder / name).open("rb") as file:
            header = _header(file)
            buckets = [tuple(_frames(file, one) for one in both) for both in header["lengths"]]
        fixed: list[tuple[Buffer, ...]] = []
        if header["has_fixed"]:
            name = FIXED
            with (folder / name).open("rb") as file:
                fixed = [_frames(file, one) for one in _header(file)["lengths"]]
        both = tuple((state, weights) for state, weights in buckets)
        return Snapshot(plain=header["plain"], buckets=both, fixed=tuple(fixed))
    except (ValueError, KeyError, TypeError, struct.error, FileNotFoundError):
        raise LaunchError(
            f"{folder / name} is no whole snapshot of a server; begin again from the last checkpoint"
        ) from None


def _header(file: BinaryIO) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_read(file, _LENGTH.unpack(_read(file, _LENGTH.size))[0]))
    return found


def _frames(file: BinaryIO, lengths: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple(_read(file, one) for one in lengths)


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
