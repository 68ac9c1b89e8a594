"""ZeRO-3 in a pipeline: the schedule says when a stage's parameters become whole and when they are given back.

Between the forward and the backward pass of one microbatch others pass through the stage, so what comes and goes is
the whole stage, not a block: gathered when its turn comes, each block waited for just before it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.parallel.zero.gather import Unit


class StageGathering:
    """Gathers and frees the units of this rank's stages."""

    def __init__(self, root: Unit, blocks: Mapping[str, Unit], stage_of: Mapping[str, int]) -> None:
        """`root` holds what is outside blocks, for all stages of this rank."""
        self.is_last = False
        self._root = root
        self._blocks = dict(blocks)
        self._gathered: set[int] = set()
        self._of_stage: dict[int, Sequence[Unit]] = {}
        for name, unit in self._blocks.items():
            self._of_stage[stage_of[name]] = [*self._of_stage.get(stage_of[name], ()), unit]

    def gather(self, stage: int) -> None:
        """Begin to make a stage's parameters whole, in the order in which they will be used."""
        self._gathered.add(stage)
        self._root.start_gather()
        for unit in self._of_stage.get(stage, ()):
            unit.start_gather()

    def wait(self, block: str | None) -> None:
        """A block, or what is outside of blocks, is about to be used."""
        unit = self._root if block is None else self._blocks.get(block)
        if unit is not None:
            unit.wait()

    def wait_for_stage(self, stage: int) -> None:
        self._root.wait()
        for unit in self._of_stage.get(stage, ()):
            unit.wait()

    def release(self, stage: int) -> None:
        """Give a stage's parameters back; the root's when no stage uses them."""
        self._gathered.discard(stage)
        if not self._gathered:
            self._root.free()
        for unit in self._of_stage.get(stage, ()):
            unit.free()

    def begin_step(self) -> None:
        self.is_last = False
        self._gathered.clear()
        self._root.free()
        for unit in self._blocks.values():
            unit.free()

    def end_microbatch(self) -> None:
        """The schedule gives parameters back."""

    def skip_microbatch(self) -> None:
        """A microbatch without samples is on the schedule like any other."""
