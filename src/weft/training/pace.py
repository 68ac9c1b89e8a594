"""How fast the ranks compute: the times that came with each step's gradients, and what follows from them.

Shares of microbatches follow in `data/balance.py`, warnings and the account of a run in `stragglers.py`. Times are read
at the end of their step on the host, and a step later from a GPU, so that no host waits for the step it has launched;
always the same step's on all ranks, because they must decide alike.
"""

from __future__ import annotations

import logging

from weft.comm.objects import gather_values
from weft.mesh import Mesh
from weft.sync.compute_clock import ComputeClock
from weft.training.data.balance import Balance
from weft.training.step.async_scalars import AsyncScalars
from weft.training.stragglers import Straggler, StragglerWatch, dearest

log = logging.getLogger("weft")


class Pace:
    """The times of all ranks that compute the same part of the model as this one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.clock = ComputeClock(mesh.traffic, mesh.world.device)
        self.balance = Balance(mesh)
        group = mesh.batch_group("control")
        self._is_first = group.index == 0
        self._watch = StragglerWatch(group.ranks)
        self._late: tuple[int, int, AsyncScalars] | None = None
        """A step that a GPU may still compute, this rank's samples in it, and the times that came with it."""

    def end_step(self, steps_done: int) -> None:
        """Take the times that came with a step; collective, where shares are decided."""
        num_samples, times_s, self.clock.everyones_s = self.clock.num_samples, self.clock.everyones_s, None
        if times_s is not None and times_s.is_cuda:
            late, self._late = self._late, (steps_done, num_samples, AsyncScalars(times_s))
            if late is not None:
                self._take(late[0], late[1], late[2].read())
        elif times_s is not None:
            self._take(steps_done, num_samples, times_s.tolist())
        self.balance.end_step(steps_done)

    def _take(self, step: int, num_samples: int, times_s: list[float]) -> None:
        self.balance.add(times_s)
        each = num_samples / self.balance.num_here
        samples = [each * self.balance.shares[data_rank] for data_rank in self.balance.data_ranks]
        for text in self._watch.add(step, times_s, samples):
            if self._is_first:
                log.warning("%s", text)

    def restart(self) -> None:
        """Forget the times that were not read yet: a checkpoint was loaded."""
        self._late = self.clock.everyones_s = None

    @property
    def straggler(self) -> Straggler | None:
        """The rank that is slow now, among those that compute the same part of the model as this one."""
        return self._watch.now

    def worst_of_all(self) -> Straggler | None:
        """The rank of the whole run that has cost most; collective."""
        mine = self._watch.worst
        found = gather_values(None if mine is None else mine.as_row(), self._mesh.everyone("control"))
        return dearest(Straggler(**row) for row in found if row is not None)
