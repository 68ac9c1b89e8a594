"""ZeRO-3 in a pipeline: the schedule says when a stage's parameters are gathered and freed.

Between the forward and the backward pass of one microbatch others pass through the stage, so the whole stage, not a
block, is gathered when its turn comes; each block is waited for just before it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.parallel.zero.gather import ParameterGathering
from weft.parallel.zero.unit import Unit


class StageGathering(ParameterGathering):
    """Gathers and frees the units of this rank's stages. Microbatches without samples are on the schedule, too."""

    def __init__(self, root: Unit, blocks: Mapping[str, Unit], stage_of: Mapping[str, int]) -> None:
        super().__init__(root, list(blocks.values()))
        self._named = dict(blocks)
        self._gathered: set[int] = set()
        self._of_stage: dict[int, Sequence[Unit]] = {}
        for name, unit in blocks.items():
            self._of_stage[stage_of[name]] = [*self._of_stage.get(stage_of[name], ()), unit]

    def gather(self, stage: int) -> None:
        """Begin to gather a stage's parameters, in the order in which they will be used."""
        self._gathered.add(stage)
        self._root.start_gather()
        for unit in self._of_stage.get(stage, ()):
            unit.start_gather()

    def wait(self, block: str | None) -> None:
        """Wait for the parameters of a block, or of what is outside of blocks."""
        unit = self._root if block is None else self._named.get(block)
        if unit is not None:
            unit.wait()

    def wait_for_stage(self, stage: int) -> None:
        self._root.wait()
        for unit in self._of_stage.get(stage, ()):
            unit.wait()

    def release(self, stage: int) -> None:
        """Free a stage's parameters; the root's when no stage uses them."""
        self._gathered.discard(stage)
        if not self._gathered:
            self._root.free()
        for unit in self._of_stage.get(stage, ()):
            unit.free()

    def begin_step(self) -> None:
        self._gathered.clear()
        super().begin_step()
