"""The contract of a sync: when gradients are exchanged, and with whom. What travels is the codec's business.

`training/trainer.py` calls it in this order, every step, on every rank:

    begin()                      before the first microbatch: the last step's gradients are let go
    arm()                        before the last microbatch's forward: from now on gradients may leave when ready
    pass_by()                    instead of a forward and backward, by a rank without samples in this microbatch
    end_microbatch()             after every microbatch
    finish(loss_sum, count)      after the last microbatch, also by a rank that had no data at all
    publish()                    after the optimizer's update, unless it was skipped

In a pipeline the schedule says when a stage's gradients are complete: `arm(names)` comes before the last backward pass
of that stage, `complete(names)` after it, and `end_microbatch()` once, before `finish`. Gradients that are *held* are
not taken when autograd has made them, because something is still added to them (a tied weight is on two stages) or
because they are made elsewhere (weight versions): `take_held()` takes them.

The loss that is differentiated is a *sum* over this rank's targets over a number all ranks agree on, so syncs add
gradients and never average. `pieces` are what the optimizer updates. After `finish` the `.grad` of every piece is the
sum over all data ranks; that of a parameter that no rank used is None, one that only other ranks used has their sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.layout import Layout, Range
from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import Gathers


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Parameters that a pipeline, or the tensor axis, makes special, by name."""

    held: frozenset[str] = frozenset()
    """Their gradients wait for `take_held`."""
    counted: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """The elements of the flattened parameter that this rank counts in the gradient's norm, where others hold the rest
    too and count it. A parameter that is not here is counted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a step added up to over all ranks, as tensors that nobody has to wait for."""

    loss_sum: torch.Tensor
    count: torch.Tensor
    norm: torch.Tensor | None = None
    """The 2-norm of all gradients together, where it was asked for."""


class Sync(Protocol):
    """What the trainer asks of every way to exchange gradients."""

    pieces: Sequence[Piece]
    """What the optimizer updates."""

    flats: Sequence[FlatParameters]
    """Where pieces are parts of: the buffers that hold parameters. Empty where every rank has whole parameters."""

    gathering: Gathers | None
    """Who lets parameters come and go; None where they stay."""

    @property
    def keeps_step(self) -> bool:
        """Forward passes exchange something, so every rank must run as many as the others."""

    def begin(self) -> None:
        """Forget the last step's gradients."""

    def arm(self, names: Collection[str] | None = None) -> None:
        """The next backward pass is the last one of this step, for these parameters or all: exchange what it makes
        ready, beside it."""

    def complete(self, names: Collection[str]) -> None:
        """No more gradients of these will come in this step: what waits for them may leave."""

    def held_gradient(self, name: str) -> torch.Tensor:
        """What has added up here of a gradient that is held, to be added to in place."""

    def take_held(self) -> None:
        """The gradients that were held are complete now."""

    def skip_microbatch(self) -> None:
        """Take part in what a microbatch's forward and backward passes exchange, without samples."""

    def end_microbatch(self) -> None:
        """A microbatch's backward pass is over."""

    def ignoring(self) -> AbstractContextManager[object]:
        """Backward passes in here only keep this rank in step with the others; their gradients count for nothing."""

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool) -> Totals:
        """Complete the exchange."""

    def publish(self) -> None:
        """Make the model's parameters follow what the optimizer updated."""

    def state(self) -> dict[str, Any]:
        """What must be kept for the same plan to go on to the bit: plain values and tensors."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""


def whole_pieces(model: nn.Module, layouts: Mapping[str, Layout]) -> tuple[Piece, ...]:
    """Every trainable parameter as it is."""
    return tuple(
        Piece(name=name, tensor=parameter, layout=layouts[name])
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def norm_of(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of tensors together, in float64, without waiting for a device."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
    return total.to(device)


class Counted:
    """What of the pieces' gradients this rank counts in their norm."""

    def __init__(self, pieces: Sequence[Piece], apart: Apart) -> None:
        self._parts: list[tuple[nn.Parameter, tuple[Range, ...] | None]] = []
        for piece in pieces:
            ranges = apart.counted.get(piece.name)
            if ranges is not None and piece.layout.flat_range is not None:
                first, last = piece.layout.flat_range
                ranges = tuple(
                    (max(a, first) - first, min(b, last) - first) for a, b in ranges if a < last and b > first
                )
            if ranges != ():
                self._parts.append((piece.tensor, ranges))

    def gradients(self) -> list[torch.Tensor]:
        found = []
        for parameter, ranges in self._parts:
            if parameter.grad is not None:
                found += [parameter.grad] if ranges is None else [parameter.grad.flatten()[a:b] for a, b in ranges]
        return found


class Counting:
    """Whether gradients count, for syncs whose hooks ask."""

    _counting = True

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        self._counting = False
        try:
            yield
        finally:
            self._counting = True


class WholeGradients:
    """What all syncs have in common whose ranks hold whole parameters and whole gradients."""

    keeps_step = False
    flats: Sequence[FlatParameters] = ()
    gathering: Gathers | None = None

    def __init__(self, pieces: Sequence[Piece], apart: Apart) -> None:
        self.pieces: Sequence[Piece] = tuple(pieces)
        self._parameters = tuple(piece.tensor for piece in self.pieces)
        self._counted = Counted(self.pieces, apart)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def skip_microbatch(self) -> None:
        pass

    def end_microbatch(self) -> None:
        pass

    def held_gradient(self, name: str) -> torch.Tensor:
        parameter = next(piece.tensor for piece in self.pieces if piece.name == name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def publish(self) -> None:
        pass

    def norm(self, device: torch.device) -> torch.Tensor:
        return norm_of(self._counted.gradients(), device)


class Alone(WholeGradients):
    """Nothing to exchange but the loss: there is one data rank, or this rank's stage has nothing to train."""

    def __init__(self, pieces: Sequence[Piece], group: Group, apart: Apart) -> None:
        super().__init__(pieces, apart)
        self._group = group

    def arm(self, names: Collection[str] | None = None) -> None:
        pass

    def complete(self, names: Collection[str]) -> None:
        pass

    def take_held(self) -> None:
        pass

    def ignoring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool) -> Totals:
        norm = self.norm(loss_sum.device) if with_norm else None
        if self._group.size == 1:
            return Totals(loss_sum=loss_sum, count=count, norm=norm)
        totals = torch.stack([loss_sum.double(), count.double()])
        all_reduce(totals, self._group)
        return Totals(loss_sum=totals[0], count=totals[1], norm=norm)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state
