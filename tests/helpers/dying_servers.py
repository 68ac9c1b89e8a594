"""Servers and workers in one process that die at moments of a test's choice, and are started again: servers from what
they had written, workers from nothing."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from served_workers import Play, PlayedWorker, first_weights, part_of

from weft.server import snapshot as snapshots
from weft.server.agreement import Decision
from weft.server.all_together import AllTogether
from weft.server.decisions import read_decision
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Kind, Message, read_commit
from weft.server.protocol.settings import Settings
from weft.server.protocol.worker_rank import State
from weft.server.server import ParameterServer, Reply
from weft.server.snapshot import Snapshot
from weft.server.weights.store import PartStore
from weft.server.weights.updates import Updates
from weft.server.workers.arrivals import Arrival

WORKER_START = 1


class ReusingWorker(PlayedWorker):
    """Computes every gradient in the same memory, as training does."""

    def __init__(self, number: int, settings: Settings, *, start: int = WORKER_START, host: str = "") -> None:
        super().__init__(number, settings, start=start, host=host)
        self.start = start
        self.peers = {server: f"{number}/{start}/{server}/0".encode() for server in self.peers}
        self.rank._earlier_starts = list(range(WORKER_START, start))
        self._memory: dict[tuple[int, int], list[bytearray]] = {}
        self.pushed: dict[int, list[Message]] = {}
        """Copies of what was sent, by clock."""
        push = self.rank.push

        def push_from_memory(server: int, bucket: int, frames: Any) -> Message:
            memory = self._memory.setdefault((server, bucket), [bytearray(one) for one in frames])
            for held, frame in zip(memory, frames, strict=True):
                held[:] = frame
            return push(server, bucket, [memoryview(one) for one in memory])

        if not host:  # else it is the memory that is shared
            self.rank.push = push_from_memory  # type: ignore[method-assign]

    def step(self) -> list[Message]:
        found = super().step()
        self.pushed[self.clock] = [replace(one, frames=tuple(map(bytes, one.frames))) for one in found]
        return found


class EarlyWorker(ReusingWorker):
    """Begins to compute as soon as servers have begun its clock, with each bucket of weights as it comes."""

    num_early = num_torn = 0
    """Clocks that were begun before all weights were there; and those of which nothing could be sent."""

    def __init__(self, number: int, settings: Settings, *, start: int = WORKER_START, host: str = "") -> None:
        super().__init__(number, settings, start=start, host=host)
        self._used: dict[tuple[int, int], list[torch.Tensor]] | None = None
        """Weights as they were when they came, by server and bucket."""

    def receive(self, message: Message) -> list[Message]:
        answers, rank = self.rank.receive(message), self.rank
        if self._used is None and rank.state == State.ARRIVING and rank.has_begun:
            rank.use()
            self._used = {}
            self.num_early += 1
        if self._used is not None:
            for key in self._buckets():
                if key not in self._used and rank.has_bucket(*key):
                    self._used[key] = self._values(*key)
        if rank.state != State.HERE:
            return answers
        if self._used is not None and rank.is_torn:
            self.num_torn += 1
        elif self._used is not None:
            for key, values in self._used.items():
                assert all(map(torch.equal, values, self._values(*key))), "weights were changed while they were used"
            assert set(self._used) == set(self._buckets())
        self._used = None
        return answers + self.step()

    def _buckets(self) -> list[tuple[int, int]]:
        return [(one.server, bucket) for one in self.rank.layouts for bucket in range(len(one.buckets))]

    def _values(self, server: int, bucket: int) -> list[torch.Tensor]:
        layout = self.rank.layouts[server]
        return [part_of(layout, part, self.weights).clone() for part in layout.buckets[bucket]]


class File:
    """What a server has written."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.records: list[dict[str, Any]] = []
        self.applied: list[tuple[int, Arrival]] = []
        """What was applied in the snapshot, for the test alone."""


