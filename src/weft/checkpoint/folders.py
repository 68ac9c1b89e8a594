"""Publishes, replaces, lists and deletes checkpoint folders, so that a folder named `step-N` is always complete.

    .step-100.partial   being written
    .step-100.workers   what other workers of parameter servers add to it (`worker_parts.py`)
    step-100            complete: renamed when everything in it was on the disk
    .step-100.old       its predecessor of the same name, moved aside while the new one is renamed

A kill between the two renames leaves only the predecessor, moved aside; `restore` renames it back, and loading, saving
and pruning call it first. Only one rank may call these functions, except `all_checkpoints`.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from weft.checkpoint.files.file_io import force_to_disk
from weft.checkpoint.files.hugging_face import CONFIG, GENERATION_CONFIG, is_companion
from weft.errors import CheckpointError

INDEX = "checkpoint.json"
log = logging.getLogger("weft")
_OWN_FILE = re.compile(
    r"checkpoint\.json|model\.safetensors\.index\.json|(model|optimizer|average|codec|rank|worker)-[\dof-]+\.safetensors"
)
_ONLY_OURS = ("optimizer-", "rank-")
"""Prefixes of file names that only weft writes."""


def all_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints `step-N` in a directory, oldest first."""
    steps = {int(path.name[5:]) for path in directory.glob("step-*") if path.name[5:].isdigit()}
    steps |= {int(path.name[6:-4]) for path in directory.glob(".step-*.old") if path.name[6:-4].isdigit()}
    found = [directory / f"step-{step}" for step in sorted(steps)]
    return [path for path in found if (path / INDEX).is_file() or _is_aside(path)]


def prune(directory: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of a directory, and the remains of killed saves.

    A folder that cannot be deleted stays, with a warning: that is no reason to end a run.
    """
    for path in all_checkpoints(directory):
        _try(restore, path)
    for path in all_checkpoints(directory)[:-keep]:
        _try(_delete, path)
    newest = max((int(path.name[5:]) for path in all_checkpoints(directory)), default=-1)
    for path in directory.glob(".step-*.workers"):  # that came too late
        if path.name[6:-8].isdigit() and int(path.name[6:-8]) <= newest:
            _try(_delete, path)
    unfinished = [path for path in directory.glob("step-*") if path.name[5:].isdigit() and not (path / INDEX).exists()]
    for path in [*directory.glob(".step-*.partial"), *directory.glob(".step-*.old"), *filter(_is_ours, unfinished)]:
        _try(_delete, path)


def publish(partial: Path, directory: Path) -> None:
    """Rename a complete folder to its final name. A predecessor is moved aside first and deleted last."""
    old = _aside(directory)
    _delete(old)
    force_to_disk(partial)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    try:
        force_to_disk(directory.parent)
    except OSError:  # the caller reports that nothing was saved
        directory.rename(partial)
        restore(directory)
        raise
    _try(_delete, old)


def restore(directory: Path) -> None:
    """Undo a replacement that was killed between the two renames."""
    if _is_aside(directory):
        _aside(directory).rename(directory)


def refuse_foreign(directory: Path) -> None:
    """Refuse a folder that is not a checkpoint, because saving over a folder deletes it."""
    if directory.exists() and not _is_ours(directory):
        raise CheckpointError(f"{directory} exists and is not a checkpoint; give a name that is free")


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _is_aside(directory: Path) -> bool:
    return not directory.exists() and (_aside(directory) / INDEX).is_file()


def _delete(path: Path) -> None:
    """Delete a checkpoint: first its index, so that an interrupted deletion leaves no checkpoint.

    Then the files that other tools' folders have too, so that the remains cannot be mistaken for a model. OSError if
    one of these cannot be deleted; if that is the index, the checkpoint is still complete.
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


def _is_ours(path: Path) -> bool:
    """True for checkpoints and remains of checkpoints, which may be deleted."""
    if not path.is_dir():
        return False
    names = [entry.name for entry in path.iterdir()]
    if INDEX in names or not names:
        return True
    return all(_OWN_FILE.fullmatch(name) or is_companion(name) for name in names) and any(
        name.startswith(_ONLY_OURS) for name in names
    )
