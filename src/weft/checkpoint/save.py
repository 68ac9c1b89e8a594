"""Saving a checkpoint: all ranks write their parts at once, and the folder is renamed when it is complete.

    1 take        a snapshot of what each rank writes; for a save in the background, a copy in host memory
    2 create      rank 0 makes the folder under a temporary name; files get their headers and lengths
    3 write       every rank writes its parts directly at their offsets
    4 checksum    all pieces of all files, divided among the ranks, while the disk is still busy with 3
    5 publish     everything is on the disk, the index is written, and the folder is renamed

An error on one rank before 5 is raised on all of them, and nothing has changed. In the background, 2 to 5 run in a
thread with its own process group while training continues. There is one save at a time.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import shutil
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.files.agree import try_on_files
from weft.checkpoint.files.checksums import FileRecord, checksums, num_pieces, pieces_of
from weft.checkpoint.files.file_io import Staging, flat_range, force_to_disk, write_runs
from weft.checkpoint.files.safetensors import TensorFile
from weft.checkpoint.finite import refuse_not_finite
from weft.checkpoint.folders import INDEX, publish, refuse_foreign, restore
from weft.checkpoint.snapshot import Snapshot, take, take_weights
from weft.checkpoint.state import Averaging, TrainerState
from weft.checkpoint.worker_parts import collect, save_worker_part
from weft.comm.group import Group, Traffic
from weft.errors import CheckpointError

log = logging.getLogger("weft")


def write(snapshot: Snapshot, directory: Path, group: Group) -> None:
    """Write a checkpoint; collective. An older one of that name is replaced in the end."""
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
        if snapshot.awaited is not None:
            own += try_on_files(group, "collect", partial, lambda: _of_others(snapshot, partial, directory, group))
        sizes = [(file.name, file.num_bytes) for file in snapshot.files]
        sizes += [(name, size) for files in own for name, size in files]
        found = try_on_files(group, "checksum", partial, lambda: _seal(snapshot, partial, sizes, group))
        crc32 = itertools.chain.from_iterable(found)

        def finish() -> None:
            if group.index == 0:
                _write_index(snapshot, partial, sizes, crc32)
                publish(partial, directory)

        try_on_files(group, "finish", directory, finish)
    except CheckpointError as error:
        if group.index == 0:
            restore(directory)
            shutil.rmtree(partial, ignore_errors=True)  # frees the space of half a checkpoint on a full disk
        raise CheckpointError([*error.problems, "nothing was saved; older checkpoints are untouched"]) from error


def _make_folder(directory: Path, partial: Path) -> None:
    restore(directory)
    refuse_foreign(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _create_files(snapshot: Snapshot, partial: Path, group: Group) -> None:
    if not partial.is_dir():
        problem = "rank 0 made it, but it is not here: checkpoints need a folder all hosts share"
        raise FileNotFoundError(errno.ENOENT, problem, partial)
    for file in _created_here(snapshot, group):
        file.create(partial)


def _created_here(snapshot: Snapshot, group: Group) -> Sequence[TensorFile]:
    return [*snapshot.files[group.index :: group.size], *snapshot.own_files]


def _write_tensors(snapshot: Snapshot, partial: Path) -> list[tuple[str, int]]:
    """Write this rank's parts; returns the names and sizes of files that it writes alone."""
    staging = Staging(snapshot.device)
    starts = {file.name: file.starts for file in (*snapshot.files, *snapshot.own_files)}
    for name, parts in snapshot.parts.items():
        try:
            with (partial / name).open("r+b", buffering=0) as file:
                for part in parts:
                    values = flat_range(part.tensor, *part.span)
                    write_runs(file.fileno(), starts[name][part.entry.name], values, part.runs, staging)
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(partial / name)) from error
    return [(file.name, file.num_bytes) for file in snapshot.own_files]


def _of_others(snapshot: Snapshot, partial: Path, directory: Path, group: Group) -> list[tuple[str, int]]:
    return collect(snapshot.awaited, partial, directory) if snapshot.awaited is not None and group.index == 0 else []


