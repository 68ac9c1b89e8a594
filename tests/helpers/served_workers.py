"""Workers of a parameter server in one process: they train a small regression, and what they exchange is a list of
messages that a test may delay, repeat, drop or record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from weft.plan.exchange.push_format import rows_together
from weft.plan.partition.server_shards import ServedTensor
from weft.plan.plan import Codec
from weft.server.other_servers import TO_LEADER
from weft.server.protocol.fixed import FixedValues
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Begin, Commit, Kind, Message, pack_message
from weft.server.protocol.settings import Settings
from weft.server.protocol.worker_rank import State, WorkerRank
from weft.server.server import ParameterServer, Reply
from weft.sync.push_codecs import PushCodecs

SHAPES = {"embedding": (40, 6), "head": (6, 3), "bias": (3,)}


def make_settings(**changes: Any) -> Settings:
    """Of two workers and one server; SGD with momentum in float64."""
    tensors = tuple(ServedTensor(name=name, numel=int(np.prod(shape)), item_bytes=8) for name, shape in SHAPES.items())
    given = dict(
        job="test",
        weft="0",
        mode="sync",
        num_servers=1,
        num_workers=2,
        num_ranks=1,
        staleness=0,
        backups=0,
        compensation=0.0,
        lr_scaling="none",
        clip_norm=0.0,
        bucket_bytes=1000,
        pull="master",
        codec={},
        tensors=tensors,
        dtypes=("float64",) * len(tensors),
        optimizer=optimizer_spec(),
        splits=True,
    )
    return Settings(**{**given, **changes})  # type: ignore[arg-type]


def coded_settings(codec: Codec, **changes: Any) -> Settings:
    """The same with a codec that compresses matrices."""
    tensors = tuple(
        replace(one, is_coded=True, row_numel=rows_together(codec, SHAPES[one.name]))
        if len(SHAPES[one.name]) > 1 or codec.name == "half"
        else one
        for one in make_settings().tensors
    )
    return make_settings(**{"codec": asdict(codec), "tensors": tensors, **changes})


def optimizer_spec(name: str = "torch.optim.sgd.SGD", **settings: Any) -> dict[str, Any]:
    given = settings or {"lr": 0.1, "momentum": 0.9}
    return {"class": name, "groups": [{"settings": given, "tensors": list(SHAPES)}]}


def first_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


def batch_of(worker: int, clock: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + clock)
    tokens = torch.randint(0, SHAPES["embedding"][0], (size,), generator=generator)
    return tokens, torch.randn(size, SHAPES["bias"][0], dtype=torch.float64, generator=generator)


def gradients_of(
    weights: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients of a sum of losses, and that sum."""
    leaves = {name: one.detach().clone().requires_grad_() for name, one in weights.items()}
    tokens, targets = batch
    output = torch.tanh(leaves["embedding"][tokens]) @ leaves["head"] + leaves["bias"]
    loss = (output - targets).square().mean(1).sum()
    loss.backward()
    return {name: one.grad for name, one in leaves.items() if one.grad is not None}, loss.item()