class Dying(Play):
    """A run in which anybody may die."""

    def __init__(
        self, settings: Settings, *, seed: int, kind: type[ReusingWorker] = ReusingWorker, host: str = ""
    ) -> None:
        self.kind = kind
        self.chance = random.Random(seed)
        self.files = [File() for _ in range(settings.num_servers)]
        self.attempts = [0] * settings.num_servers
        self.being_written: dict[int, tuple[Snapshot, list[tuple[int, Arrival]]]] = {}
        self.all_records: list[dict[str, Any]] = []
        self.settings = settings
        self.over: list[ReusingWorker] = []
        """Workers that have died."""
        self.told: dict[tuple[int, int, int], int] = {}
        """By worker, start and server: the first clock that the worker was not told is applied."""
        workers = [kind(number, settings, host=host) for number in range(settings.num_workers)]
        super().__init__(settings, workers, host=host)
        for one in self.workers.values():
            self.hello(one)

    def make_server(self, number: int) -> ParameterServer:
        return ParameterServer(number, attempt=self.attempts[number], comes_back_s=60.0, host=self.host)

    def answer(self, server: int, reply: Reply) -> None:
        self.write(server)
        super().answer(server, reply)

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        if way == "down" and (message := self.to_workers[key][0]).kind == Kind.BEGIN:
            worker = self.workers[key[0]]
            if message.session == worker.rank.session:
                told = (worker.name, worker.start, key[1])
                self.told[told] = max(self.told.get(told, 0), message.clock)
        if way == "up":  # a copy, as a network makes one: the worker's memory changes
            message = self.to_servers[key][0]
            self.to_servers[key][0] = replace(message, frames=tuple(map(bytes, message.frames)))
        super().deliver(way, key)

    # Files.

    def write(self, number: int) -> None:
        """What has to be in a file before anything is said."""
        server = self.servers[number]
        if isinstance(server.mode, AllTogether):
            records = server.mode.decisions.records
            self.files[number].records += records
            self.all_records += records
            records.clear()
        if server.store is not None and not server.recovery.was_saved:
            self.begin_save(number)
            self.end_save(number)

    def begin_save(self, number: int) -> None:
        server = self.servers[number]
        if snapshots.can_take(server):
            taken = copied(snapshots.take(server))
            self.being_written[number] = taken, list(applied_of(server))

    def end_save(self, number: int) -> None:
        server, file = self.servers[number], self.files[number]
        if number not in self.being_written:
            return
        file.snapshot, file.applied = self.being_written.pop(number)
        snapshots.note_saved(server, file.snapshot)
        if isinstance(server.mode, AllTogether):
            file.records = server.mode.decisions.as_records()
        for reply in server.tick(self.now_s):
            self.answer(number, reply)

    def save_some(self) -> None:
        number = self.chance.randrange(len(self.servers))
        (self.end_save if number in self.being_written else self.begin_save)(number)

    # Deaths.

    @property
    def is_quiet(self) -> bool:
        """Nobody has still to catch up with an earlier death."""
        for server in self.servers:
            if server.mode is None or server.store is None or server.mode.is_behind:
                return False
            if server.recovery.must_save(snapshots.next_clocks_of(server)):
                return False
            for worker in self.workers.values():
                if server.members.session_of(worker.name) != worker.rank.session:
                    return False
                if server.arrivals[worker.name].next_clock < server.members.clocks_of(worker.name)[1]:
                    return False
        return True

    def kill_server(self, number: int) -> None:
        """What was on its way from it may still come, and what was on its way to it may come to the next one."""
        self.attempts[number] += 1
        self.being_written.pop(number, None)
        server = self.servers[number] = self.make_server(number)
        file = self.files[number]
        if file.snapshot is not None:
            snapshots.go_on(server, file.snapshot, file.records)
            assert server.updates is not None
            server.updates.__dict__["applied"] = list(file.applied)
        for worker in self.workers.values():
            self._keep_some(self.to_workers, (worker.name, number), last=False)
            self._keep_some(self.to_servers, (worker.name, number), last=True)
            self.by_peer.pop(worker.peers[number], None)
            worker.peers[number] = f"{worker.name}/{worker.start}/{number}/{self.attempts[number]}".encode()
            self.by_peer[worker.peers[number]] = worker
            self.say(worker, worker.rank.hello_again(number))
        for other in range(1, len(self.servers)):
            if number in (0, other):
                self._keep_some(self.between, (other, 0), last=number == 0)
                self._keep_some(self.between, (0, other), last=number != 0, none=number != 0)
                for reply in self.servers[other].introduce():
                    self.answer(other, reply)

    def kill_worker(self, name: int) -> None:
        """Another one takes its place."""
        old = self.workers[name]
        assert isinstance(old, ReusingWorker)
        self.over.append(old)
        for server in range(len(self.servers)):
            self.to_servers.pop((name, server), None)
            self.to_workers.pop((name, server), None)
            self.by_peer.pop(old.peers[server], None)
        new = self.workers[name] = self.kind(name, self.settings, start=old.start + 1, host=self.host)
        self.by_peer |= {peer: new for peer in new.peers.values()}
        self.hello(new)

    def _keep_some(self, queues: dict[Any, deque[Message]], key: Any, *, last: bool, none: bool = False) -> None:
        queue = list(queues.get(key, ()))
        cut = self.chance.randrange(len(queue) + 1)
        queues[key] = deque() if none else deque(queue[cut:] if last else queue[:cut])

    def play(self, steps: int, *, servers: int = 0, workers: int = 0) -> None:
        """Let every worker take so many steps, while so many servers and workers die."""
        self.steps_at_most = steps
        deaths = [self.kill_server] * servers + [self.kill_worker] * workers
        self.chance.shuffle(deaths)  # type: ignore[arg-type]
        num_delivered = 0
        while found := self.open():
            self.deliver(*self.chance.choice(found))
            num_delivered += 1
            assert num_delivered < 200_000, "they talk for ever"
            if self.chance.random() < 0.03:
                self.save_some()
            if deaths and self.chance.random() < 0.02 and self.is_quiet:
                kill = deaths.pop()
                kill(self.chance.randrange(len(self.servers if kill == self.kill_server else self.workers)))
        self.num_left = len(deaths)

    # What it should have been.

    def require_all_ended(self) -> None:
        for worker in self.workers.values():
            assert worker.rank.state == State.SENT and worker.rank.refused is None
        for server in self.servers:
            assert server.mode is not None and not server.mode.is_behind

    def all_workers(self) -> Iterator[ReusingWorker]:
        yield from self.over
        for one in self.workers.values():
            assert isinstance(one, ReusingWorker)
            yield one

    def decisions(self) -> list[Decision]:
        found = {one["number"]: read_decision(one) for one in self.all_records if "number" in one}
        return [found[number] for number in sorted(found)]  # the last record of each has its norm

    def arrival(self, worker: int, clock: int, server: int) -> Arrival:
        """What a worker has sent to a server in a clock; of several starts, which computed the same, the last."""
        *_, last = (one for one in self.all_workers() if one.name == worker and clock in one.pushed)
        return self.arrival_of(last, clock, server)

    def arrival_of(self, worker: ReusingWorker, clock: int, server: int) -> Arrival:
        messages = worker.pushed[clock]
        mine = [one for one in messages if one.server == server]
        return Arrival(
            buckets={one.bucket: one.frames for one in mine if one.kind in (Kind.PUSH, Kind.PUSH_SHARED)},
            commits={0: next(read_commit(one) for one in mine if one.kind == Kind.COMMIT)},
        )


