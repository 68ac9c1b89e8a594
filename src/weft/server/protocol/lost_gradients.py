"""Says once of each server how many gradients it has lost: those of workers that died together with it.

They were decided on, and other servers may have them, so no error can undo it: a person has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from weft.server.protocol.message import Begin

log = logging.getLogger("weft")


class LostGradients:
    """What one worker has been told of them."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def look(self, begins: Mapping[int, Begin]) -> None:
        """Warn of losses that are new, on the worker that leads. `begins`: what each server said of a clock."""
        for server, begin in begins.items():
            if begin.num_lost > self._known.get(server, 0) and begin.index == 0:
                log.warning(
                    "server %d died together with workers, before a snapshot: %d of their gradients, decided on for "
                    "updates, are not in its weights (%d before); the run goes on without them",
                    server,
                    begin.num_lost,
                    self._known.get(server, 0),
                )
            self._known[server] = max(begin.num_lost, self._known.get(server, 0))
