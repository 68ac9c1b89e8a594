"""State in two copies, the one that counts and that of the exchange under way: a skipped step leaves no trace.

    encode      reads `old`, writes `new`: as many bytes move as if it were changed in place
    end(True)   the two change places

On a GPU only the GPU knows whether the step is skipped, so which copy counts is a number there (`turn`): compiled
kernels are given both copies and that number.
"""

from __future__ import annotations

import torch


class Kept:
    """A flat tensor of state, zero at first."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, can_fail: bool) -> None:
        """Without `can_fail` there is one copy, which is read and written in place."""
        first = torch.zeros(numel, dtype=dtype, device=device)
        self.pair: tuple[torch.Tensor, torch.Tensor] = (first, torch.zeros_like(first) if can_fail else first)
        self.turn: int | torch.Tensor = 0
        """Which of the two counts; a tensor of one int32 on a GPU, once the host does not know."""

    @property
    def old(self) -> torch.Tensor:
        """What counts; on a GPU that decides by itself a copy of it."""
        if isinstance(self.turn, int):
            return self.pair[self.turn]
        return torch.where(self.turn.bool(), self.pair[1], self.pair[0])

    def write(self, new: torch.Tensor) -> None:
        """Give the exchange under way its state, where that was not written into `new`."""
        if isinstance(self.turn, int):
            self.pair[1 - self.turn].copy_(new)
            return
        for place, one in enumerate(self.pair):
            one.copy_(torch.where(self.turn == place, one, new))

    @property
    def new(self) -> torch.Tensor:
        """That of the exchange under way, to be written; only where the host knows the turn."""
        assert isinstance(self.turn, int), "the host does not know which copy is free: use write()"
        return self.pair[1 - self.turn]

    def end(self, is_made: bool | torch.Tensor) -> None:
        if isinstance(is_made, bool):
            self.turn = 1 - self.turn if is_made else self.turn
            return
        turn = self.turn
        if isinstance(turn, int):
            turn = torch.zeros(1, dtype=torch.int32, device=is_made.device).add_(turn)
        self.turn = turn ^ is_made.reshape(1).to(torch.int32)

    def settle(self) -> torch.Tensor:
        """The copy that counts itself, to be saved or overwritten; waits for the device."""
        self.turn = int(self.turn)
        return self.pair[self.turn]
