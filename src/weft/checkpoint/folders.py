"""Folders of checkpoints on the disk: one appears whole, is replaced whole, and goes when newer ones have come.

    .step-100.partial   being written
    step-100            whole: it got this name by one rename when everything in it was on the disk
    .step-100.old       the one before of that name, moved aside for the moment in which the new one takes its place

A kill between the last two leaves the older one aside; `restore` gives it its name back, and whoever lists, loads,
saves or prunes calls it. All of this is for one rank, except listing.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from weft.checkpoint.hugging_face import CONFIG, GENERATION_CONFIG
from weft.errors import CheckpointError

INDEX = "checkpoint.json"
log = logging.getLogger("weft")
_OWN_FILE = re.compile(r"checkpoint\.json|model\.safetensors\.index\.json|(model|optimizer|rank)-[\dof-]+\.safetensors")
_ONLY_OURS = ("optimizer-", "rank-")
"""How names begin that folders of other tools do not have."""


def all_checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints `step-N` in a directory, oldest first."""
    steps = {int(path.name[5:]) for path in directory.glob("step-*") if path.name[5:].isdigit()}
    steps |= {int(path.name[6:-4]) for path in directory.glob(".step-*.old") if path.name[6:-4].isdigit()}
    found = [directory / f"step-{step}" for step in sorted(steps)]
    return [path for path in found if (path / INDEX).is_file() or _is_aside(path)]


def prune(directory: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of a directory, and what killed saves left. For one rank only.

    What cannot be deleted stays, with a warning: it is no reason to end a run.
    """
    for path in all_checkpoints(directory):
        _try(restore, path)
    for path in all_checkpoints(directory)[:-keep]:
        _try(_delete, path)
    unfinished = [path for path in directory.glob("step-*") if path.name[5:].isdigit() and not (path / INDEX).exists()]
    for path in [*directory.glob(".step-*.partial"), *directory.glob(".step-*.old"), *filter(_is_ours, unfinished)]:
        _try(_delete, path)


def publish(partial: Path, directory: Path) -> None:
    """Give a whole folder its name. An older one of that name is moved aside first and deleted last."""
    old = _aside(directory)
    _delete(old)
    _sync_folder(partial)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    try:
        _sync_folder(directory.parent)
    except OSError:  # whoever is told that nothing was saved finds it so
        directory.rename(partial)
        restore(directory)
        raise
    _try(_delete, old)


def restore(directory: Path) -> None:
    """Undo a replacement that was cut off when the older checkpoint had no name and the newer one none yet."""
    if _is_aside(directory):
        _aside(directory).rename(directory)


def refuse_foreign(directory: Path) -> None:
    """Saving over a checkpoint deletes it; nothing else may go that way."""
    if directory.exists() and not _is_ours(directory):
        raise CheckpointError(f"{directory} exists and is not a checkpoint; give a name that is free")


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _is_aside(directory: Path) -> bool:
    return not directory.exists() and (_aside(directory) / INDEX).is_file()


def _delete(path: Path) -> None:
    """Delete a checkpoint: its index first, for without it the rest no longer counts, should that take long or fail.

    Then what others' folders have too: with it, what is left could not be told from somebody's model. OSError if one of
    these stays; where it is the index, the checkpoint is still whole.
    """
    for name in (INDEX, CONFIG, GENERATION_CONFIG):
        (path / name).unlink(missing_ok=True)
    for file in path.glob("model*"):
        file.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _try(action: Callable[[Path], None], path: Path) -> None:
    try:
        action(path)
    except OSError as error:
        log.warning("%s stays as it is: %s", error.filename or path, error.strerror or error)


def _sync_folder(path: Path) -> None:
    """Force a folder's list of names to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one, and may be deleted."""
    if not path.is_dir():
        return False
    names = [entry.name for entry in path.iterdir()]
    if INDEX in names or not names:
        return True
    return all(map(_OWN_FILE.fullmatch, names)) and any(name.startswith(_ONLY_OURS) for name in names)