def _seal(snapshot: Snapshot, partial: Path, sizes: list[tuple[str, int]], group: Group) -> list[int]:
    """This rank's share of the checksums; also forces what it wrote to the disk."""
    pieces = pieces_of([(name, num_pieces(size)) for name, size in sizes], rank=group.index, num_ranks=group.size)
    found = checksums(partial, pieces)
    # Also files that other ranks created, because a host can force only its own writes.
    for name in sorted({file.name for file in _created_here(snapshot, group)} | snapshot.parts.keys()):
        force_to_disk(partial / name)
    return found


def _write_index(snapshot: Snapshot, partial: Path, sizes: list[tuple[str, int]], crc32: Iterator[int]) -> None:
    """Write the files that one rank writes, last of all the index."""
    records = [
        FileRecord(name=name, num_bytes=num_bytes, crc32=tuple(itertools.islice(crc32, num_pieces(num_bytes))))
        for name, num_bytes in sizes
    ]
    for name, content in snapshot.others.items():
        _write_bytes(partial / name, content)
        crc, size = zlib.crc32(content), len(content)
        records.append(FileRecord(name=name, num_bytes=size, crc32=(crc,), piece_bytes=max(size, 1)))
    if snapshot.facts is None:
        return
    index = {**snapshot.facts, "files": [asdict(record) for record in records]}
    index["crc32"] = index_checksum(index)
    _write_bytes(partial / INDEX, json.dumps(index, indent=1).encode())


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    force_to_disk(path)


def index_checksum(index: dict[str, Any]) -> int:
    """The checksum of an index's content without its own checksum."""
    content = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class Saving:
    """The saves of one trainer, one at a time, waited for or in the background."""

    def __init__(self, device: torch.device) -> None:
        self._copies = Staging(device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing is being written and `wait` has no error left to raise."""
        # The thread first: it stores its error just before it ends.
        return (self._thread is None or not self._thread.is_alive()) and self._error is None

    def save(self, trainer: TrainerState, directory: Path, *, wait: bool, writes: bool = True) -> None:
        """Save after the previous save has ended; collective. With `wait`, returns when the checkpoint is complete.

        Unless this worker of parameter servers `writes`, it gives its part to the one that does."""
        if not writes:
            save_worker_part(trainer, directory)
            return
        group = self._wait_for_all(trainer)
        for one in (trainer, *trainer.others):
            refuse_not_finite(one, directory)
        if wait:
            write(take(trainer, None), directory, group)
            return
        snapshot = take(trainer, self._copies)
        # Not a daemon: a program that ends without waiting still completes the checkpoint.
        self._thread = threading.Thread(target=self._write, args=(snapshot, directory, group), name="weft saving")
        trainer.mesh.process_groups.background_save = self._thread
        self._thread.start()

    def export(self, trainer: TrainerState, directory: Path, average: Averaging | None) -> None:
        """Write the weights alone, or their average, after the previous save has ended; collective."""
        group = self._wait_for_all(trainer)
        refuse_not_finite(trainer, directory)
        write(take_weights(trainer, average), directory, group)

    def _wait_for_all(self, trainer: TrainerState) -> Group:
        """Wait for earlier saves, also of other trainers on this mesh; returns the group of all ranks that save."""
        self.wait()
        before = trainer.mesh.process_groups.background_save
        if before is not None:  # of another trainer on this mesh; the order of saves is the same on all ranks
            before.join()
        # The waits of a thread that runs beside the steps must not count as theirs.
        return replace(trainer.mesh.everyone("saving"), traffic=Traffic())

    def _write(self, snapshot: Snapshot, directory: Path, group: Group) -> None:
        try:
            with torch.no_grad():
                write(snapshot, directory, group)
        except BaseException as error:  # raised by `wait`, in the thread that asked for the save
            self._error = error
            # A CheckpointError is raised on all ranks; any other error may be this rank's alone.
            if group.index == 0 or not isinstance(error, CheckpointError):
                log.error("%s could not be saved; training goes on until the next save: %s", directory, error)

    def wait(self) -> None:
        """Wait until the save has ended; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
