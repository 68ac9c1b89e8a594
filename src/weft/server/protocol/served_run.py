"""What a worker knows of a run with servers: where these are, who may join, and which worker it is."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from weft.plan.plan import Plan
from weft.server.protocol.keys import JobKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A run, as one rank of a worker sees it."""

    plan: Plan
    """Of the whole run, with all workers."""
    job: str
    """A text that no other run has (`job_name`)."""
    addresses: tuple[str, ...]
    """Of the servers, in their order."""
    worker: int
    """The number of this worker."""
    key: JobKey | None = field(default=None, repr=False)
    """None: the servers are on this host, in a folder of this user's."""
    attempt: int = 0
    """Earlier starts of this worker."""
    drawn: int = 0
    """A number that this start has drawn, where nobody counts its starts."""
    is_running: bool = False
    """It has begun before this worker joins it, which goes on where the others are."""

    @property
    def seed(self) -> int:
        """Of the random numbers of all workers."""
        return seed_of(self.job)

    @property
    def start(self) -> int:
        """A number of this start of the worker, the same on all its ranks."""
        return self._start_of(self.attempt)

    @property
    def earlier_starts(self) -> tuple[int, ...]:
        """Those of starts that are over, as whoever has started it again has seen."""
        return tuple(self._start_of(attempt) for attempt in range(self.attempt))

    def _start_of(self, attempt: int) -> int:
        text = f"{self.job}/{self.worker}/{attempt}/{self.drawn}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_of(job: str) -> int:
    """The seed that a run's name carries."""
    return int(job.partition("-")[0], 16)


def job_name(seed: int) -> str:
    """A name for a new run, which carries its seed to whoever joins."""
    return f"{seed:016x}-{secrets.token_hex(8)}"
