"""Cuts a rank's batch into microbatches, counts their targets and moves them to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.errors import DataError
from weft.training.data.sample_split import SampleSplit
from weft.training.data.to_device import to_device
from weft.training.data.trees import map_tensors, num_samples, split_microbatches, split_tree
from weft.training.loss.loss import Count, are_samples_counted, count_targets

CountedBatch = tuple[Any, Any, Count]
"""The inputs, the targets and the number of targets of one microbatch."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Cuts a trainer's batches into microbatches."""

    num: int
    device: torch.device
    sample_split: SampleSplit | None
    has_loss: bool = field(kw_only=True)
    """This rank computes losses, and therefore counts targets."""
    counts_targets: bool = field(kw_only=True)
    """As in `Loss`."""

    def cut(self, inputs: Any, targets: Any, share: tuple[int, int] | None = None) -> list[CountedBatch]:
        """The microbatches of a batch, each with its number of targets.

        `share`: how many they are on this rank, and how many with empty ones that follow; else those of the plan.
        """
        num_inputs, num_targets = num_samples(inputs, "inputs"), num_samples(targets, "targets")
        if num_inputs != num_targets:
            raise DataError(f"inputs hold {num_inputs} samples, targets {num_targets}; dim 0 is samples")
        num, num_padded = share or (self.num, self.num)
        parts = _split(inputs, targets, num, num_padded)
        if self.sample_split is None:  # one copy of the whole, of which microbatches are views
            there = _split(self._to_device(inputs), self._to_device(targets), num, num_padded)
        else:
            parts = [self.sample_split.cut(*part) for part in parts]
            there = [(self._to_device(inputs), self._to_device(targets)) for inputs, targets in parts]
        # Targets are counted where they come from: on the host that does not block.
        counts = [self._count(*part) if self.has_loss else 0 for part in parts]
        return [(*part, count) for part, count in zip(there, counts, strict=True)]

    def _to_device(self, tree: Any) -> Any:
        return map_tensors(lambda tensor: to_device(tensor, self.device), tree)

    def _count(self, inputs: Any, targets: Any) -> Count:
        counted = count_targets(targets)
        if self.sample_split is None:
            return counted
        if not self.counts_targets:  # a rank may have none, and no loss can take the mean of none
            counted = int(counted)
        return counted * self.sample_split.weight(inputs) if are_samples_counted(targets) else counted


def _split(inputs: Any, targets: Any, num: int, num_padded: int) -> list[tuple[Any, Any]]:
    parts = list(zip(split_microbatches(inputs, num), split_microbatches(targets, num), strict=True))
    if num_padded > num:
        parts += [(split_tree(inputs, 0, 0), split_tree(targets, 0, 0))] * (num_padded - num)
    return parts