class PlayedWorker:
    """A worker of one rank, which computes as soon as it has its weights."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        *,
        size: Callable[[int], int] = lambda clock: 4,
        start: int = 1,
        host: str = "",
        fixed: FixedValues | None = None,
    ) -> None:
        """`host`: whose servers it shares memory with."""
        self.settings, self.size = settings, size
        self.weights = first_weights()
        layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        views = [[part_of(layout, part, self.weights) for part in range(len(layout.parts))] for layout in layouts]
        first = dict(gives_first=number == 0, fixed=fixed, host=host)
        self.rank = WorkerRank(settings, views, worker=number, start=start, **first)  # type: ignore[arg-type]
        self.name = number
        self.peers = {server: f"{number}/{start}".encode() for server in range(settings.num_servers)}
        self.begun: list[Begin] = []
        self.sent: dict[int, list[Message]] = {}
        """What was pushed, by clock."""
        self.codecs: PushCodecs | None = None
        if settings.codec:
            formats = {(one.server, n): format_ for one in layouts for n, format_ in enumerate(one.pushes)}
            group = settings.optimizer["groups"][0]["settings"]
            momentum = float(group.get("momentum", 0)), bool(group.get("nesterov", False))
            self.codecs = PushCodecs(
                settings.compression,
                formats,
                worker=number,
                device=torch.device("cpu"),
                momentum=lambda key, place: momentum,
            )
        self.spoil: Callable[[int, int, dict[str, torch.Tensor]], None] = lambda worker, clock, gradients: None
        """May change gradients."""
        self.is_finite: Callable[[int, int], bool] = lambda worker, clock: True
        """What it says of its gradients."""

    @property
    def number(self) -> int:
        return self.rank.worker

    @property
    def clock(self) -> int:
        return self.rank.clock

    @property
    def refused(self) -> str | None:
        return self.rank.refused

    def message(self, kind: Kind, **more: Any) -> Message:
        rank = self.rank
        return Message(kind=kind, job=self.settings.digest, session=rank.session, worker=max(rank.worker, 0), **more)

    def hello(self) -> Message:
        """That to the first server."""
        return self.rank.hello()[0]

    def receive(self, message: Message) -> list[Message]:
        """The messages to send."""
        answers = self.rank.receive(message)
        return answers + (self.step() if self.rank.state == State.HERE else [])

    def step(self) -> list[Message]:
        """Compute and push a gradient."""
        if self.codecs is not None and self.begun:
            last = max(self.sent)
            is_used = self.rank.begins[0].used > last and self.size(last) > 0
            self.codecs.end(is_made=is_used, unit=scale_of(last) / scale_of(self.clock))
        self.begun.append(self.rank.begins[0])
        count = self.size(self.clock)
        gradients, loss = gradients_of(self.weights, batch_of(self.number, self.clock, count))
        self.spoil(self.number, self.clock, gradients)
        scale = scale_of(self.clock)
        made, is_finite = [], self.is_finite(self.number, self.clock)
        if self.codecs is not None:
            self.codecs.begin()
        for layout in self.rank.layouts if count else ():
            for bucket, parts in enumerate(layout.buckets):
                values = [part_of(layout, part, gradients) / scale for part in parts]
                if self.codecs is None:
                    made.append(self.rank.push_gradients(layout.server, bucket, values))
                    continue
                frames = self.codecs.encode((layout.server, bucket), values, step=self.clock)
                is_finite = is_finite and self.codecs.is_finite
                assert frames is not None
                made.append(self.rank.push(layout.server, bucket, frames))
        said = Commit(
            count=count,
            loss_sum=loss,
            scale=scale,
            lr_factor=1.0,
            compute_s=0.0,
            num_buckets=0,
            is_finite=is_finite,
        )
        self.sent[self.clock] = made + self.rank.commit(said)
        return self.sent[self.clock]


def add_noise(worker: int, clock: int, gradients: dict[str, torch.Tensor]) -> None:
    """Make all entries of gradients differ, also of tokens that a batch does not have: of equal ones, rounding decides
    what a codec does with them."""
    generator = torch.Generator().manual_seed(77 + 1000 * worker + clock)
    for one in gradients.values():
        one += torch.randn(one.shape, dtype=one.dtype, generator=generator)


def scale_of(clock: int) -> float:
    """What a worker divides its gradients by, and servers have to undo: powers of two, so that codecs round alike."""
    return (0.5, 4.0, 1.0)[clock % 3]


def part_of(layout: ServerLayout, part: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The view of a part in whole tensors."""
    one = layout.parts[part]
    return tensors[layout.settings.tensors[one.tensor].name].reshape(-1)[one.start : one.stop]


def server_peer(number: int) -> bytes:
    """The first server's connection to another one."""
    return f"server {number}".encode()


