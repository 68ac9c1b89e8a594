"""From a rank's batch to its microbatches: cut, counted, and on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft.errors import DataError
from weft.training.data.sample_split import SampleSplit
from weft.training.data.trees import map_tensors, num_samples, split_microbatches
from weft.training.step.loss import Count, are_samples_counted, count_targets


class Microbatches:
    """How one trainer cuts what it is given."""

    def __init__(
        self, num: int, device: torch.device, sample_split: SampleSplit | None, *, has_loss: bool, counts_targets: bool
    ) -> None:
        """`has_loss`: on this rank; one without need not count. `counts_targets`: as of the loss."""
        self._num = num
        self._device = device
        self._cutter = sample_split
        self._has_loss = has_loss
        self._counts_targets = counts_targets

    def cut(self, inputs: Any, targets: Any) -> list[tuple[Any, Any, Count]]:
        """Each with its count of targets."""
        if num_samples(inputs) != num_samples(targets):
            raise DataError(
                f"inputs hold {num_samples(inputs)} samples, targets {num_samples(targets)}; dim 0 is samples"
            )
        parts: Iterable[tuple[Any, Any]] = zip(
            split_microbatches(inputs, self._num), split_microbatches(targets, self._num), strict=True
        )
        if self._cutter is not None:
            parts = [self._cutter.cut(*part) for part in parts]
        return [
            (
                map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), inputs_part),
                map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), targets_part),
                # Before it moves: counting on the host blocks nothing.
                self._count(inputs_part, targets_part) if self._has_loss else 0,
            )
            for inputs_part, targets_part in parts
        ]

    def _count(self, inputs: Any, targets: Any) -> Count:
        counted = count_targets(targets)
        if self._cutter is None:
            return counted
        if not self._counts_targets:  # a rank may well have none, whose mean no loss can take
            counted = int(counted)
        return counted * self._cutter.weight(inputs) if are_samples_counted(targets) else counted
