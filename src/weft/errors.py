"""The errors a user can cause or must know of; any other exception that leaves weft is a bug.

    WeftError
    ├── PlanError         a plan that is malformed, or cannot run here
    ├── JobError          a job file that cannot be read or does not make sense
    ├── ClusterError      a cluster description that is malformed, or lacks what is asked for
    ├── ModelError        a model weft cannot train as asked
    ├── DataError         data that is missing, unreadable or too small
    ├── CheckpointError   a checkpoint that is missing, damaged or of another model
    │   └── DamagedCheckpointError   one whose files are not as they were written
    ├── DivergenceError   replicas that should be equal are not
    ├── NotFiniteError    a loss, gradients or weights that are not finite
    ├── VerifyError       a plan that does not give one process's answer
    └── LaunchError       ranks that could not be started or kept alive

An error carries *every* problem found, not the first one, so that one run of a command is enough to fix them all.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

TURN_S = 3.0
"""Seconds after which a rank prints an error that rank 0 would have printed by then."""
STEP_NOTE = "while training step {step}"
"""The note by which a run tells, in the traceback of an exception, how far it was."""


class WeftError(Exception):
    """One or more problems, each a sentence: what is wrong, both numbers, what to do."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)
        if os.environ.get("RANK", "0") != "0" and sys.excepthook is sys.__excepthook__:
            sys.excepthook = print_in_turn

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"- {problem}" for problem in self.problems)


class PlanError(WeftError):
    """A plan that is malformed, or cannot run here."""


class JobError(WeftError):
    """A job file that cannot be read or does not make sense."""


class ClusterError(WeftError):
    """A cluster description that is malformed, or lacks what is asked for."""


class ModelError(WeftError):
    """A model weft cannot train as asked."""


class DataError(WeftError):
    """Data that is missing, unreadable or too small."""


class CheckpointError(WeftError):
    """A checkpoint that is missing, damaged or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not as they were written; an older one may be whole."""


class DivergenceError(WeftError):
    """Replicas that should be equal are not."""


class NotFiniteError(WeftError):
    """A loss, gradients or weights that are not finite."""


class VerifyError(WeftError):
    """A plan that does not give one process's answer."""


class LaunchError(WeftError):
    """Ranks that could not be started or kept alive."""


def print_in_turn(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` of ranks other than 0 that had a WeftError before they met the others.

    Usually all have the same one, such as a plan that is not there. Rank 0 prints it and ends, and its launcher ends
    the others meanwhile; a rank that is still there after that has an error of its own.
    """
    if isinstance(error, WeftError) and sys.excepthook is print_in_turn:
        time.sleep(TURN_S if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * TURN_S)
    sys.__excepthook__(kind, error, trace)


def nearest(unknown: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest known one, or all of them where none is near."""
    names = list(known)
    close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(names)}"
