"""The contract of a sync: when gradients are exchanged, and between which ranks.

`training/trainer.py` calls it in this order, every step, on every rank:

    begin()                      before the first microbatch
    arm()                        before the last microbatch's forward pass: from now on gradients may leave when ready
    skip_microbatch()            instead of a forward and backward pass, by a rank without samples in this microbatch
    end_microbatch()             after every microbatch
    finish(loss_sum, count, ...) after the last microbatch, also by a rank that had no data at all
    decide(is_made, factor)      whether the update is made, and what gradients are multiplied by before
    end_update()                 after the optimizer's update: publish, or exchange weights with other replicas before
    skip()                       instead, if the update was skipped
    settle()                     before anything but the next step

In a pipeline (`PipelineSync`) the schedule says when a stage's gradients are complete: `arm_parameters(names)` comes
before the last backward pass of that stage, `complete(names)` after it, and `arm()` and `end_microbatch()` once, before
`finish`. Where gradients are made on weight versions they are *deferred*: `take_deferred()` takes them.

The loss that is differentiated is a *sum* over this rank's targets over a number all ranks agree on, so syncs add
gradients and never average. After `finish` the `.grad` of every piece is the sum over all data ranks; that of a
parameter that no rank used is None, one that only other ranks used has their sum. Gradients that several stages or
tensor ranks hold are then summed over these, or copied from the first (`comm/shared_gradients.py`), also in `finish`.

Every bucket of gradients leaves through `BucketedSync._launch` (`sync/bucketed.py`), with a codec from there through
`exchange/compressed_exchange.py`. A sync between replicas that differ (`sync/local.py`) wraps that of one replica and
adds to its `end_update` and `skip`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import ParameterGathering

if TYPE_CHECKING:
    from weft.sync.exchange.compressed_exchange import CompressedExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all ranks of a step, as tensors that no rank has to wait for."""

    loss_sum: torch.Tensor
    count: torch.Tensor
    norm: torch.Tensor | None = None
    """The 2-norm of all gradients together, where it was asked for."""
    compute_s: torch.Tensor | None = None
    """What each rank of the exchange gave as its compute time, in the order of `mesh.batch_group`; None without one."""
    not_finite: torch.Tensor | None = None
    """Number of ranks with gradients that are not finite; None without a codec, where their sum shows it."""


class Sync(Protocol):
    """The trainer's side of every way to exchange gradients. Methods with a body need not be overridden."""

    pieces: Sequence[Piece]
    """The tensors that the optimizer updates."""

    flats: Sequence[FlatParameters] = ()
    """The flat buffers that hold parameters; none where parameters stay the model's own tensors."""

    agrees: bool = True
    """All replicas hold the same weights."""

    must_stop: bool = False
    """This replica cannot go on, which it reports to the others in the next exchange."""

    replica_compute_s: torch.Tensor | None = None
    """The mean compute time of every replica (`compute_clock.py`), as reported in the last exchange; whoever reads it
    sets it to None."""

    replica_must_stop: torch.Tensor | None = None
    """1 for each replica that must stop, as reported in the last exchange; whoever reads it sets it to None."""

    @property
    def exchanges_in_forward(self) -> bool:
        """True if forward passes are collective, so that every rank must run as many as the others."""
        return False

    @property
    def exchanges_in_microbatches(self) -> bool:
        """True if ranks exchange in every microbatch, so that all must have as many; some of them may be empty."""
        return self.exchanges_in_forward

    def take_part(self) -> object:
        """Take part in the run, from the first call on; what is asked here may set the trainer to a later step."""
        return None

    def begin(self) -> None:
        """Drop the last step's gradients."""

    def arm(self) -> None:
        """The next backward pass is the last one of this step: exchange what it makes ready beside it."""
        return

    def skip_microbatch(self) -> None:
        """Take part in what a microbatch's forward and backward passes exchange, without samples."""
        return

    def end_microbatch(self) -> None:
        """A microbatch's backward pass is over."""
        return

    def ignoring(self) -> AbstractContextManager[object]:
        """Context of backward passes that only keep ranks in step: their gradients are dropped."""
        return nullcontext()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        """Complete the exchange. `compute_s` is a time of this rank that all ranks are told (`compute_clock.py`)."""

    def decide(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor | None) -> None:
        """It is known whether this step's update is made (a tensor, on a GPU that decides by itself: 1 or 0), and by
        what the exchanged gradients are multiplied to get their true unit: a codec changes its state now."""
        return

    @property
    def compressed(self) -> CompressedExchange | None:
        """The codecs through which gradients, or changes of weights, are exchanged; None without a codec."""
        return None

    @property
    def all_compressed(self) -> Sequence[CompressedExchange]:
        """Those of every rank that this process stands for: several where data ranks are played in one process."""
        return () if self.compressed is None else (self.compressed,)

    def publish(self) -> None:
        """Copy what the optimizer updated to the model's parameters, on all ranks; gathers may still be running when it
        returns."""
        return

    def end_update(self) -> None:
        """The optimizer has updated the pieces."""
        self.publish()

    def skip(self) -> None:
        """This step's update was skipped, on all ranks of the replica."""
        return

    def consensus(self) -> AbstractContextManager[None]:
        """Context in which the model has the average of all replicas; collective."""
        return nullcontext()

    def conclude(self) -> None:
        """No step follows: give the model the average of all replicas for good; collective."""
        return

    def end_step(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the step that is over; `loss`: as far as this replica knows it."""
        return loss

    def restart(self, *, steps_done: int) -> None:
        """Weights were read that all replicas share: nothing of earlier exchanges is left."""
        return

    def settle(self) -> None:
        """Wait for the gathers of parameters."""
        return

    def state(self) -> dict[str, Any]:
        """Plain values, which become JSON, from which the same plan resumes bit-exactly."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        return


class PipelineSync(Sync, Protocol):
    """A sync that a schedule tells when which gradients are complete."""

    gathering: ParameterGathering | None = None
    """Gathers and frees parameters under ZeRO-3; None where they stay whole."""

    def arm_parameters(self, names: Collection[str]) -> None:
        """The next backward pass is the last one of this step for these parameters."""
        return

    def complete(self, names: Collection[str]) -> None:
        """No more gradients of these will come in this step: buckets that wait for them may leave."""
        return

    def take_deferred(self) -> None:
        """The gradients that were deferred are complete."""
        return
