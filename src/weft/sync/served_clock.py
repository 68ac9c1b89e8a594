"""The clock of a worker of servers: what they said when it began, and the weights that come with it.

What was said stays as it is while the clock's gradients are computed, also where a server that was lost says it again:
a batch is shared out by it.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.errors import LaunchError
from weft.server.protocol.client import ServerClient
from weft.server.protocol.lost_gradients import LostGradients
from weft.server.protocol.message import Begin
from weft.sync.arriving_weights import ArrivingWeights
from weft.sync.push_when_complete import BucketKey


class ServedClock:
    """The current clock of one rank."""

    def __init__(self, client: ServerClient, arriving: ArrivingWeights, *, timeout_s: float) -> None:
        """Of a rank that has all weights."""
        self._client, self._arriving, self._timeout_s = client, arriving, timeout_s
        self.told: list[tuple[int, Begin]] = []
        """By server: the version of this clock's weights, and what it said when the clock began."""
        self._is_settled = True
        self._lost = LostGradients()
        self.look_again()

    def look_again(self) -> None:
        """All servers have begun this clock, or a later one while this rank asked for something else."""
        rank = self._client.rank
        self.told = [(rank.versions[server], rank.begins[server]) for server in range(len(rank.layouts))]
        self._lost.look(rank.begins)
        self._client.use_weights(timeout_s=self._timeout_s)

    def go_on(self) -> None:
        """Wait until the next clock has begun; its weights come while they are used."""
        self._client.wait_for_clock(timeout_s=self._timeout_s)
        self.look_again()
        self._is_settled = False
        self._arriving.expect()

    def wait_for_buckets(self, buckets: Collection[BucketKey]) -> None:
        """These weights of this clock are here."""
        self._client.wait_for_buckets(buckets)

    def settle(self) -> None:
        """All weights of this clock are here."""
        if not self._is_settled:
            self._arriving.wait()
            self._client.wait_for_all()
            self._is_settled = True

    def is_torn(self) -> bool:
        """What was computed in this clock must not be sent: its weights were not of one version. Other ranks of the
        worker may not know; so this is an error where there are others."""
        self.settle()
        rank = self._client.rank
        if rank.is_torn and rank.settings.num_ranks > 1:
            raise LaunchError(
                f"rank {rank.place} of worker {rank.worker} lost a connection while weights were arriving, and other "
                "ranks of its worker may not have: the worker ends; start it again, and it joins the run"
            )
        return rank.is_torn
