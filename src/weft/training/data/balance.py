"""Which microbatches of a global batch this data rank computes: as many as all others, or by its speed.

Shares are known one step ahead. What is decided at the end of step n holds from step n + 2 on, because the batch of
step n + 1 may be on its way already (`batches.py` fetches the next one while a step runs). So the parts of a batch fit
together whoever cuts them, and when: shares are a function of the step.

A decision is made of times that all ranks have: those of a step travel in the tail of its gradients. Ranks of other
stages and tensor ranks are in other exchanges, so in the steps in which shares are decided, and only there, the ranks
of one data rank tell each other the slowest of them, on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.mesh import Mesh
from weft.plan.partition.shares import (
    DECIDE_EVERY,
    FEWEST_STEPS,
    WINDOW_STEPS,
    Shares,
    decide_shares,
    even_place,
    even_shares,
    median_times,
    samples_of,
)


class Balance:
    """The shares of this step and of the next; even ones for ever, without `[data] balance`."""

    def __init__(self, mesh: Mesh) -> None:
        self.shares: Shares
        """Microbatches of each data rank in the next step."""
        self.next_shares: Shares
        """Those of the step after that."""
        self._mesh = mesh
        self.is_on = mesh.plan.data.balance and mesh.data_size > 1
        self._even = even_shares(mesh.data_size, mesh.plan.step.microbatches)
        self.data_ranks = [_data_rank(mesh, rank) for rank in mesh.batch_group("control").ranks]
        """The data rank of each time that is exchanged."""
        self._window: deque[list[float]] = deque(maxlen=WINDOW_STEPS)
        self.shares = self.next_shares = self._even

    def range(self, num_samples: int, *, ahead: int = 0) -> tuple[int, int]:
        """This rank's samples of the next batch (first, and one after the last), or of the one after that."""
        return samples_of(num_samples, self._mesh.data_rank, self.next_shares if ahead else self.shares)

    @property
    def num_here(self) -> int:
        """Microbatches of this data rank in the next step."""
        return self.shares[self._mesh.data_rank if self.is_on else 0]

    def share(self, *, padded: bool) -> tuple[int, int]:
        """Microbatches of this data rank in the next step, without and with the empty ones that follow; these are added
        where all ranks must have as many (`padded`)."""
        return self.num_here, max(self.shares) if padded else self.num_here

    def even_place(self, number: int) -> tuple[int, int]:
        """The data rank and number that a microbatch of this rank has where shares are even."""
        return even_place(self._mesh.data_rank, number, self.shares)

    def add(self, times_s: Sequence[float]) -> None:
        """Take the times per sample of a step, in the order of the batch group; a step in which one is unknown (0) is
        left out."""
        if not self.is_on or not all(times_s):
            return
        slowest = [0.0] * self._mesh.data_size
        for data_rank, time_s in zip(self.data_ranks, times_s, strict=True):
            slowest[data_rank] = max(slowest[data_rank], time_s)
        self._window.append(slowest)

    def end_step(self, steps_done: int) -> None:
        """Go on to the next step; collective among the ranks of one data rank, where shares are decided."""
        self.shares = self.next_shares
        if self.is_on and steps_done % DECIDE_EVERY == 0:
            self.next_shares = decide_shares(self._times_s(), self.shares)

    def _times_s(self) -> list[float]:
        is_known = len(self._window) >= FEWEST_STEPS
        times_s = median_times(self._window) if is_known else [0.0] * self._mesh.data_size
        group = self._mesh.group("pipeline+ring+ulysses+tensor", "control")
        if group.size == 1:
            return times_s
        slowest = torch.tensor(times_s, dtype=torch.float64)
        all_reduce(slowest, group, op="max")
        found: list[float] = slowest.tolist()
        return found

    def state(self) -> dict[str, Any]:
        """Plain values from which the same plan goes on."""
        if not self.is_on:
            return {}
        return {"shares": list(self.shares), "next": list(self.next_shares), "window": list(self._window)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; shares are even where it returned nothing."""
        self.shares, self.next_shares = (tuple(state.get(name, self._even)) for name in ("shares", "next"))
        self._window.clear()
        self._window.extend(state.get("window", ()))


def _data_rank(mesh: Mesh, rank: int) -> int:
    place = mesh.grid.coordinates(rank)
    return place["replicate"] * mesh.size("data") + place["data"]