class Play:
    """Servers and workers, and the messages between them in queues that are emptied in an order of one's own."""

    def __init__(self, settings: Settings, workers: Sequence[PlayedWorker], *, host: str = "") -> None:
        """`host`: that of the servers."""
        self.host = host
        self.servers = [self.make_server(number) for number in range(settings.num_servers)]
        self.workers = {one.name: one for one in workers}
        self.by_peer = {peer: one for one in workers for peer in one.peers.values()}
        self.server_by_peer = {server_peer(number): number for number in range(1, len(self.servers))}
        self.to_servers: dict[tuple[int, int], deque[Message]] = {}
        """By worker and server: messages keep their order between two ends."""
        self.to_workers: dict[tuple[int, int], deque[Message]] = {}
        self.between: dict[tuple[int, int], deque[Message]] = {}
        """By the numbers of two servers."""
        self.log: list[tuple[int, bytes, Message]] = []
        """All that servers have received, in order."""
        self.now_s = 0.0
        self.steps_at_most = 10**9
        for server in self.servers[1:]:
            for reply in server.introduce():
                self.answer(server.number, reply)

    def make_server(self, number: int) -> ParameterServer:
        return ParameterServer(number, host=self.host)

    def say(self, worker: PlayedWorker, messages: Sequence[Message]) -> None:
        for message in messages:
            self.to_servers.setdefault((worker.name, message.server), deque()).append(message)

    def hello(self, worker: PlayedWorker) -> None:
        self.say(worker, worker.rank.hello())

    def open(self) -> list[tuple[str, tuple[int, int]]]:
        """Queues that have something."""
        across = [("across", key) for key, queue in sorted(self.between.items()) if queue]
        up = across + [("up", key) for key, queue in sorted(self.to_servers.items()) if queue]
        return up + [
            ("down", key) for key, queue in sorted(self.to_workers.items()) if queue and self._may_go(queue[0])
        ]

    def _may_go(self, message: Message) -> bool:
        """False for what begins a step too many."""
        return message.kind != Kind.BEGIN or message.clock < self.steps_at_most

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        """The next message of a queue."""
        number, server = key
        if way == "across":
            message = self.between[key].popleft()
            peer = TO_LEADER if number == 0 else server_peer(number)
            for reply in self.servers[server].receive(peer, pack_message(message), self.now_s):
                self.answer(server, reply)
            return
        if way == "up":
            message = self.to_servers[key].popleft()
            peer = self.workers[number].peers[server]
            self.log.append((server, peer, message))
            for reply in self.servers[server].receive(peer, pack_message(message), self.now_s):
                self.answer(server, reply)
            return
        worker = self.workers[number]
        message = self.to_workers[key].popleft()
        self.say(worker, worker.receive(message))

    def answer(self, server: int, reply: Reply) -> None:
        other = 0 if reply.peer == TO_LEADER else self.server_by_peer.get(reply.peer)
        worker = self.by_peer.get(reply.peer)
        if other is not None:
            self.between.setdefault((server, other), deque()).append(reply.message)
        elif worker is not None:
            # A copy, as a network makes one: the weights change in place.
            frames = tuple(bytearray(one) for one in reply.message.frames)
            queue = self.to_workers.setdefault((worker.name, server), deque())
            queue.append(replace(reply.message, frames=frames))

    def run(self, steps: int, *, pick: Callable[[int], int] = lambda count: 0) -> None:
        """Let every worker take so many steps; `pick`: which of so many queues is next."""
        self.steps_at_most = steps
        while found := self.open():
            self.deliver(*found[pick(len(found))])

    def weights(self) -> dict[str, torch.Tensor]:
        """What the servers have."""
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for server in self.servers:
            assert server.layout is not None and server.store is not None
            for part, value in zip(server.layout.parts, server.store.parameters, strict=True):
                flat = found[server.layout.settings.tensors[part.tensor].name].view(-1)
                flat[part.start : part.stop] = value.detach()
        return found


def play(settings: Settings, steps: int, *, pick: Callable[[int], int] = lambda count: 0, **workers: Any) -> Play:
    """A whole run with the workers that the settings name."""
    played = [PlayedWorker(number, settings, **workers) for number in range(settings.num_workers)]
    made = Play(settings, played, host=workers.get("host", ""))
    for one in made.workers.values():
        made.hello(one)
    made.run(steps, pick=pick)
    return made
