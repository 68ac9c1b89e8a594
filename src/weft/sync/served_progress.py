"""What servers need of a worker's trainer, as a contract: `sync/` does not import the trainer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from weft.layout import Layout


class Progress(Protocol):
    """A trainer, as far as its servers are concerned."""

    optimizer: torch.optim.Optimizer
    """What servers update with, and from whose state they go on, which is theirs then."""
    steps_done: int
    data_position: int
    layouts: dict[str, Layout]

    @property
    def named_model(self) -> nn.Module: ...
