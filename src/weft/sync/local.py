"""Local steps: each replica trains by itself, and every few steps replicas exchange their weights (local SGD, DiLoCo).

    replica 0   step  step  step  step ┐          step  step ...
    replica 1   step  step  step  step ┴ average  step  step ...

Inside a replica gradients are exchanged by the sync of its own ranks, which this one wraps. After the updates of steps
that `exchanges_after` names, each rank averages its own pieces with the ranks of other replicas that hold the same
ones: bucket by bucket, two under way at a time. So what is exchanged, and what is kept for it, is sharded as the
weights are. Running statistics of BatchNorm are averaged too; moments of the optimizer stay each replica's own.

Where the outer step needs the weights of the last exchange (the *anchor*), or a codec makes messages small, the change
since then travels; otherwise the weights themselves do. What one collective returns is the same on all its ranks, and
the rest is elementwise: after an exchange replicas are equal to the bit. Copies of one weight on several ranks of a
replica are exchanged in other groups, at other offsets, where sums of three or more replicas may round differently: the
first holder's are given to the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.codecs.base import Codec
from weft.comm.collectives import Pending, all_reduce
from weft.comm.group import Group
from weft.comm.shared_gradients import SharedGradient, SharedGradientExchange
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.exchange.weight_exchange import MAX_BUCKETS_IN_FLIGHT, REPORT_WORDS, report_words
from weft.plan.late_merges import exchanges_after
from weft.plan.partition.replicas import keeps_anchor
from weft.plan.plan import Plan
from weft.sync.base import PipelineSync, Totals
from weft.sync.exchange.compressed_exchange import CodedBucket, CompressedExchange
from weft.sync.exchange.outer import average_, nesterov_
from weft.sync.exchange.weight_buckets import ExchangeBuffers, Part, WeightBucket, weight_buckets
from weft.sync.in_process import InProcessExchange, InProcessSide
from weft.sync.replica_mean import ReplicaMean

Tensors = Callable[[], Sequence[torch.Tensor]]

_COPIED_KINDS = ("weight", "anchor", "momentum")
"""Kinds of tensors of which all ranks of a replica that hold copies must have the same bits."""


class LocalSync(ReplicaMean):
    """A replica's own sync, and the exchange of weights with other replicas."""

    def __init__(
        self,
        inner: PipelineSync,
        group: Group,
        plan: Plan,
        *,
        device: torch.device,
        replica: Group,
        statistics: Tensors = list,
        shared: Sequence[SharedGradient] = (),
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        number: int = 0,
        fragment_of: Mapping[str, int] | None = None,
        in_process: InProcessExchange | None = None,
    ) -> None:
        """`group`: the ranks that hold the same part of each replica; `replica`: all ranks of this one. `statistics`
        looks up running statistics that are averaged. `shared`: weights of which other ranks of the replica hold copies
        that an exchange may round differently. `shapes`: those of the tensors that pieces are flat ranges of, by name.
        `number`: that of this replica. `fragment_of`: the fragment of the model that each piece belongs to, by name,
        where these are exchanged one after the other. `in_process`: the exchange that replicas of one process make
        instead of one over the group."""
        super().__init__(inner)
        self.num_replicas = group.size if in_process is None else plan.num_replicas
        self.steps_done = 0
        self.agrees = True
        self.num_exchanges = 0
        self.merged_step = 0
        """The step after which an exchange was merged last."""
        self.must_stop = False
        self.replica_compute_s = self.replica_must_stop = None
        self._times_s: list[float] = []
        """Compute times of this rank in the steps since the last exchange."""
        self.spread: torch.Tensor | None = None
        """Distance of this rank's weights from the mean at the last exchange, relative to the norm of the mean."""
        self._group, self._plan, self._device, self._number = group, plan, device, number
        self._replica, self._statistics, self._in_process = replica, statistics, in_process
        self.fragment_of = fragment_of or {}
        self._buckets = weight_buckets(
            _parts(inner.pieces, shapes or {}), plan.comm.bucket_bytes, plan.codec, fragment_of=self.fragment_of
        )
        # On the meta device, where memory is predicted, nothing is allocated on the host either.
        self._kept_on = torch.device("cpu") if plan.data.offload and device.type != "meta" else device
        self._anchors: list[torch.Tensor] = []
        self._momenta: list[torch.Tensor] = []
        self._has_begun = False
        """The anchor is what training began from."""
        if keeps_anchor(plan):
            self._anchors = [bucket.read_into(self._keep(bucket)) for bucket in self._buckets]
        if plan.data.outer == "nesterov":
            self._momenta = [self._keep(bucket).zero_() for bucket in self._buckets]
        coded = [place for place, bucket in enumerate(self._buckets) if bucket.coded]
        self._number_of = {place: number for number, place in enumerate(coded)}
        """The numbers that buckets have among those that a codec compresses."""
        self._compressed = self._make_compressed(device)
        self._plain = {
            place: number
            for number, place in enumerate(place for place, bucket in enumerate(self._buckets) if not bucket.coded)
        }
        self._make_buffers()
        self._squares = torch.zeros(2, dtype=torch.float64, device=device)
        self._shared = SharedGradientExchange(shared, bucket_bytes=plan.comm.bucket_bytes)
        ranges = {piece.name: piece.layout.flat_range for piece in inner.pieces if piece.name in self._shared.names}
        self._kept_of_shared = {name: kept for name, kept in ranges.items() if kept is not None}

    def _make_compressed(self, device: torch.device) -> CompressedExchange:
        return CompressedExchange(
            [CodedBucket(tensors=one.coded, numel=one.numel, dtype=one.dtype) for one in self._buckets if one.coded],
            self._plan.codec,
            inside=self._codec_group.alone,
            across=self._codec_group,
            device=device,
            can_fail=False,
            scale=1 / self.num_replicas,
            place=(self._number, self.num_replicas),
        )

    @property
    def _codec_group(self) -> Group:
        """The ranks between which changes travel."""
        return self._group

    def _make_buffers(self) -> None:
        """Collective."""
        self._buffers = ExchangeBuffers([self._buckets[place] for place in self._plain], self._group, self._device)

    def _keep(self, bucket: WeightBucket) -> torch.Tensor:
        is_pinned = self._kept_on.type == "cpu" and self._device.type == "cuda"
        return torch.empty(bucket.numel, dtype=bucket.dtype, device=self._kept_on, pin_memory=is_pinned)

    def begin(self) -> None:
        if self._is_unpublished:
            self._publish()
        if not self._has_begun:  # weights may have been read since this was made
            self._has_begun = True
            self._read_anchors()
        super().begin()

    def _read_anchors(self) -> None:
        for bucket, anchor in zip(self._buckets, self._anchors, strict=bool(self._anchors)):
            bucket.read_into(anchor)

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        if compute_s:
            self._times_s.append(compute_s)
        return super().finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)

    # The exchange.

    def end_update(self) -> None:
        if not self._exchange_if_due():
            self.inner.publish()

    def skip(self) -> None:
        self._exchange_if_due()

    def _exchange_if_due(self) -> bool:
        self.steps_done += 1
        self.agrees = False
        if not exchanges_after(self._plan.data, self.steps_done):
            return False
        self.inner.settle()
        if self._in_process is not None:
            self._in_process.exchange()
        else:
            self._exchange()
        return True

    @torch.no_grad()
    def _exchange(self) -> None:
        pending: list[tuple[int, torch.Tensor, Pending]] = []
        self._compressed.begin(self.steps_done - 1)
        for number in self.exchanged_buckets:
            if number in self._number_of:
                flat = self.fill(number)
                self._compressed.start(self._number_of[number], flat, functools.partial(self._take_coded, number, flat))
                continue
            if len(pending) == MAX_BUCKETS_IN_FLIGHT:
                self._complete(*pending.pop(0))
            flat = self.fill(number)
            pending.append((number, flat, all_reduce(flat, self._group, wait=False)))
        for one in pending:
            self._complete(*one)
        self._compressed.finish()
        self._compressed.end(is_made=True)
        self._copy_shared()
        tail = self.fill_tail()
        all_reduce(tail, self._group)
        self.take_tail(tail)
        self.finish_exchange()

    def _complete(self, number: int, flat: torch.Tensor, exchange: Pending) -> None:
        exchange.wait()
        self.take(number, flat.div_(self.num_replicas))

    def _take_coded(self, number: int, flat: torch.Tensor) -> None:
        self.take(number, flat)
        self._compressed.hand_back(flat)

    @property
    def compressed(self) -> CompressedExchange:
        return self._compressed

    @property
    def further_compressed(self) -> Sequence[CompressedExchange]:
        """Codecs of the same tensors that serve in turn with `compressed`."""
        return ()

    def codec_of(self, number: int) -> Codec | None:
        """The codec of a bucket, if it has one."""
        return self._compressed.codecs[self._number_of[number]] if number in self._number_of else None

    def _copy_shared(self) -> None:
        """Give all ranks of the replica that hold a weight the same bits of it, and of what is kept beside it."""
        tensors = self.own_tensors() if self._shared.names else {}
        nothing = torch.empty(0, device=self._device)  # empty parts are in no bucket
        for kind in dict.fromkeys(kind for name in tensors if (kind := name.partition("/")[0]) in _COPIED_KINDS):
            held = {name: tensors.get(f"{kind}/{name}", nothing) for name in self._shared.names}
            there = {name: one.to(self._device) for name, one in held.items()}
            self._shared.run(there, self._kept_of_shared)
            for name, one in held.items():
                if there[name] is not one:
                    one.copy_(there[name])

    def in_process_side(self) -> InProcessSide:
        """What takes part for this replica in the exchange after this step, where all replicas are in one process."""
        return self

    def begin_exchange(self) -> None:
        """Nothing has to be made for the exchange."""

    def give_back(self, flat: torch.Tensor) -> None:
        """The values of a bucket that a codec compressed were taken."""
        self._compressed.hand_back(flat)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def exchanged_buckets(self) -> Sequence[int]:
        """The numbers of the buckets that travel in this exchange."""
        return range(self.num_buckets)

    @torch.no_grad()
    def fill(self, number: int) -> torch.Tensor:
        """This replica's values of a bucket: its weights, or their change since the last exchange. Without a codec the
        buffer is that of the bucket before the last, which must have been taken."""
        bucket = self._buckets[number]
        if number in self._number_of:
            flat = self._compressed.borrow(bucket.numel, bucket.dtype)
        else:
            flat = self._buffers[self._plain[number]]
        bucket.read_into(flat)
        if self._anchors:
            torch.sub(self._anchors[number].to(flat.device, non_blocking=True), flat, out=flat)
        return flat

    @torch.no_grad()
    def take(self, number: int, mean: torch.Tensor) -> None:
        """Continue from the mean of what all replicas gave; it may be overwritten."""
        bucket, data = self._buckets[number], self._plan.data
        if not self._anchors:
            self._add_squares(bucket, mean)
            bucket.write_from(mean)
            return
        anchor = self._anchors[number]
        if anchor.device != mean.device:
            mean = mean.to(anchor.device)
        self._add_squares(bucket, anchor - mean)
        if data.outer == "nesterov" and self.steps_done > data.switch_step:
            nesterov_(anchor, mean, self._momenta[number], rate=data.outer_lr, beta=data.outer_momentum)
        else:
            average_(anchor, mean)
        bucket.write_from(anchor)

    def _add_squares(self, bucket: WeightBucket, mean: torch.Tensor) -> None:
        """Add to the squared distance from the mean, and to the squared norm of the mean."""
        off = bucket.read_into(torch.empty_like(mean)).sub_(mean)
        found = torch.stack([torch.linalg.vector_norm(off), torch.linalg.vector_norm(mean)])
        self._squares += found.to(self._squares).square_()

    @torch.no_grad()
    def fill_tail(self) -> torch.Tensor:
        """The tail of the exchange, summed over replicas in float64: running statistics, and each replica's report."""
        words = torch.zeros(self.num_replicas, report_words(self._plan), dtype=torch.float64, device=self._device)
        mine = words[self._group.index if self._in_process is None else self._in_process.syncs.index(self)]
        # An assignment would be a copy from the host, which waits.
        mine[0].fill_(sum(self._times_s) / len(self._times_s) if self._times_s else 0.0)
        self._times_s = []  # told now, whenever it is merged
        mine[1].fill_(self.must_stop)
        self._report(mine[REPORT_WORDS:])
        statistics = [one.detach().flatten().to(torch.float64) for one in self._averaged_statistics()]
        return torch.cat([*statistics, words.flatten()])

    def _report(self, words: torch.Tensor) -> None:
        """Fill the words that this sync reports beside those of every sync."""

    def _averaged_statistics(self) -> Sequence[torch.Tensor]:
        """The running statistics that travel with an exchange."""
        return self._statistics()

    @torch.no_grad()
    def take_tail(self, total: torch.Tensor) -> None:
        statistics = self._averaged_statistics()
        num_words = self.num_replicas * report_words(self._plan)
        *means, words = total.split([*(one.numel() for one in statistics), num_words])
        for one, mean in zip(statistics, means, strict=True):
            one.copy_(mean.view(one.shape) / self.num_replicas)
        self.replica_compute_s, self.replica_must_stop = words.view(self.num_replicas, -1)[:, :REPORT_WORDS].unbind(1)

    @torch.no_grad()
    def finish_exchange(self) -> None:
        """All buckets are taken: give the model its new weights."""
        self.spread = (self._squares[0] / self._squares[1]).sqrt()
        self._squares = torch.zeros_like(self._squares)
        self.agrees = True
        self.num_exchanges += 1
        self.merged_step = self.steps_done
        self.inner.publish()

    # Between exchanges.

    def drain(self) -> None:
        """Wait until all that is under way has arrived, without merging it; collective."""

    @torch.no_grad()
    def restart(self, *, steps_done: int) -> None:
        self.steps_done, self.agrees, self._has_begun = steps_done, True, False
        self.must_stop = False
        self.replica_compute_s = self.replica_must_stop = None
        self.merged_step = 0
        self._read_anchors()
        self._compressed.restart()
        for momentum in self._momenta:
            momentum.zero_()

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that a replica has of its own, or that the next exchange needs, by name."""
        found = {f"weight/{piece.name}": piece.tensor.detach() for piece in self.pieces}
        for kind, flats in (("anchor", self._anchors), ("momentum", self._momenta)):
            for bucket, flat in zip(self._buckets, flats, strict=bool(flats)):
                views = zip(bucket.names, bucket.views(flat), strict=True)
                found |= {f"{kind}/{name}": view for name, view in views}
        return found

    def state(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state(),
            "steps_done": self.steps_done,
            "agrees": self.agrees,
            "has_begun": self._has_begun,
            "num_exchanges": self.num_exchanges,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.must_stop = False
        self.replica_compute_s = self.replica_must_stop = None
        self.merged_step = 0
        self.steps_done, self.agrees = int(state["steps_done"]), bool(state["agrees"])
        self._has_begun, self.num_exchanges = bool(state["has_begun"]), int(state["num_exchanges"])


def _parts(pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> list[Part]:
    found = []
    for piece in pieces:
        shape, kept = shapes.get(piece.name, tuple(piece.tensor.shape)), piece.layout.flat_range
        found.append(Part(name=piece.name, tensor=piece.tensor, shape=shape, start=0 if kept is None else kept[0]))
    return found
