"""Takes a run back to its last good checkpoint when training is no longer finite, and ends it when that does not help.

Weights, optimizer, what codecs keep and the number of steps are the checkpoint's; the position in the data is not: the
run goes on after the batches at which it failed. The same batches on the same weights would fail again, and so a
roll-back leaves the data between the checkpoint and the failure out. The learning rate follows the number of steps,
which goes back.
"""

from __future__ import annotations

import logging
from pathlib import Path

from weft.checkpoint.folders import all_checkpoints
from weft.comm.objects import gather_values
from weft.errors import CheckpointError, NotFiniteError
from weft.training.run.newest import load_newest_whole
from weft.training.trainer import Trainer

log = logging.getLogger("weft")


class RollBack:
    """The roll-backs of one run."""

    def __init__(self, trainer: Trainer, checkpoints: Path, *, at_most: int) -> None:
        self._trainer, self._checkpoints, self._at_most = trainer, checkpoints, at_most
        self.num_done = 0

    def run(self, error: NotFiniteError) -> Path:
        """Load the newest checkpoint that can be; raises the error if there is none, or no more are allowed."""
        trainer = self._trainer
        if self.num_done >= self._at_most:
            times = {0: "", 1: "once ", 2: "twice "}.get(self.num_done, f"{self.num_done} times ")
            went = f"the run went back to a checkpoint {times}already, and " if times else ""
            raise NotFiniteError(
                [*error.problems, f"{went}[steps] roll_back_at_most = {self._at_most} allows no more"]
            ) from error
        failed_at, position = trainer.steps_done, trainer.data_position
        checkpoint = self._load(error)
        trainer.data_position = position
        self.num_done += 1
        if trainer.mesh.world.rank == 0:
            log.warning(
                "%s; going back from step %d to %s (roll-back %d of at most %d), and on with the data after the bad "
                "batches, at sample %d",
                error,
                failed_at,
                checkpoint,
                self.num_done,
                self._at_most,
                position,
            )
        return checkpoint

    def _load(self, error: NotFiniteError) -> Path:
        trainer = self._trainer
        try:
            trainer.wait_for_save()
        except CheckpointError:  # on all ranks, and logged; an older one is used
            pass
        mine = [path.name for path in all_checkpoints(self._checkpoints)]
        everyones = gather_values(mine, trainer.mesh.everyone("control"))
        names = sorted({name for names in everyones for name in names}, key=lambda name: int(name[5:]))
        try:
            loaded = load_newest_whole(trainer, self._checkpoints, names)
        except CheckpointError as damaged:  # raised on all ranks
            raise NotFiniteError([*error.problems, *damaged.problems]) from error
        if loaded is None:
            nowhere = (
                f"there is no checkpoint in {self._checkpoints} to go back to; save more often ([steps] save_every)"
            )
            raise NotFiniteError([*error.problems, nowhere]) from error
        return loaded
