"""Doing something on every rank that may fail on one: then all of them raise, with every problem, and go on alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import CheckpointError


def together(group: Group, verb: str, path: Path, action: Callable[[], Any]) -> list[Any]:
    """Do something on every rank; all ranks raise if it failed on any. Returns what it gave on each."""
    outcome: dict[str, Any] = {"value": None, "problems": []}
    failure: Exception | None = None
    try:
        outcome["value"] = action()
    except CheckpointError as error:
        outcome["problems"], failure = error.problems, error
    except Exception as error:  # whatever it is, the others are waiting to be told
        outcome["problems"], failure = [_say(error, group.ranks[group.index], verb, path)], error
    outcomes = gather_values(outcome, group, _device_of(group))
    problems = [problem for outcome in outcomes for problem in outcome["problems"]]
    if problems:
        raise CheckpointError(list(dict.fromkeys(problems))) from failure
    return [outcome["value"] for outcome in outcomes]


def _say(error: Exception, rank: int, verb: str, path: Path) -> str:
    if isinstance(error, OSError):
        return f"rank {rank} cannot {verb} {error.filename or path}: {error.strerror or error}"
    return f"rank {rank} cannot {verb} {path}: {type(error).__name__}: {error}"


def _device_of(group: Group) -> torch.device:
    """Where messages of a group must lie: on the host, unless its only backend sends from a GPU."""
    host = torch.device("cpu")
    if group.handle is None or host in group.handle._device_types:
        return host
    return torch.device("cuda", torch.cuda.current_device())