def copied(snapshot: Snapshot) -> Snapshot:
    """As it comes back from a file."""
    return Snapshot(
        plain=json.loads(json.dumps(snapshot.plain)),
        buckets=tuple((tuple(map(bytes, state)), tuple(map(bytes, one))) for state, one in snapshot.buckets),
        fixed=tuple(tuple(map(bytes, one)) for one in snapshot.fixed),
    )


def applied_of(server: ParameterServer) -> list[tuple[int, Arrival]]:
    """What an asynchronous server has applied, in order, where `noting_applied`."""
    assert server.updates is not None
    found: list[tuple[int, Arrival]] = server.updates.__dict__.setdefault("applied", [])
    return found


def noting_applied() -> Any:
    """Context in which servers note what they apply."""
    by_one = Updates.by_one

    def noted(self: Updates, worker: int, arrival: Arrival) -> None:
        copies = {bucket: tuple(map(bytes, frames)) for bucket, frames in arrival.buckets.items()}
        self.__dict__.setdefault("applied", []).append((worker, replace(arrival, buckets=copies)))
        by_one(self, worker, arrival)

    return mock.patch.object(Updates, "by_one", noted)


def fresh_updates(settings: Settings, server: int) -> tuple[PartStore, Updates]:
    """A server's weights and optimizer at the beginning."""
    layout = ServerLayout.of(settings, server)
    weights = first_weights()
    values = [part_of(layout, part, weights).clone() for part in range(len(layout.parts))]
    store = PartStore(settings.tensors, layout.parts, values, settings.optimizer)
    return store, Updates(store, layout, settings)


def assert_same_bits(server: ParameterServer, store: PartStore) -> None:
    assert server.store is not None and server.store.version == store.version
    for one, other in zip(server.store.parameters, store.parameters, strict=True):
        assert torch.equal(one, other)
