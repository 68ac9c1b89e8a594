"""Resuming from the newest checkpoint that is whole: a damaged one is put aside and named, and the one before is used.

A disk that was full, or a machine that died while its disk was writing, damages the newest checkpoint of all; a run
that ended there would wait for a person to delete a folder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from weft.checkpoint.files.agree import try_on_files
from weft.errors import DamagedCheckpointError
from weft.training.trainer import Trainer

log = logging.getLogger("weft")


def load_newest_whole(trainer: Trainer, folder: Path, names: Sequence[str]) -> Path | None:
    """Load the last of these checkpoints of a folder (oldest first) that is whole; collective.

    Returns None if there are none. Damaged ones that come after it are renamed: they must not count as the newest when
    old ones are deleted. If all are damaged, one error says so of each.
    """
    damaged: list[Path] = []
    problems: list[str] = []
    for path in (folder / name for name in reversed(names)):
        try:
            trainer.load(path)
        except DamagedCheckpointError as error:  # on all ranks alike
            damaged.append(path)
            problems.append(error.problems[0])
            continue
        if damaged:
            _put_aside(trainer, damaged, used=path, problems=problems)
        return path
    if damaged:
        raise DamagedCheckpointError(
            [
                *problems,
                f"no checkpoint in {folder} is whole; delete them to begin from the start, or copy whole ones there",
            ]
        )
    return None


def _put_aside(trainer: Trainer, damaged: Sequence[Path], *, used: Path, problems: Sequence[str]) -> None:
    """Rename damaged checkpoints to NAME.damaged, on rank 0; collective."""
    is_first = trainer.mesh.world.rank == 0

    def rename() -> None:
        for path in damaged if is_first else ():
            free = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(10**6))
            path.rename(next(target for target in free if not target.exists()))

    try_on_files(trainer.mesh.everyone("control"), "rename", damaged[0], rename)
    if is_first:
        log.warning(
            "%s; put aside as %s.damaged, and the run goes on from %s", "; ".join(problems), damaged[0].name, used
        )
