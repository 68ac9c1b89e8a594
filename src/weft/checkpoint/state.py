"""The parts of a trainer that checkpoints read and write, as a contract: `checkpoint/` does not import the trainer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.state.rng import Seeds
from weft.plan.plan import Plan
from weft.sync.base import Sync


class Stateful(Protocol):
    """An object with plain values that an exact continuation needs."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class InFlight(Protocol):
    """A pipeline that may hold microbatches and older weights between two steps."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None: ...


class Counting(Protocol):
    shared: float | torch.Tensor | None
    """The number of targets that gradients are divided by, of the last step."""
    is_own: bool
    """The loss returned its own count in the last step."""


class Averaging(Protocol):
    """An average of the weights."""

    means: dict[str, torch.Tensor]
    """This rank's part of the average of every trained parameter, by name, laid out like the parameter's."""
    has_begun: bool
    """False while the average is the weights themselves, and `means` holds nothing."""


class TrainerState(Protocol):
    """A trainer, as far as checkpoints are concerned."""

    mesh: Mesh
    optimizer: torch.optim.Optimizer
    sync: Sync
    layouts: dict[str, Layout]
    steps_done: int
    data_position: int
    seeds: Seeds
    extra_state: dict[str, Any]
    """State of the user's own, by name."""
    companions: dict[str, bytes]
    """Files that every checkpoint repeats, by name; on rank 0."""

    @property
    def others(self) -> Sequence[TrainerState]:
        """The trainers of replicas 1, 2, ..., where all replicas are in this process."""

    @property
    def nan_from_start(self) -> Collection[str]:
        """Names of buffers that the user made not finite."""

    @property
    def average(self) -> Averaging | None: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def named_model(self) -> nn.Module: ...

    @property
    def counts(self) -> Counting: ...

    @property
    def update(self) -> Stateful: ...

    @property
    def balance(self) -> Stateful: ...

    @property
    def pipeline_step(self) -> InFlight | None: ...

    def wait_for_save(self) -> None: ...
