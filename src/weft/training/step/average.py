"""An exponential moving average of the weights, `[average]` in the plan: after every update

    average := decay × average + (1 - decay) × weights

Each rank averages what its optimizer updates (`sync.pieces`): its own part of the float32 masters, whatever the plan.
So nothing is exchanged, and the average has the layout of the weights: checkpoints write and read it as they do those.
Parts in 16 bits are averaged in float32, where 0.001 of a difference does not round to nothing.

Where a GPU decides by itself to skip an update (`update.py`), it skips the average too. Buffers are not averaged: the
average is used with the model's own, which for BatchNorm are running averages already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import ModelError, PlanError
from weft.parallel.zero.flat_parameters import Piece, wait_until_read
from weft.plan.plan import Plan
from weft.sync.base import Sync


class WeightAverage:
    """The average of this rank's pieces."""

    def __init__(self, pieces: Sequence[Piece], plan: Plan) -> None:
        self._share, self._start = 1.0 - plan.average.decay, plan.average.start
        self._pieces = {piece.name: piece for piece in pieces}
        self.means = {
            name: torch.empty_like(piece.tensor.detach(), dtype=_wide(piece.tensor.dtype))
            for name, piece in self._pieces.items()
        }
        """The average of every piece by name, once it has begun."""
        self.has_begun = False
        """False until the first update after `[average] start`: then the average is the weights themselves."""
        self.is_in_use = False
        """The model has the averaged weights at the moment."""
        self._is_unpublished = False
        """The model still has the average, and the pieces have the weights."""
        kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, mean in self.means.items():
            if mean.numel():
                kinds.setdefault((mean.device, mean.dtype), []).append(name)
        self._together = list(kinds.values())
        """Names of the pieces that one call averages: alike in device and dtype."""

    def warm_up(self) -> None:
        """Load the kernels of the average, which may begin late; as `NotFiniteWatch.warm_up`."""
        self.begin(step=self._start)
        self.add()
        for device in {mean.device for mean in self.means.values()}:
            self.add(torch.ones((), device=device))
        self.has_begun = False

    @torch.no_grad()
    def begin(self, *, step: int) -> None:
        """Before the update of this step, counted from 0: take over the weights, if the average begins here."""
        if self.has_begun or step < self._start:
            return
        for name, mean in self.means.items():
            mean.copy_(self._pieces[name].tensor)
        self.has_begun = True

    @torch.no_grad()
    def add(self, overflow: torch.Tensor | None = None) -> None:
        """After an update: take the weights in; not where `overflow`, on the device, is 1."""
        if not self.has_begun:
            return
        for names in self._together:
            means = [self.means[name] for name in names]
            weights = [self._pieces[name].tensor.detach().to(self.means[name].dtype) for name in names]
            if overflow is None:
                torch._foreach_lerp_(means, weights, self._share)
            else:
                # Written as a step of gradient ascent, means += share × (weights - 1.0 × means), because the kernel of
                # SGD is the one that reads the flag on the device, for all tensors in one launch.
                torch._fused_sgd_(
                    means,
                    weights,
                    [],
                    weight_decay=1.0,
                    momentum=0.0,
                    lr=self._share,
                    dampening=0.0,
                    nesterov=False,
                    maximize=True,
                    is_first_step=False,
                    found_inf=overflow,
                )

    @contextmanager
    def in_place_of_weights(self, sync: Sync, everyone: Group) -> Iterator[None]:
        """Context in which the model computes with the average; collective."""
        if self.is_in_use:
            raise ModelError(
                "the model has its averaged weights already: trainer.averaged() is entered twice; leave one out"
            )
        if not self.has_begun:
            self.is_in_use = True  # replicas that differ have the average of these, which is not for training either
            try:
                yield
            finally:
                self.is_in_use = False
            return
        # Ranks may share memory: none may write while another still reads what was there.
        gather_values(None, everyone)
        kept = self._exchange()
        self.is_in_use = True
        try:
            _publish(sync)
            yield
            gather_values(None, everyone)
            wait_until_read(piece.tensor for piece in self._pieces.values())
        finally:
            self._restore(kept)
            self.is_in_use, self._is_unpublished = False, True
        self.publish_weights(sync)

    def publish_weights(self, sync: Sync) -> None:
        """Give the model its weights back. After an error this waits for the next call that all ranks make."""
        if self._is_unpublished:
            self._is_unpublished = False
            _publish(sync)

    def refuse_use(self, what: str) -> None:
        """Refuse what must see the weights while the model has the average."""
        if self.is_in_use:
            raise ModelError(
                f"{what} inside trainer.averaged() would take the average for the weights; leave the context first"
            )

    @torch.no_grad()
    def _exchange(self) -> dict[str, torch.Tensor]:
        """Put the average where the weights are. These are kept where the average was, or in the tensors returned."""
        kept = {}
        for name, mean in self.means.items():
            piece = self._pieces[name].tensor
            weights = piece.detach().clone()
            piece.copy_(mean)
            if mean.dtype == weights.dtype:
                mean.copy_(weights)
            else:
                kept[name] = weights
        return kept

    @torch.no_grad()
    def _restore(self, kept: dict[str, torch.Tensor]) -> None:
        for name, mean in self.means.items():
            piece = self._pieces[name].tensor
            if name in kept:
                piece.copy_(kept[name])
                continue
            average = piece.detach().clone()
            piece.copy_(mean)
            mean.copy_(average)


def make_average(pieces: Sequence[Piece], plan: Plan) -> WeightAverage | None:
    """The average that a plan asks for, if any."""
    return WeightAverage(pieces, plan) if plan.average.decay > 0 else None


def require_average(average: WeightAverage | None) -> WeightAverage:
    if average is None:
        raise PlanError("the plan keeps no average of the weights; set [average] decay, such as 0.999")
    return average


def _publish(sync: Sync) -> None:
    sync.publish()
    sync.settle()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
