"""How far a server is, in a few numbers that it reports to whoever started it, and what they are in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from weft.server.each_alone import EachAlone
from weft.server.server import ParameterServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One server's run at one moment."""

    version: int
    """Updates of its weights."""
    step: int
    """The furthest that any worker is."""
    workers: tuple[int, ...]
    """Those that are there, with all their ranks."""
    num_awaited: int
    """Workers with which the run begins; 0 until the first one has said so."""
    has_begun: bool
    ages: tuple[int, ...] | None
    """Of the workers' last gradients, where each is an update by itself: updates since the weights they were made
    with."""
    is_over: bool
    """All workers have ended."""

    @classmethod
    def of_object(cls, found: dict[str, Any]) -> Self:
        """From the values of `asdict`, as JSON gives them back."""
        ages = found["ages"]
        return cls(**{**found, "workers": tuple(found["workers"]), "ages": None if ages is None else tuple(ages)})

    @property
    def in_words(self) -> str:
        """One line."""
        if self.is_over:
            return "all workers have ended"
        if not self.has_begun:
            there = f"{len(self.workers)} of {self.num_awaited} workers are" if self.num_awaited else "no worker is"
            return f"{there} there; the run begins when all are"
        if not self.workers:
            return f"version {self.version}, and no worker is there any more; join one, or end the run with Ctrl-C"
        them = f"{len(self.workers)} worker{'' if len(self.workers) == 1 else 's'}"
        stale = f", staleness {min(self.ages)} to {max(self.ages)}" if self.ages else ""
        return f"version {self.version}, {them}{stale}"


def status_of(server: ParameterServer) -> Status:
    """The status of a server."""
    mode, updates = server.mode, server.updates
    ages = None
    if isinstance(mode, EachAlone) and updates is not None:
        ages = tuple(mode.told(worker).age for worker in mode.sharing)
    return Status(
        version=server.version,
        step=0 if updates is None else updates.step,
        workers=server.members.workers,
        num_awaited=0 if server.settings is None else server.settings.num_workers,
        has_begun=server.store is not None and mode is not None and mode.has_begun,
        ages=ages,
        is_over=server.is_over,
    )
