"""ZeRO: ranks share out the optimizer's work and state, then the gradients, then the parameters themselves.

    backward      |-- block 3 --|-- block 2 --|-- block 1 --|            update        next forward
    gradients               1 |~~ reduce-scatter ~~| 2 |~~~...         3 my part     4 |~~ all-gather ~~|

(1) A gradient is copied into a flat buffer laid out like the parameters'. (2) A full buffer leaves when all before it
have left, and this rank receives the sum of its part only, which the replicas (hybrid sharding) then add up among each
other. (3) The optimizer updates this rank's part of every parameter; (4) parameters are gathered again, at once at
stages 1 and 2, when a block needs them at stage 3 (`parallel/zero/gather.py`).

With one part only and several replicas this is plain data parallelism, in any mix of number formats: gradients add up
over microbatches in `accumulate`, travel in `reduce`, and are given to the optimizer in the master's dtype.
The tail (loss, count, squared norm, flags of used parameters) is a message of its own: all ranks need all of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from weft.comm.collectives import Pending, all_reduce
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import Gathers
from weft.plan.partition.wire import SHARDED_TAIL_WORDS
from weft.sync.base import Apart, Counted, Counting, Totals, norm_of
from weft.sync.zero_gradients import GradientPool, Gradients, GradientSettings, Reduction, gradient_room

_MOST_IN_FLIGHT = 2
"""Reductions under way at once: enough to keep the wire busy, few enough to bound the memory of transient buffers."""


class ZeroSync(Counting):
    """Reduces gradients to the part each rank keeps, and gathers parameters after the update."""

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        *,
        group: Group,
        replicas: Sequence[Group],
        settings: GradientSettings,
        device: torch.device,
        waits_in_backward: bool,
        apart: Apart,
    ) -> None:
        """`flats` in the order of use; `group` shares them out, `replicas` are groups that keep the same part.

        `waits_in_backward`: layers exchange inside the backward pass (BatchNorm). A rank that waited there for a
        reduction could keep such a layer on another rank waiting, which has not started that reduction; so none does.
        """
        self.flats: Sequence[FlatParameters] = tuple(flats)
        self._group = group
        self._replicas = tuple(replica for replica in replicas if replica.size > 1)
        self._settings = settings
        self._device = device
        self._is_offloaded = any(flat.master.device != device for flat in self.flats)
        self._most_in_flight = None if waits_in_backward else _MOST_IN_FLIGHT
        self.gathering: Gathers | None = None
        # Gradients become ready from the last parameters to the first.
        trainable = [flat for flat in reversed(self.flats) if flat.kind.trainable]
        exchanging = next((one for one in (group, *self._replicas) if one.size > 1), group)
        pool = GradientPool(BufferAllocator(exchanging, device, num_bytes=gradient_room(trainable, settings)))
        self._gradients = tuple(Gradients(flat, group, settings, pool) for flat in trainable)
        self._gradients_of = {gradients.flat: gradients for gradients in self._gradients}
        self.pieces: Sequence[Piece] = tuple(
            piece for gradients in reversed(self._gradients) for piece in gradients.pieces
        )
        self._counted = Counted(self.pieces, apart)
        self._places = {
            name: (turn, member)
            for turn, gradients in enumerate(self._gradients)
            for member, name in enumerate(gradients.flat.names)
        }
        self._held = frozenset(apart.held & self._places.keys())
        first_flag = SHARDED_TAIL_WORDS
        for turn, gradients in enumerate(self._gradients):
            gradients.first_flag = first_flag
            first_flag += len(gradients.flat.names)
            for member, parameter in enumerate(gradients.flat.parameters):
                parameter.register_post_accumulate_grad_hook(self._make_hook(turn, member))
        self._all_used = torch.ones(first_flag, dtype=torch.float64, device=device)
        self._reset()
        self._in_step = False

    @property
    def keeps_step(self) -> bool:
        return self.gathering is not None

    def use(self, gathering: Gathers) -> None:
        """Let parameters come and go (stage 3)."""
        self.gathering = gathering

    def close(self, flats: Sequence[FlatParameters]) -> None:
        """No more gradients will come for these in this backward pass."""
        if self._is_reducing:
            for flat in flats:
                if flat.kind.trainable:
                    self._gradients_of[flat].is_closed = True
            self._launch_full()

    def begin(self) -> None:
        while self._in_flight:  # of a step that ended in an error which the user caught, on all ranks
            self._complete_oldest()
        for pending in self._replicating:
            pending.wait()
        self._reset()
        self._in_step = True
        for piece in self.pieces:
            piece.tensor.grad = None
        for gradients in self._gradients:
            gradients.begin_step()
            for parameter in gradients.flat.parameters:
                parameter.grad = None
        if self.gathering is not None:
            self.gathering.begin_step()

    def _reset(self) -> None:
        self._is_armed = False
        self._armed: set[str] = set()
        self._turn = 0
        self._in_flight: deque[Reduction] = deque()
        self._replicating: list[Pending] = []

    def arm(self, names: Collection[str] | None = None) -> None:
        if names is not None:
            self._armed.update(names)
            return
        self._is_armed = True
        if self.gathering is not None:
            self.gathering.is_last = True

    def complete(self, names: Collection[str]) -> None:
        for name in names:
            if name in self._places and name not in self._held:
                turn, member = self._places[name]
                self._gradients[turn].set_ready(member)
        self._launch_full()

    def held_gradient(self, name: str) -> torch.Tensor:
        turn, member = self._places[name]
        return self._gradients[turn].so_far(member)

    def take_held(self) -> None:
        for name in self._held:
            turn, member = self._places[name]
            self._gradients[turn].set_ready(member)
        self._launch_full()

    def skip_microbatch(self) -> None:
        if self.gathering is not None:
            self.gathering.skip_microbatch()

    def end_microbatch(self) -> None:
        if self.gathering is not None:
            self.gathering.end_microbatch()
        for gradients in self._gradients:
            gradients.settle()
        if self._is_reducing:
            while self._turn < len(self._gradients):
                self._launch()
            self._turn = 0
            for gradients in self._gradients:
                gradients.begin_microbatch()

    @torch.no_grad()
    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool) -> Totals:
        while self._in_flight:
            self._complete_oldest()
        for pending in self._replicating:
            pending.wait()
        self._is_armed = self._in_step = False  # a backward pass of the user's own must not start an exchange
        for gradients in self._gradients:
            gradients.hand_over()
        if self._is_offloaded:
            torch.cuda.current_stream(self._device).synchronize()
        tail = self._exchange_tail(loss_sum, count, with_norm)
        self._drop_unused(tail)
        norm = tail[2].sqrt() if with_norm else None
        return Totals(loss_sum=tail[0], count=tail[1], norm=norm)

    @torch.no_grad()
    def publish(self) -> None:
        for flat in self.flats:
            flat.take_master()
        if self.gathering is not None:
            self.gathering.begin_step()  # what is whole is out of date
        else:
            for pending in [flat.start_refresh() for flat in self.flats if flat.group.size > 1]:
                pending.wait()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state

    @property
    def _is_reducing(self) -> bool:
        return self._in_step and (self._is_armed or self._settings.every_microbatch)

    def _make_hook(self, turn: int, member: int) -> Callable[[torch.Tensor], None]:
        # Autograd keeps the hook where the garbage collector does not see it: it must not keep the trainer alive.
        reference = weakref.ref(self)

        def gradient_ready(parameter: torch.Tensor) -> None:
            sync = reference()
            if sync is not None:
                sync._take(turn, member, parameter)

        return gradient_ready

    def _take(self, turn: int, member: int, parameter: torch.Tensor) -> None:
        """The gradient of a buffer's member is ready."""
        if not self._in_step:
            return
        gradient, parameter.grad = parameter.grad, None
        if not self._counting:
            return
        assert gradient is not None
        gradients = self._gradients[turn]
        name = gradients.flat.names[member]
        is_last = (self._is_reducing or name in self._armed) and name not in self._held
        if is_last and turn < self._turn:
            raise ModelError(
                f'"{name}" got a second gradient in one backward pass after its first was '
                "sent; reentrant checkpointing of shared layers does that, so call torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        gradients.add(member, gradient, is_last=is_last)
        if is_last and gradients.is_full:
            self._launch_full()

    def _launch_full(self) -> None:
        while self._turn < len(self._gradients) and self._gradients[self._turn].is_full:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Start reducing the buffer whose turn it is."""
        gradients = self._gradients[self._turn]
        self._turn += 1
        if len(self._in_flight) == self._most_in_flight:
            self._complete_oldest()
        self._in_flight.append(gradients.start_reduction(is_last=self._is_armed or not self._settings.every_microbatch))
        if self._group.size == 1:  # nothing to wait for before the replicas add up
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.pending.wait()
        reduction.gradients.hand_back(reduction.borrowed)
        if reduction.is_last:
            for group in self._replicas:
                self._replicating.append(reduction.gradients.start_replication(group))

    def _exchange_tail(self, loss_sum: torch.Tensor, count: torch.Tensor, with_norm: bool) -> torch.Tensor:
        """All ranks' losses, counts and squared norms added up, then one flag a parameter: whether any rank used it."""
        tail = self._all_used.clone()
        held = self._counted.gradients() if with_norm else []
        # As tensors: a plain number would make the host wait for the device.
        words = (loss_sum, count, norm_of(held, self._device) ** 2)
        tail[:SHARDED_TAIL_WORDS] = torch.stack([word.to(torch.float64) for word in words])
        for gradients in self._gradients:
            for member in gradients.unused:
                tail[gradients.first_flag + member] = 0.0
        all_reduce(tail, self._group)
        for group in self._replicas:
            # Replicas of a part have the same squares already; what they add is their losses and counts.
            if with_norm:
                tail[2] /= group.size
            all_reduce(tail, group)
        return tail

    def _drop_unused(self, tail: torch.Tensor) -> None:
        """A parameter that no rank used has no gradient. Who used everything knows there is none, and need not look."""
        for gradients in self._gradients:
            if not gradients.unused:
                continue
            flags = tail[gradients.first_flag :].tolist()
            for member in gradients.unused:
                if not flags[member]:
                    gradients.pieces[member].tensor.grad = None
