"""Which part of which tensor each program of a launch has: a table on the device, made once per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Codec


class Bucket(Protocol):
    """What kernels need to know of a bucket."""

    @property
    def codec(self) -> Codec: ...
    @property
    def tensors(self) -> tuple[CodedTensor, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def replica(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...


class Kept(Protocol):
    """State in two copies, of which one counts."""

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    @property
    def turn(self) -> int | torch.Tensor: ...


class Table:
    """Programs in the order of tensors: each has a part (a block, a tile, a chunk) of one tensor."""

    def __init__(self, num_parts: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device) -> None:
        """`fields`: numbers of each tensor, as many for each; a kernel finds them after the number of the tensor's
        first program."""
        starts = [0]
        for count in num_parts:
            starts.append(starts[-1] + count)
        self.num_programs = starts[-1]
        self.num_tensors = len(num_parts)
        self.width = 1 + len(fields[0])
        numbers = torch.arange(self.num_tensors, dtype=torch.int32)
        self.tensor_of = _to_device(numbers.repeat_interleave(torch.tensor(list(num_parts))), device)
        rows = [[start, *row] for start, row in zip(starts, fields, strict=False)]
        self.fields = _to_device(torch.tensor(rows, dtype=torch.int64), device)


class Numbers:
    """Single numbers on the device, made there: a copy from the host would wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[float, torch.Tensor] = {}

    def float64(self, value: float | torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """`value` times `factor`, one element."""
        if isinstance(value, torch.Tensor):
            return value.reshape(1).to(torch.float64) * factor
        key = value * factor
        if key not in self._made:
            if len(self._made) > 16:  # a factor that changes with every exchange
                self._made.clear()
            self._made[key] = torch.full((1,), key, dtype=torch.float64, device=self._device)
        return self._made[key]


class Turns:
    """Both copies of a state as kernels take them: (first, second, number of the one that counts)."""

    def __init__(self, device: torch.device) -> None:
        self.first = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, kept: Kept) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if isinstance(kept.turn, int):
            return kept.pair[kept.turn], kept.pair[1 - kept.turn], self.first
        return kept.pair[0], kept.pair[1], kept.turn


def are_aligned(numbers: Sequence[int], multiple: int) -> bool:
    """True if vectors of so many elements may be read: a kernel is told so, and cannot see it by itself."""
    return all(number % multiple == 0 for number in numbers)


def _to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for it."""
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)
