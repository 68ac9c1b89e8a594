"""A run's folder is tried before the first step: every rank sees it, every rank can write there, and it has room.

    1 rank 0     makes the folder and writes a file with a number drawn for this run
    2 every rank reads that file, and writes and deletes one of its own
    3 rank 0     deletes its file, and compares the free space with the checkpoints to come

All problems of all ranks are raised on every rank, once per host. Without this, the first checkpoint would find them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.comm.objects import gather_values
from weft.errors import JobError
from weft.training.run.job import Steps
from weft.training.setup.probe_optimizer import OptimizerFactory, num_states
from weft.training.trainer import Trainer
from weft.units import format_bytes, name_ranks

_NAME = ".weft-probe"
_SECONDS_UNTIL_SEEN = 5.0
"""Shared file systems may show a new file to other hosts some seconds late."""


class _NotSharedError(Exception):
    """What rank 0 wrote is not there for this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The checkpoints that a folder will hold besides those that are there."""

    num_checkpoints: int
    values_per_parameter: int
    """The weight, and what the optimizer keeps of it."""


def room_for(steps: Steps, make_optimizer: OptimizerFactory, *, there: int) -> Room:
    """The room that a run needs in a folder with `there` checkpoints of its own."""
    num_saved = -(-steps.total // steps.save_every) if steps.save_every else 1
    at_once = min(steps.keep + 1, num_saved)  # an old one is deleted when the new one is complete
    return Room(num_checkpoints=max(at_once - there, 1), values_per_parameter=1 + num_states(make_optimizer))


def require_usable(directory: Path, trainer: Trainer, room: Room) -> None:
    """Raise on every rank if the folder cannot be used by all of them, or has too little room; collective."""
    everyone, rank = trainer.mesh.everyone("control"), trainer.mesh.world.rank
    name = f"{_NAME}-of-{trainer.mesh.ranks_before}"  # workers of servers look each by itself
    drawn = secrets.token_hex(8) if rank == 0 else ""
    problem = _attempt(directory, lambda: _make(directory / name, drawn)) if rank == 0 else None
    (token, failed), *_ = gather_values([drawn, problem], everyone)
    if failed is not None:
        raise JobError(failed)
    problem = _attempt(directory, lambda: _read_and_write(directory / name, token, rank))
    found = gather_values([socket.gethostname(), problem], everyone)
    if rank == 0:
        (directory / name).unlink(missing_ok=True)
    hosts: dict[tuple[str, str], list[int]] = {}
    for number, (host, text) in enumerate(found):
        if text is not None:
            hosts.setdefault((host, text), []).append(number)
    problems = [f"{name_ranks(ranks)} on {host}: {text}" for (host, text), ranks in hosts.items()]
    free = gather_values(_free_bytes(directory) if rank == 0 else None, everyone)[0]
    item_bytes = max((piece.tensor.element_size() for piece in trainer.sync.pieces), default=4)
    values = room.values_per_parameter + (trainer.average is not None)
    if trainer.mesh.num_replicas > 1:  # besides their mean, each one's own state
        values *= 1 + trainer.mesh.num_replicas
    each = max(gather_values(trainer.num_parameters * item_bytes * values, everyone))
    if free is not None and free < (needed := room.num_checkpoints * each):
        problems.append(
            f"{directory} has {format_bytes(free)} free; {room.num_checkpoints} checkpoints of about "
            f"{format_bytes(each)} need {format_bytes(needed)}: make room, give another directory, or keep fewer "
            "([steps] keep, save_every)"
        )
    if problems:
        raise JobError(problems)


def _free_bytes(directory: Path) -> int | None:
    usage = shutil.disk_usage(directory)
    return usage.free if usage.total else None  # some network file systems do not know their size


def _make(file: Path, token: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(token)


def _read_and_write(file: Path, token: str, rank: int) -> None:
    deadline = time.monotonic() + _SECONDS_UNTIL_SEEN
    while not file.is_file() or file.read_text() != token:
        if time.monotonic() > deadline:
            raise _NotSharedError(
                f"{file.parent} does not show the file that rank 0 wrote there; give a folder that all hosts share"
            )
        _ask_anew(file.parent)
        time.sleep(0.05)
    own = file.with_name(f"{file.name}-{rank}")
    own.write_text(token)
    own.unlink()


def _ask_anew(directory: Path) -> None:
    """Let the file system look for a folder again, of whose parents several may be new: NFS remembers that something
    was not there until the folder above it is opened."""
    seen = next((folder for folder in (directory, *directory.parents) if folder.is_dir()), directory)
    with suppress(OSError):
        os.listdir(seen)


def _attempt(directory: Path, action: Callable[[], None]) -> str | None:
    """What went wrong in an action on the folder."""
    try:
        action()
    except _NotSharedError as error:
        return str(error)
    except OSError as error:
        return f"cannot write to {error.filename or directory}: {error.strerror or error}"
    return None
