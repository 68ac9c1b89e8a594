"""ZeRO: ranks shard the optimizer's work and state, then the gradients, then the parameters themselves.

    backward      |-- block 3 --|-- block 2 --|-- block 1 --|            update        next forward
    gradients               1 |~~ reduce-scatter ~~| 2 |~~~...         3 my part     4 |~~ all-gather ~~|

(1) A gradient is copied into a flat buffer laid out like the parameters'. (2) A full buffer leaves when all before it
have left, and this rank receives the sum of its part only, which the replicas (hybrid sharding) then add up among each
other. Gradients that other stages or tensor ranks hold too are exchanged with these. (3) The optimizer updates this
rank's part of every parameter; (4) parameters are gathered again, beside the next step at stages 1 and 2
(`parallel/zero/overlapped_gather.py`), when a block needs them at stage 3 (`gather.py` there).

With one part only and several replicas this is plain data parallelism, in any mix of number formats: gradients add up
over microbatches in `accumulate`, travel in `reduce`, and are given to the optimizer in the master's dtype.
The tail (loss, count, squared norm, times, flags of used parameters) is a message of its own: all ranks need all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from weft.comm.collectives import Pending, all_reduce
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradientExchange
from weft.parallel.zero.flat_parameters import FlatParameters, Piece
from weft.parallel.zero.gather import ParameterGathering
from weft.parallel.zero.overlapped_gather import OverlappedGathers
from weft.plan.partition.flat_buffers import MAX_IN_FLIGHT, Sharding
from weft.plan.partition.wire import CODEC_TAIL_WORDS, SHARDED_TAIL_WORDS
from weft.sync.base import Totals
from weft.sync.bucketed import BucketedSync
from weft.sync.exchange.compressed_exchange import CompressedExchange
from weft.sync.norm import GradientRules, NormParts, spoil_norm
from weft.sync.replica_compression import ReplicaCompression
from weft.sync.zero_gradients import GradientPool, Gradients, Reduction, gradient_memory_bytes


class ZeroSync(BucketedSync):
    """Reduces gradients to the part each rank keeps, and gathers parameters after the update."""

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        *,
        group: Group,
        replicas: Sequence[Group],
        place: tuple[int, int],
        sharding: Sharding,
        device: torch.device,
        waits_in_backward: bool,
        bucket_bytes: int,
        rules: GradientRules,
        compression: ReplicaCompression | None = None,
    ) -> None:
        """`flats` in the order of use; `group` shares them out, `replicas` are groups that keep the same part. `place`
        is this rank's among all of these together, and their number. `compression`: how replicas compress what they
        exchange.

        `waits_in_backward`: layers exchange inside the backward pass (BatchNorm). A rank that waited there for a
        reduction could keep such a layer on another rank waiting, which has not started that reduction; so none does.
        """
        self.flats: Sequence[FlatParameters] = tuple(flats)
        self.gathering: ParameterGathering | None = None
        """Gathers and frees parameters (stage 3)."""
        self.overlapped_gathers: OverlappedGathers | None = None
        """Gathers parameters after an update (below stage 3)."""
        self._group = group
        self._place, self._num_ranks = place
        self._num_words = SHARDED_TAIL_WORDS + self._num_ranks
        self._replicas = tuple(replica for replica in replicas if replica.size > 1)
        self._every_microbatch = sharding.every_microbatch
        self._device = device
        self._is_offloaded = any(flat.master.device != device for flat in self.flats)
        self._max_in_flight = None if waits_in_backward else MAX_IN_FLIGHT
        # Gradients become ready from the last parameters to the first.
        trainable = [flat for flat in reversed(self.flats) if flat.trainable]
        exchanging = next((one for one in (group, *self._replicas) if one.size > 1), group)
        self._pool = GradientPool(BufferAllocator(exchanging, device, num_bytes=gradient_memory_bytes(trainable)))
        self._gradients = tuple(Gradients(flat, group, sharding, self._pool) for flat in trainable)
        self._bucket_of_flat = {flat: bucket for bucket, flat in enumerate(trainable)}
        self.pieces: Sequence[Piece] = tuple(
            piece for gradients in reversed(self._gradients) for piece in gradients.pieces
        )
        self._norm_parts = NormParts(self.pieces, rules)
        self._tied = rules.tied
        self._shared = SharedGradientExchange(rules.shared, bucket_bytes=bucket_bytes)
        ranges = {piece.name: piece.layout.flat_range for piece in self.pieces if piece.name in self._shared.names}
        self._kept_of_shared = {name: kept for name, kept in ranges.items() if kept is not None}
        self._slots = [(gradients, member) for gradients in self._gradients for member in range(gradients.num_members)]
        super().__init__(
            [name for flat in trainable for name in flat.names],
            [parameter for flat in trainable for parameter in flat.parameters],
        )
        buckets = [bucket for bucket, flat in enumerate(trainable) for _ in flat.names]
        self._set_buckets(buckets, num_early=len(trainable))
        num_extra = 0 if compression is None else CODEC_TAIL_WORDS
        self._all_used = torch.ones(self._num_words + len(buckets) + num_extra, dtype=torch.float64, device=device)
        self._compression = compression
        if compression is not None:
            compression.attach(self._gradients, waits=not waits_in_backward)
        self._reset()
        self._in_step = False

    @property
    def exchanges_in_forward(self) -> bool:
        return self.gathering is not None

    @property
    def exchanges_in_microbatches(self) -> bool:
        return self.exchanges_in_forward or self._every_microbatch

    def close(self, flats: Sequence[FlatParameters]) -> None:
        """No more gradients will come for these in this backward pass."""
        if self._is_reducing:
            for flat in flats:
                if flat.trainable:
                    self._missing[self._bucket_of_flat[flat]] = 0
            self._launch_full()

    def begin(self) -> None:
        self._wait_for_all()  # of a step that ended in an error which the user caught, on all ranks
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
        if self._compression is not None:
            self._compression.begin()

    def _reset(self) -> None:
        self._is_armed = False
        self._disarm()
        self._reset_ready()
        self._in_flight: deque[Reduction] = deque()
        self._replicating: list[Pending] = []

    def arm(self) -> None:
        self._is_armed = True
        if self.gathering is not None:
            self.gathering.is_last = True

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
                self._launch_next()
            self._reset_ready()
            for gradients in self._gradients:
                gradients.begin_microbatch()

    @torch.no_grad()
    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        self.settle()  # of parameters that no microbatch used: the update must not change what is sent
        self._wait_for_all()
        self._is_armed = self._in_step = False  # a backward pass of the user's own must not start an exchange
        shared = {name: self._slots[self._index[name]] for name in self._shared.names}
        self._shared.run({name: g.part_views[m] for name, (g, m) in shared.items()}, self._kept_of_shared)
        for gradients in self._gradients:
            gradients.hand_over()
        if self._is_offloaded:
            torch.cuda.current_stream(self._device).synchronize()
        unused = [
            index
            for index, (gradients, member) in enumerate(self._slots)
            if not gradients.used[member] and self._names[index] not in self._tied
        ]
        tail = self._exchange_tail(loss_sum, count, unused, with_norm=with_norm, compute_s=compute_s)
        lasting: Collection[str] = () if self._compression is None else self._compression.lasting
        absent: set[str] = set()
        if unused:  # a rank that used everything knows that nothing is globally unused, and need not look
            flags = tail[self._num_words :].tolist()
            for index in unused:
                (gradients, member), name = self._slots[index], self._names[index]
                is_used = flags[index] or self._shared.came_from_others(name, gradients.part_views[member])
                if not is_used and name not in lasting:
                    gradients.pieces[member].tensor.grad = None
                    absent.add(name)
        if self._compression is not None:
            self._compression.keep_gradients_of(set(self._names) - absent if absent else self._names)
        times = tail[SHARDED_TAIL_WORDS : self._num_words]
        norm = tail[2].sqrt() if with_norm else None
        totals = Totals(loss_sum=tail[0], count=tail[1], norm=norm, compute_s=times)
        return totals if self._compression is None else spoil_norm(totals, tail[-1])

    def decide(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor | None) -> None:
        if self._compression is not None:
            self._compression.exchange.end(is_made=is_made, factor=1.0 if factor is None else factor)

    @property
    def compressed(self) -> CompressedExchange | None:
        return None if self._compression is None else self._compression.exchange

    def restart(self, *, steps_done: int) -> None:
        if self._compression is not None:
            self._compression.restart(steps_done=steps_done)

    def state(self) -> dict[str, Any]:
        return {} if self._compression is None else self._compression.state()

    def load_state(self, state: dict[str, Any]) -> None:
        if self._compression is not None:
            self._compression.load_state(state)

    @torch.no_grad()
    def publish(self) -> None:
        if self.overlapped_gathers is not None:
            self.overlapped_gathers.start()
            return
        for flat in self.flats:
            flat.take_master()
        if self.gathering is not None:
            self.gathering.begin_step()  # what is whole is out of date

    def settle(self) -> None:
        if self.overlapped_gathers is not None:
            self.overlapped_gathers.wait()

    @property
    def _is_reducing(self) -> bool:
        return self._in_step and (self._is_armed or self._every_microbatch)

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        if not self._in_step:
            return
        gradient, parameter.grad = parameter.grad, None
        if self._ignores:
            return
        assert gradient is not None
        is_last = self._is_reducing or self._armed[index]
        if is_last and self._bucket_of[index] < self._turn:
            self._refuse_second(index)
        gradients, member = self._slots[index]
        gradients.add(member, gradient)
        if is_last and not self._ready[index]:
            self._set_ready(index)

    @torch.no_grad()
    def _launch(self, bucket: int) -> None:
        if len(self._in_flight) == self._max_in_flight:
            self._complete_oldest()
        is_last = self._is_armed or not self._every_microbatch
        self._in_flight.append(self._gradients[bucket].start_reduction(is_last=is_last))
        if self._group.size == 1:  # nothing to wait for before the replicas add up
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.pending.wait()
        self._pool.hand_back(reduction.borrowed)
        if reduction.is_last and self._compression is not None:
            self._compression.start(reduction.gradients)
        elif reduction.is_last:
            for group in self._replicas:
                self._replicating.append(reduction.gradients.start_replication(group))

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._complete_oldest()
        for pending in self._replicating:
            pending.wait()
        if self._compression is not None:
            self._compression.finish()

    def _exchange_tail(
        self, loss_sum: torch.Tensor, count: torch.Tensor, unused: list[int], *, with_norm: bool, compute_s: float
    ) -> torch.Tensor:
        """Losses, counts and squared norms summed over all ranks, then each rank's time, then one flag per parameter
        that some rank used."""
        tail = self._all_used.clone()
        norm = self._norm_parts.norm(self._device) if with_norm else torch.zeros_like(tail[0])
        # As tensors: a plain number would make the host wait for the device.
        words = (loss_sum, count, norm**2)
        tail[:SHARDED_TAIL_WORDS] = torch.stack([word.to(torch.float64) for word in words])
        tail[SHARDED_TAIL_WORDS : self._num_words].zero_()
        tail[SHARDED_TAIL_WORDS + self._place].fill_(compute_s)
        if self._compression is not None:
            tail[-1:] = self._compression.exchange.not_finite > 0
        for index in unused:  # one by one: a list of indices would be copied to the device, and the host wait for it
            tail[self._num_words + index].zero_()
        all_reduce(tail, self._group)
        for group in self._replicas:
            # Replicas of a part have the same squares already; what they add is their losses and counts.
            if with_norm:
                tail[2] /= group.size
            all_reduce(tail, group)
        return tail
