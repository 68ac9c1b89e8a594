"""How fast the ranks compute: the times that came with each step's gradients, handed on to those who use them.

Shares of microbatches are decided in `data/balance.py`, slow ranks found in `stragglers.py`. Times are read at the end
of their step on the host, and a step later from a GPU, so that no host waits for the step it has launched; always the
same step's on all ranks, because they must decide alike.

Replicas that differ between exchanges tell each other the mean of the steps since the last one, in the exchange.
"""

from __future__ import annotations

import logging

import torch

from weft.comm.objects import gather_values
from weft.mesh import Mesh
from weft.sync.base import Sync
from weft.sync.compute_clock import ComputeClock
from weft.training.data.balance import Balance
from weft.training.step.async_scalars import AsyncScalars
from weft.training.stragglers import Straggler, StragglerWatch, costliest

log = logging.getLogger("weft")

StepTimes = tuple[int, int, list[float]]
"""The step that times came with, this rank's samples in it, and the times per sample of all ranks."""


class _LateTimes:
    """Times as they come from a device: at once from the host, one step later from a GPU."""

    def __init__(self) -> None:
        self._waiting: tuple[int, int, AsyncScalars] | None = None

    def read(self, step: int, num_samples: int, times_s: torch.Tensor | None) -> StepTimes | None:
        """The times of this step, or of the last one that brought any; None if there are none to be read."""
        if times_s is not None and not times_s.is_cuda:
            return step, num_samples, times_s.tolist()
        waiting, self._waiting = self._waiting, None
        if times_s is not None:
            self._waiting = (step, num_samples, AsyncScalars(times_s))
        return None if waiting is None else (waiting[0], waiting[1], waiting[2].read())

    def forget(self) -> None:
        self._waiting = None


class RankSpeeds:
    """The times of all ranks that compute the same part of the model as this one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.clock = ComputeClock(mesh.traffic, mesh.world.device)
        self.balance = Balance(mesh)
        inside, between = mesh.batch_group("control"), mesh.between_replicas("control")
        self._inside, self._between = StragglerWatch(inside.ranks), StragglerWatch(between.ranks, window=1)
        self._warns_inside, self._warns_between = inside.index == 0, between.index == 0
        self._late_inside, self._late_between = _LateTimes(), _LateTimes()
        self._exchanged_at = 0

    def end_step(self, steps_done: int, sync: Sync) -> None:
        """Take the times that came with a step; collective, where shares are decided."""
        times_s, self.clock.everyones_s = self.clock.everyones_s, None
        if known := self._late_inside.read(steps_done, self.clock.num_samples, times_s):
            self._take(*known)
        times_s, sync.replica_compute_s = sync.replica_compute_s, None
        if known := self._late_between.read(steps_done, self.clock.num_samples, times_s):
            self._take_between(*known)
        self.balance.end_step(steps_done)

    def _take(self, step: int, num_samples: int, times_s: list[float]) -> None:
        self.balance.add(times_s)
        each = num_samples / self.balance.num_here
        samples = [each * self.balance.shares[data_rank] for data_rank in self.balance.data_ranks]
        self._warn(self._inside.add(step, times_s, samples), self._warns_inside)

    def _take_between(self, step: int, num_samples: int, times_s: list[float]) -> None:
        num_steps, self._exchanged_at = step - self._exchanged_at, step
        if len(times_s) == self._mesh.between_replicas("control").size:  # else all replicas are in this process
            samples = [float(num_samples)] * len(times_s)
            self._warn(self._between.add(step, times_s, samples, num_steps=num_steps), self._warns_between)

    def _warn(self, texts: list[str], is_ours: bool) -> None:
        for text in texts if is_ours else ():
            log.warning("%s", text)

    def restart(self, steps_done: int) -> None:
        """Forget the times that were not read yet: a checkpoint was loaded."""
        self.clock.everyones_s = None
        self._late_inside.forget()
        self._late_between.forget()
        self._exchanged_at = steps_done

    @property
    def straggler(self) -> Straggler | None:
        """The rank that is slow now, among those that compute the same part of the model as this one."""
        return costliest(one.now for one in (self._inside, self._between))

    def worst_straggler(self) -> Straggler | None:
        """The rank of the whole run that has cost most; collective."""
        mine = costliest(one.worst for one in (self._inside, self._between))
        found = gather_values(None if mine is None else mine.as_row(), self._mesh.everyone("control"))
        return costliest(None if row is None else Straggler(**row) for row in found)
