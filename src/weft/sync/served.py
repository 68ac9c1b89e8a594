"""The sync of a worker of parameter servers, around that of its own ranks: it pushes gradients and takes weights.

    backward      |-- head --|-- block 3 --|-- block 2 --|-- block 1 --|-- embedding --|
    pushes                 1 |~~~~~|      2 |~~~~~|                                    | 3 commit ── 4 weights ~~~

(1) A bucket is pushed to its server as soon as all its gradients are complete, in whatever order that happens: nobody
else waits in it. (2) It leaves from where autograd put it. (3) What was not pushed is, after the backward pass; the
commit says what the worker knows of its batch. (4) The optimizer is the servers': the step ends when all of them have
begun to send their weights, which the next forward pass waits for layer by layer (`arriving_weights.py`); ranks of a
worker that has several wait for all. Inside a worker nothing changes. Where its ranks sum gradients (rings, tied
stages), buckets are pushed after that, each by the first rank that holds it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from weft.comm.group import Traffic
from weft.errors import JobError
from weft.hosts import host_id
from weft.mesh import Mesh
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.partition.served_wire import SERVERS
from weft.server.protocol.client import ServerClient
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Begin, Commit
from weft.server.protocol.one_clock import board_of
from weft.server.protocol.optimizer_state import PartState
from weft.server.protocol.served_run import ServedRun
from weft.server.protocol.settings import MASTER
from weft.server.protocol.worker_rank import WorkerRank
from weft.sync.arriving_weights import ArrivingWeights, Views
from weft.sync.base import PipelineSync, Totals
from weft.sync.compressed_all_reduce import clip_to_share
from weft.sync.kept_codecs import KeptCodecs
from weft.sync.push_codecs import Momentum, PushCodecs
from weft.sync.push_when_complete import BucketKey, PushWhenComplete
from weft.sync.served_buckets import OutgoingBucket, Place, buckets_of, outgoing_buckets, places_of
from weft.sync.served_clock import ServedClock
from weft.sync.served_optimizer import momentum_of, state_of
from weft.sync.served_progress import Progress
from weft.sync.served_tensors import fixed_of, refuse_narrow, served_tensors, settings_of
from weft.sync.whole_parameters import NoSync
from weft.sync.wrapping_sync import WrappingSync

log = logging.getLogger("weft")


class ServedSync(WrappingSync):
    """Pushes the gradients of a worker to servers, and takes their weights."""

    def __init__(
        self, inner: PipelineSync, model: nn.Module, blocks: Sequence[str], *, summed: Collection[str] = ()
    ) -> None:
        """`blocks`: of the model, by name. `summed`: gradients that several ranks of the worker add up after the
        backward pass."""
        super().__init__(inner)
        self._arriving = ArrivingWeights(model, blocks, self.pieces, self.flats, self._wait_for_buckets)
        self._summed = frozenset(summed) if isinstance(inner, NoSync) else {one.name for one in self.pieces}
        self._client: ServerClient | None = None
        self._pushing: PushWhenComplete | None = None
        self._buckets: dict[BucketKey, OutgoingBucket] = {}
        self._pushed: set[BucketKey] = set()
        self._timeout_s = math.inf
        self._progress: Progress | None = None
        self._join: Callable[[], None] | None = None
        """Makes this worker a part of its run, which it is not yet."""
        self._places: list[list[Place | None]] = []
        self._codecs: PushCodecs | None = None
        self.kept = KeptCodecs()
        """What they keep, for checkpoints."""
        self._clip = 0.0
        """Norm to which gradients are clipped before they are compressed; 0 clips nothing."""
        self._committed = -1
        """The last clock of which all was pushed."""
        self._clock: ServedClock | None = None
        self.said: Commit | None = None
        """What was said of the last gradients: what servers make of them."""

    @property
    def has_joined(self) -> bool:
        """This worker takes part in its run, whose servers have weights."""
        return self._client is not None

    def take_part(self) -> Begin:
        """What the servers said when this worker's clock began; joins the run before, if it has not, which is
        collective among the worker's ranks."""
        if self._join is not None:
            join, self._join = self._join, None
            join()
        assert self._clock is not None
        return self._clock.told[0][1]

    @property
    def told(self) -> list[tuple[int, Begin]]:
        """By server: the version of this clock's weights, and what it said when the clock began."""
        self.take_part()
        assert self._clock is not None
        return self._clock.told

    @property
    def exchanged_bytes(self) -> list[tuple[int, int]]:
        """Sent to each server so far, and received from it."""
        assert self._client is not None
        self.settle()
        return self._client.exchanged_bytes

    @property
    def places(self) -> list[list[Place | None]]:
        """By server and part, where it lies in this rank's pieces; none before this worker has joined."""
        return self._places

    @property
    def shares_batch(self) -> bool:
        """Every update is made of one batch, of which each worker has a part."""
        assert self._client is not None
        return self._client.rank.settings.is_sync

    def join_later(self, run: ServedRun, trainer: Progress, mesh: Mesh, *, timeout_s: float) -> None:
        """Join the run when others are needed for the first time: until then a checkpoint may be loaded."""
        self._timeout_s = timeout_s
        self._progress = trainer
        self._join = functools.partial(self._join_now, run, trainer, mesh)

    def _join_now(self, run: ServedRun, trainer: Progress, mesh: Mesh) -> None:
        """Join the run, and wait for its weights, which are this worker's own if it is the first; collective among its
        ranks. A worker that joins later goes on where the others are."""
        optimizer = trainer.optimizer
        with torch.no_grad():
            for piece in self.pieces:
                piece.tensor.data = piece.tensor.data.contiguous()  # servers have elements in order
        fixed = fixed_of(trainer.named_model, self, trainer.layouts, mesh)
        together = served_tensors(self.pieces, optimizer, mesh, run.plan.codec, fixed)
        if hasattr(optimizer, "use_norms") and any("[" in one.name for one in together.tensors):
            raise JobError(
                f"{type(optimizer).__name__} needs the norms of whole tensors, and a rank of this worker has a part of "
                "some: servers would take the norms of parts; use another optimizer, or workers of one rank"
            )
        refuse_narrow(self.pieces, run.plan)
        settings = settings_of(run, together, num_ranks=mesh.world.size, needs_norms=hasattr(optimizer, "use_norms"))
        layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        number_of = {name: number for number, name in enumerate(together.names)}
        self._places = [list(places_of(layout, number_of)) for layout in layouts]
        views = self._arriving.begin(buckets_of(self.pieces, layouts, self._places), self._views)
        place = mesh.world.rank
        self._buckets = {(one.server, one.number): one for one in outgoing_buckets(layouts, number_of, place)}
        if run.plan.codec.name != "none":
            self._codecs = PushCodecs(
                run.plan.codec,
                {key: layouts[one.server].pushes[one.number] for key, one in self._buckets.items()},
                worker=run.worker,
                device=mesh.world.device,
                momentum=self._momentum_of(optimizer) if run.plan.codec.name == "dgc" else None,
            )
            self._clip = run.plan.codec.clip
        self._pushing = PushWhenComplete(self.pieces, self._early_buckets(), self._push)
        rank = WorkerRank(
            settings,
            views,
            worker=run.worker,
            start=run.start,
            place=place,
            gives_first=run.worker == 0,
            first_state=functools.partial(self._state_of, optimizer) if optimizer.state else None,
            progress=(trainer.steps_done, trainer.data_position),
            earlier_starts=run.earlier_starts,
            host="" if run.plan.comm.transport == "c10d" else host_id(),
            fixed=fixed,
        )
        traffic = mesh.traffic.setdefault(SERVERS, Traffic())
        board = board_of(mesh.world, f"{run.job}/{run.worker}/{run.start}")
        self._client = ServerClient(run.addresses, run.key, rank, traffic=traffic, board=board)
        self._client.wait_for_weights(timeout_s=self._timeout_s)  # the first values of others, all at once
        self._publish_master()
        self._clock = ServedClock(self._client, self._arriving, timeout_s=self._timeout_s)
        begin = self._clock.told[0][1]
        optimizer.state.clear()
        self.kept.join(self._codecs, settings, goes_on=begin.step == trainer.steps_done)
        if begin.step:
            trainer.steps_done, trainer.data_position = begin.step, begin.position

    def leave(self, *, failed: bool = False) -> None:
        """This worker ends; `failed`: maybe not on all of its ranks."""
        if self._client is not None:
            self._client.close(failed=failed)
            self._client = None

    def commit(
        self, *, count: float, loss_sum: float, divisor: float, lr_factor: float, compute_s: float, is_finite: bool
    ) -> bool:
        """Say that all gradients of this clock were pushed; they were divided by `divisor`. False: they were not, and
        the worker goes on without them."""
        assert self._client is not None and self._clock is not None and self._progress is not None
        is_torn = self._clock.is_torn()
        self.said = Commit(
            count=count,
            loss_sum=loss_sum,
            scale=divisor,
            lr_factor=lr_factor,
            compute_s=compute_s,
            num_buckets=0,  # counted where they are kept
            step=self._progress.steps_done + 1,
            position=self._progress.data_position,
            is_finite=is_finite and (self._codecs is None or self._codecs.is_finite),
        )
        if is_torn:
            self.said = replace(self.said, count=0.0, loss_sum=0.0)
            log.warning(
                "worker %d lost a connection while weights were arriving, and goes on without the gradient of step %d",
                self._client.rank.worker,
                self.said.step,
            )
            return False
        self._committed = self._client.rank.clock
        self._client.commit(self.said)
        return True

    def take_weights(self) -> None:
        """Wait until the next clock has begun; its weights come while they are used."""
        assert self._clock is not None
        self._clock.go_on()

    def _wait_for_buckets(self, buckets: Collection[BucketKey]) -> None:
        assert self._clock is not None
        self._clock.wait_for_buckets(buckets)

    def settle(self) -> None:
        if self._clock is not None:
            self._clock.settle()
        super().settle()

    def end_codecs(self, *, count: float, unit: float) -> None:
        """Keep what codecs did not send, if an update was made of what they sent, which is known with the next weights.
        `count`: this worker's targets. `unit`: that of this step's gradients relative to the next one's."""
        if self._codecs is not None:
            is_used = self.take_part().used > self._committed
            self._codecs.end(is_made=is_used and count > 0, unit=unit)

    def _publish_master(self) -> None:
        """The model computes with copies of what servers send, where these are in another format."""
        if self.flats:
            self.inner.publish()
            self.inner.settle()

    @torch.no_grad()
    def fetch_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Fill in the optimizer's state from the servers, and the weights that belong to it."""
        assert self._client is not None and self._clock is not None
        self.settle()
        for server, part, weights, state in self._client.fetch_state(timeout_s=self._timeout_s):
            place = self._places[server][part]
            assert place is not None
            number, start, stop = place
            self._range(*place).copy_(weights)
            piece = self.pieces[number].tensor
            own = optimizer.state[piece]
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    own[name] = value
                    continue
                if name not in own:
                    own[name] = torch.empty(piece.shape, dtype=value.dtype, device=piece.device)
                own[name].view(-1)[start:stop].copy_(value)
        self._publish_master()
        self._clock.look_again()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Go on with what servers send of their weights, after `fetch_state` has brought the weights themselves."""
        assert self._client is not None
        if (pull := self._client.rank.settings.pull) != MASTER:
            for piece in self.pieces:
                piece.tensor.copy_(piece.tensor.to(torch_dtype(pull)))
            self._publish_master()

    def _momentum_of(self, optimizer: torch.optim.Optimizer) -> Momentum:
        """Of each part of a bucket."""
        pieces, buckets, of_piece = self.pieces, self._buckets, momentum_of(optimizer)
        return lambda key, place: of_piece(pieces[buckets[key].parts[place][0]].tensor)

    def _state_of(self, optimizer: torch.optim.Optimizer, server: int, part: int) -> PartState:
        place = self._places[server][part]
        assert place is not None
        return state_of(optimizer, self.pieces, place)

    def _views(self) -> Views:
        """Those that weights are written to, beside whatever graph they are in."""
        return [[None if one is None else self._range(*one).data for one in places] for places in self._places]

    def _range(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Flattened elements of a piece."""
        return self.pieces[number].tensor.detach().view(-1)[start:stop]

    def consensus(self) -> AbstractContextManager[None]:
        self.take_part()  # for the weights of all workers, also before the first step
        self.settle()
        return super().consensus()

    def end_step(self, loss: torch.Tensor) -> torch.Tensor:
        told, trainer = self.take_part(), self._progress
        assert trainer is not None
        if not self.shares_batch:
            return loss
        if told.step > trainer.steps_done:  # updates were made without this worker
            trainer.steps_done, trainer.data_position = told.step, told.position
        return torch.tensor(told.loss_sum / told.count, dtype=torch.float64)

    def begin(self) -> None:
        super().begin()
        self._pushed.clear()
        if self._codecs is not None:
            self._codecs.begin()
        if self._pushing is not None:
            self._pushing.begin()

    def arm(self) -> None:
        super().arm()
        if self._pushing is not None:
            self._pushing.arm()

    def arm_parameters(self, names: Collection[str]) -> None:
        super().arm_parameters(names)
        if self._pushing is not None:
            self._pushing.arm_parameters(names)

    def complete(self, names: Collection[str]) -> None:
        super().complete(names)
        if self._pushing is not None:
            self._pushing.complete(names)

    @contextmanager
    def _ignoring_all(self) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(super().ignoring())
            if self._pushing is not None:
                contexts.enter_context(self._pushing.ignoring())
            yield

    def ignoring(self) -> AbstractContextManager[object]:
        return self._ignoring_all()

    def finish(self, loss_sum: torch.Tensor, count: torch.Tensor, *, with_norm: bool, compute_s: float = 0.0) -> Totals:
        self.settle()
        totals = super().finish(loss_sum, count, with_norm=with_norm, compute_s=compute_s)
        if self._clip:
            self._clip_own()
        for key in self._buckets:
            if key not in self._pushed:
                self._push(key)
        return totals

    @torch.no_grad()
    def _clip_own(self) -> None:
        """Scale this worker's gradient, before it is compressed, to its share of `[codec] clip`: at most clip / √W as a
        term of the mean of W workers, which update together; it is divided by its own targets here, not by theirs."""
        assert self._client is not None
        settings, num_workers = self._client.rank.settings, 1
        if settings.is_sync:
            num_workers = max(self.take_part().num_workers - settings.backups, 1)
        clip_to_share([piece.tensor for piece in self.pieces], self._clip * num_workers, num_workers)

    def _early_buckets(self) -> list[tuple[BucketKey, tuple[int, ...]]]:
        """The buckets that may leave during the backward pass, with the pieces in them."""
        if self._clip:  # the norm is known after it
            return []
        return [
            (key, tuple({number for number, *_ in one.parts}))
            for key, one in self._buckets.items()
            if not any(self.pieces[number].name in self._summed for number, *_ in one.parts)
        ]

    def _gradient(self, number: int) -> torch.Tensor | None:
        return self.pieces[number].tensor.grad

    def _push(self, key: BucketKey) -> None:
        """Send a bucket, unless no part of it has a gradient."""
        assert self._client is not None and self._clock is not None
        if self._clock.is_torn():
            return
        bucket = self._buckets[key]
        parts = [(self._gradient(number), start, stop) for number, start, stop in bucket.parts]
        ranges = [None if one is None else one.reshape(-1)[start:stop] for one, start, stop in parts]
        if self._codecs is not None:
            assert self._progress is not None
            self._pushed.add(key)
            if (frames := self._codecs.encode(key, ranges, step=self._progress.steps_done)) is not None:
                self._client.push_frames(bucket.server, bucket.number, frames)
        elif any(one is not None for one in ranges):
            self._pushed.add(key)
            self._client.push(bucket.server, bucket.number, ranges)
