"""The step in which an exception of a run arose, noted in its traceback: the launcher compares it with the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import STEP_NOTE, WeftError
from weft.training.trainer import Trainer


@contextmanager
def naming_step(trainer: Trainer) -> Iterator[None]:
    """Context that notes the trainer's step in an exception that leaves it; a WeftError says itself what is wrong."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, WeftError):
            error.add_note(STEP_NOTE.format(step=trainer.steps_done + 1))
        raise
