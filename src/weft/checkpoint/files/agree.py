"""Actions on files that every rank tries: if one fails on any rank, all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, DamagedCheckpointError, WeftError


def try_on_files(group: Group, verb: str, path: Path, action: Callable[[], Any]) -> list[Any]:
    """Run an action on a checkpoint's files on every rank and return all results; where any fails, all ranks raise."""
    value: Any = None
    failure: Exception | None = None
    problems: tuple[str, ...] = ()
    try:
        value = action()
    except WeftError as caught:
        problems, failure = caught.problems, caught
    except Exception as caught:  # whatever it is: the other ranks wait for this one's result
        problems, failure = (_describe(caught, group, verb, path),), caught
    outcomes = gather_values([value, problems, isinstance(failure, DamagedCheckpointError)], group)
    found = [problem for _, problems, _ in outcomes for problem in problems]
    if found:
        kind = DamagedCheckpointError if any(is_damage for _, _, is_damage in outcomes) else CheckpointError
        raise kind(list(dict.fromkeys(found))) from failure
    return [value for value, _, _ in outcomes]


def _describe(error: Exception, group: Group, verb: str, path: Path) -> str:
    rank = group.ranks[group.index]
    if isinstance(error, OSError):
        return f"rank {rank} cannot {verb} {error.filename or path}: {error.strerror or error}"
    return f"rank {rank} cannot {verb} {path}: {type(error).__name__}: {error}"
