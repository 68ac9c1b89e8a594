"""What the first server tells those who want to join its run: the run's name, its servers, and a number to join as.

Worker 0 gives the first weights. Where workers are started one by one that is whoever asks first, and it may end before
it has joined (a model that cannot be built, Ctrl-C). So it asks again every second until it is there
(`protocol/ask_run.py`), and when it does not, its number is for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.server.other_servers import OtherServers
from weft.server.workers.members import DEAD_AFTER_S, Members

_DOUBTFUL_AFTER_S = 2.0
"""Who asks while worker 0 is silent for so long is told to ask again: it may become worker 0."""


class Invitations:
    """A run as it was started, and the numbers of workers that were given to those who asked."""

    def __init__(
        self, *, job: str, num_servers: int, num_started: int, described: Mapping[str, Any] | None = None
    ) -> None:
        """`num_started`: workers that whoever started the servers starts with them, and has numbered from 0.
        `described`: what whoever joins must have alike (`plan/shared_fields.py`)."""
        self.job = job
        self._num_servers, self._num_started = num_servers, num_started
        self._described = dict(described or {})
        self._next_number = max(num_started, 1)
        self._first: int | None = None
        """Who has the number 0, by the session of its question."""
        self._first_heard_s = -math.inf
        self._goes_on = False
        """Who has the number 0 has not been heard since this server was started again, and may be there."""

    def as_plain(self) -> list[Any]:
        """What `go_on` needs."""
        return [self._next_number, self._first]

    def go_on(self, plain: list[Any]) -> None:
        """Numbers that an earlier process of this server has given are given to nobody else."""
        self._next_number, self._first = plain
        self._goes_on = self._first is not None

    def give(self, others: OtherServers, members: Members, asker: int, now_s: float, has_begun: bool) -> dict[str, Any]:
        """What one more worker is told; no job until all servers are there. `asker`: a number that it has drawn.
        `has_begun`: the first weights are there."""
        addresses = others.addresses
        if self._goes_on:
            self._goes_on, self._first_heard_s = False, now_s
        is_settled = has_begun or members.session_of(0) >= 0
        number = None
        if len(addresses) == self._num_servers:
            number = self._number_for(asker, now_s, is_settled, members.num_joined)
        return {
            "job": "" if number is None else self.job,
            "addresses": addresses,
            "worker": -1 if number is None else number,
            "num_missing": self._num_servers - len(addresses),
            "has_begun": has_begun,
            "is_settled": is_settled,
            "described": self._described,
        }

    def _number_for(self, asker: int, now_s: float, is_settled: bool, num_joined: int) -> int | None:
        if asker == self._first:
            self._first_heard_s = now_s
            return 0
        if not self._num_started and not is_settled:
            silent_s = now_s - self._first_heard_s
            if silent_s > DEAD_AFTER_S:
                self._first, self._first_heard_s = asker, now_s
                return 0
            if silent_s > _DOUBTFUL_AFTER_S:
                return None
        self._next_number = max(self._next_number, num_joined) + 1
        return self._next_number - 1
