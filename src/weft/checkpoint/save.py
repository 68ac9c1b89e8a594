"""Saving a checkpoint: take what it is to hold, write it with all ranks at once, and give it its name when it is whole.

    1 take        what each rank writes, as it is now; saved in the background, a copy of it in host memory
    2 create      rank 0 makes the folder under a temporary name; files get their headers and lengths
    3 write       every rank writes its parts straight to their places
    4 checksum    all pieces of all files, shared out over the ranks, while the disk is still busy with 3
    5 publish     everything is on the disk, the index is written, and the folder is renamed

Whatever goes wrong on one rank before 5 is known to all of them, and nothing has changed. In the background 2 to 5 run
in a thread with a group of its own, so training goes on. There is one save at a time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.checksums import PIECE_BYTES, FileRecord, checksums, pieces_of
from weft.checkpoint.file_io import Staging, flat_range, write_runs
from weft.checkpoint.folders import INDEX, publish, refuse_foreign, restore
from weft.checkpoint.safetensors import TensorFile
from weft.checkpoint.snapshot import HostCopies, Snapshot, Stretch, take
from weft.checkpoint.state import TrainerState
from weft.comm.agree import try_on_files
from weft.comm.group import Group, Traffic
from weft.errors import CheckpointError

log = logging.getLogger("weft")


def write(snapshot: Snapshot, directory: Path, group: Group) -> None:
    """Write a checkpoint; every rank of the group calls it. An older one of that name is replaced in the end."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        headers = zlib.crc32(b"".join(file.header for file in snapshot.files))
        if len(set(try_on_files(group, "create", partial, lambda: headers))) > 1:
            raise CheckpointError(
                "ranks would write different files: their parameters or optimizer states differ in name, shape or dtype"
            )
        try_on_files(group, "create", partial, lambda: _make_folder(directory, partial) if group.index == 0 else None)
        try_on_files(group, "create", partial, lambda: _create_files(snapshot, partial, group))
        own = try_on_files(group, "write", partial, lambda: _write_tensors(snapshot, partial))
        sizes = [(file.name, file.num_bytes) for file in snapshot.files] + [(name, size) for name, size in own]
        found = try_on_files(group, "checksum", partial, lambda: _seal(snapshot, partial, sizes, group))
        crc32 = [value for part in found for value in part]
        try_on_files(
            group, "finish", directory, lambda: _finish(snapshot, partial, directory, sizes, crc32, group.index == 0)
        )
    except CheckpointError as error:
        if group.index == 0:
            restore(directory)
            shutil.rmtree(partial, ignore_errors=True)  # where the disk is full, half a checkpoint is in the way
        raise CheckpointError([*error.problems, "nothing was saved; older checkpoints are untouched"]) from error


def _make_folder(directory: Path, partial: Path) -> None:
    restore(directory)
    refuse_foreign(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _create_files(snapshot: Snapshot, partial: Path, group: Group) -> None:
    if not partial.is_dir():
        raise FileNotFoundError(
            2, "rank 0 made it, but it is not here: checkpoints need a folder all hosts share", partial
        )
    for file in _sealed_here(snapshot, group):
        file.create(partial)


def _sealed_here(snapshot: Snapshot, group: Group) -> Sequence[TensorFile]:
    """The files that this rank makes."""
    return [*snapshot.files[group.index :: group.size], snapshot.own_file]


def _write_tensors(snapshot: Snapshot, partial: Path) -> tuple[str, int]:
    """Everything this rank writes; file by file, each from its start to its end."""
    staging = Staging(snapshot.device)
    by_file: dict[str, list[Stretch]] = {}
    for stretch in snapshot.stretches:
        by_file.setdefault(stretch.file, []).append(stretch)
    for name, inside in by_file.items():
        file = os.open(partial / name, os.O_WRONLY)
        try:
            for stretch in sorted(inside, key=lambda one: one.start_byte):
                part = flat_range(stretch.tensor, *stretch.span)
                write_runs(file, stretch.start_byte, part, stretch.runs, staging)
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(partial / name)) from error
        finally:
            os.close(file)
    return snapshot.own_file.name, snapshot.own_file.num_bytes


def _seal(snapshot: Snapshot, partial: Path, sizes: list[tuple[str, int]], group: Group) -> list[int]:
    """This rank's share of all checksums; and what it wrote on the disk."""
    pieces = pieces_of([(*one, PIECE_BYTES) for one in sizes], rank=group.index, num_ranks=group.size)
    found = checksums(partial, pieces)
    # What others made too: only what this host wrote can be forced from here.
    touched = {file.name for file in _sealed_here(snapshot, group)} | {stretch.file for stretch in snapshot.stretches}
    for name in sorted(touched):
        _force_to_disk(partial / name)
    return found


def _finish(
    snapshot: Snapshot,
    partial: Path,
    directory: Path,
    sizes: list[tuple[str, int]],
    crc32: list[int],
    is_first: bool,
) -> None:
    if is_first:
        _write_index(snapshot, partial, sizes, crc32)
        publish(partial, directory)


def _write_index(snapshot: Snapshot, partial: Path, sizes: list[tuple[str, int]], crc32: list[int]) -> None:
    values = iter(crc32)
    records = []
    for name, num_bytes in sizes:
        count = max(-(-num_bytes // PIECE_BYTES), 1)
        records.append(FileRecord(name=name, num_bytes=num_bytes, crc32=tuple(next(values) for _ in range(count))))
    for name, text in snapshot.texts.items():
        (partial / name).write_text(text, encoding="utf-8")
        _force_to_disk(partial / name)
        content = text.encode()
        records.append(
            FileRecord(
                name=name, num_bytes=len(content), crc32=(zlib.crc32(content),), piece_bytes=max(len(content), 1)
            )
        )
    index = {**snapshot.facts, "files": [asdict(record) for record in records]}
    index["crc32"] = index_checksum(index)
    (partial / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    _force_to_disk(partial / INDEX)


def index_checksum(index: dict[str, Any]) -> int:
    """Over all that an index says but this."""
    content = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _force_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Saving:
    """Saves of one trainer, one at a time, waited for or in the background."""

    def __init__(self, device: torch.device) -> None:
        self._copies = HostCopies(device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Nothing is being written, and nothing failed that `wait` has yet to raise."""
        # The thread first: it notes what went wrong just before it ends.
        return (self._thread is None or not self._thread.is_alive()) and self._error is None

    def save(self, trainer: TrainerState, directory: Path, *, wait: bool) -> None:
        """Collective, after what is still being saved. With `wait` the checkpoint is whole when this returns."""
        self.wait()
        # What a thread beside the steps waits for is none of theirs, so it is not counted with theirs.
        group = replace(trainer.mesh.everyone("saving"), traffic=Traffic())
        if wait:
            write(take(trainer, None), directory, group)
            return
        snapshot = take(trainer, self._copies)
        # Not a daemon: a program that ends without waiting still leaves a whole checkpoint.
        self._thread = threading.Thread(target=self._write, args=(snapshot, directory, group), name="weft saving")
        self._thread.start()

    def _write(self, snapshot: Snapshot, directory: Path, group: Group) -> None:
        try:
            with torch.no_grad():
                write(snapshot, directory, group)
        except BaseException as error:  # raised by `wait`, in the thread that asked for the save
            self._error = error
            # A CheckpointError is everybody's; anything else may be this rank's alone.
            if group.index == 0 or not isinstance(error, CheckpointError):
                log.error("%s could not be saved; training goes on until the next save: %s", directory, error)

    def wait(self) -> None:
        """Until what is being saved is whole; raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
