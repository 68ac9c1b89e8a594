"""Workers of several ranks whose connections are lost at different moments, and whose servers die: all ranks of a
worker come together again in one session, begin the same clocks, and nothing is lost or applied twice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dying_servers import WORKER_START, Dying, File
from served_workers import SHAPES, Play, batch_of, first_weights, gradients_of, make_settings, optimizer_spec, part_of

from weft.plan.partition.server_shards import ServedTensor
from weft.server.protocol.frames import frame_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Commit, Kind, Message
from weft.server.protocol.one_clock import OneClock, StoreBoard
from weft.server.protocol.settings import Settings
from weft.server.protocol.worker_rank import SESSION_BITS, State, WorkerRank

HOLDERS = {"embedding": (0,), "head": (1,), "bias": (0, 1)}
NUM_RANKS, STEPS, RATE, COUNT = 2, 8, 0.1, 4


def settings_of_ranks(**changes: Any) -> Settings:
    numels = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    tensors = tuple(
        ServedTensor(name=name, numel=numel, item_bytes=8, holders=HOLDERS[name]) for name, numel in numels.items()
    )
    given = dict(num_ranks=NUM_RANKS, tensors=tensors, optimizer=optimizer_spec(lr=RATE), bucket_bytes=96)
    return make_settings(**{**given, **changes})


class Group:
    """The ranks of one worker, which compute together, with weights of which each rank writes those that it has."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number, self.weights = number, first_weights()
        self.texts: dict[int, dict[int, str]] = {}
        self.made: dict[int, dict[str, torch.Tensor]] = {}
        self.ranks = [Rank(self, place, settings) for place in range(NUM_RANKS)]

    def gradients(self, clock: int) -> dict[str, torch.Tensor]:
        """Computed once, by the first rank that needs them."""
        if clock not in self.made:
            self.made[clock] = gradients_of(self.weights, batch_of(self.number, clock, COUNT))[0]
        return self.made[clock]


class Rank:
    """One of them, with what a test's run asks of a worker."""

    def __init__(self, group: Group, place: int, settings: Settings) -> None:
        self.group, self.place, self.name, self.start = group, place, 10 * group.number + place, WORKER_START
        layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        views = [
            [
                part_of(layout, part, group.weights) if place in settings.tensors[one.tensor].holders else None
                for part, one in enumerate(layout.parts)
            ]
            for layout in layouts
        ]
        first = group.number == 0
        self.rank = WorkerRank(settings, views, worker=group.number, start=self.start, place=place, gives_first=first)
        self.peers = {server: f"{self.name}/0/{server}".encode() for server in range(settings.num_servers)}
        self.one_clock, self.has_posted = OneClock(self), False
        self.put_off: deque[Message] = deque()
        self.computed: list[int] = []

    def write(self, number: int, text: str) -> None:
        self.group.texts.setdefault(number, {})[self.place] = text

    def read(self, number: int) -> Sequence[str] | None:
        found = self.group.texts.get(number, {})
        return [found[place] for place in range(NUM_RANKS)] if len(found) == NUM_RANKS else None

    def receive(self, message: Message) -> list[Message]:
        if self.has_posted and message.kind in (Kind.BEGIN, Kind.WEIGHTS):
            self.put_off.append(message)
            return []
        return self.rank.receive(message)

    def advance(self) -> list[Message]:
        """What the main thread of a rank does next (`ServerClient.wait_for_weights`, and a step)."""
        if not self.has_posted and self.rank.state == State.HERE:
            self.one_clock.post(self.rank.session, self.rank.begun)
            self.has_posted = True
        if not self.has_posted or not self.one_clock.is_whole:
            return []
        self.has_posted = False
        session = self.one_clock.next_session()
        made = self.step() if session is None else self.rank.go_back(session)
        while self.put_off:
            made += self.rank.receive(self.put_off.popleft())
        return made

    def step(self) -> list[Message]:
        clock, made = self.rank.clock, []
        gradients = self.group.gradients(clock)
        for layout in self.rank.layouts:
            for bucket, parts in enumerate(layout.buckets):
                if layout.owners[bucket] == self.place:
                    frames = [frame_of(part_of(layout, part, gradients).clone()) for part in parts]
                    made.append(self.rank.push(layout.server, bucket, frames))
        self.computed.append(clock)
        said = Commit(count=COUNT, loss_sum=0.0, scale=1.0, lr_factor=1.0, compute_s=0.0, num_buckets=0)
        return made + self.rank.commit(said)


class Losing(Dying):
    """A run of such workers."""

    def __init__(self, settings: Settings, *, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = [File() for _ in range(settings.num_servers)]
        self.attempts = [0] * settings.num_servers
        self.being_written, self.all_records, self.told = {}, [], {}
        self.settings = settings
        self.groups = [Group(number, settings) for number in range(settings.num_workers)]
        Play.__init__(self, settings, [one for group in self.groups for one in group.ranks])  # type: ignore[misc]
        for one in self.workers.values():
            self.hello(one)

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        super().deliver(way, key)
        for group in self.groups:
            while made := [(one, found) for one in group.ranks if (found := one.advance())]:
                for one, found in made:
                    self.say(one, found)  # type: ignore[arg-type]

    def lose(self, name: int, server: int) -> None:
        """One connection of one rank, with what is on its way."""
        one = self.workers[name]
        self.to_servers.pop((name, server), None)
        self.to_workers.pop((name, server), None)
        one.peers[server] += b"'"
        self.by_peer[one.peers[server]] = one
        self.say(one, one.rank.hello_again(server))

    def play_losing(self, *, losses: int, deaths: int) -> int:
        """To the end; returns how many sessions were lost."""
        self.steps_at_most, num_delivered = STEPS, 0
        events = ["loss"] * losses + ["death"] * deaths
        self.chance.shuffle(events)
        while (found := self.open()) or events:
            if found:
                self.deliver(*self.chance.choice(found))
            num_delivered += 1
            assert num_delivered < 100_000, "they talk for ever"
            if events and (not found or self.chance.random() < 0.02):
                if events.pop() == "loss":
                    self.lose(self.chance.choice(sorted(self.workers)), self.chance.randrange(len(self.servers)))
                else:
                    self.kill_server(self.chance.randrange(len(self.servers)))
            if self.chance.random() < 0.02:
                self.save_some()
        return losses + deaths

    def require_together(self) -> None:
        """All ranks of each worker are in one session, at all servers, and have computed the same clocks."""
        for group in self.groups:
            sessions = {one.rank.session for one in group.ranks}
            sessions |= {server.members.session_of(group.number) for server in self.servers}
            assert len(sessions) == 1, sessions
            assert all(server.members.workers == tuple(range(len(self.groups))) for server in self.servers)
            assert {one.rank.state for one in group.ranks} == {State.SENT}
            first, *others = group.ranks
            assert all(one.computed == first.computed for one in others)
            assert first.computed == sorted(set(first.computed)), "no clock twice"


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 40))]


@pytest.mark.parametrize(("losses", "deaths"), [(6, 0), (3, 2)])
@pytest.mark.parametrize("seed", SEEDS)
def test_synchronous_updates_are_those_of_whole_workers(seed: int, losses: int, deaths: int) -> None:
    made = Losing(settings_of_ranks(num_workers=2, num_servers=2, clip_norm=0.5), seed=seed)
    num_events = made.play_losing(losses=losses, deaths=deaths)
    made.require_together()
    assert {server.version for server in made.servers} == {STEPS}
    updates = [one for one in made.decisions() if one.chosen]
    assert [one.version for one in updates] == list(range(STEPS))
    weights = {name: torch.nn.Parameter(one) for name, one in first_weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    for one in updates:
        now = {name: value.detach() for name, value in weights.items()}
        gradients = [gradients_of(now, batch_of(worker, one.version, COUNT))[0] for worker in one.chosen]
        for name, value in weights.items():
            value.grad = sum(gradient[name] for gradient in gradients) / (COUNT * len(gradients))
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.5)
        optimizer.step()
    for name, value in made.weights().items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-11, atol=1e-11)
    for group in made.groups:
        assert group.ranks[0].rank.session - (WORKER_START << SESSION_BITS) <= 4 * num_events


@pytest.mark.parametrize(("losses", "deaths"), [(6, 0), (3, 2)])
@pytest.mark.parametrize(("mode", "staleness"), [("async", 0), ("bounded", 1)])
@pytest.mark.parametrize("seed", SEEDS[:3] + SEEDS[6:16])
def test_asynchronous_gradients_count_once(mode: str, staleness: int, seed: int, losses: int, deaths: int) -> None:
    """Each worker's gradient of each clock is a constant of its own: weights say how often each was applied."""
    settings = settings_of_ranks(
        num_workers=2, num_servers=2, mode=mode, staleness=staleness, optimizer=optimizer_spec(lr=1.0, momentum=0.0)
    )
    made = Losing(settings, seed=seed)
    for group in made.groups:
        group.made = {
            clock: {
                name: torch.full(shape, 4.0 * 10.0 ** (-group.number * STEPS - clock), dtype=torch.float64)
                for name, shape in SHAPES.items()
            }
            for clock in range(STEPS)
        }
    made.play_losing(losses=losses, deaths=deaths)
    made.require_together()
    computed = [group.ranks[0].computed for group in made.groups]
    applied = sum(10.0 ** (-number * STEPS - clock) for number, clocks in enumerate(computed) for clock in clocks)
    assert max(max(clocks) for clocks in computed) == STEPS - 1
    for name, value in made.weights().items():
        moved = first_weights()[name] - value
        torch.testing.assert_close(moved, torch.full_like(moved, applied), rtol=0, atol=1e-14)


class Store:
    """As much of torch's store as a board needs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gets_all = True

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def has_extended_api(self) -> bool:
        return self.gets_all

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.mark.parametrize("gets_all", [True, False])
def test_a_board_in_a_store_keeps_what_somebody_may_still_read(gets_all: bool) -> None:
    store = Store()
    store.gets_all = gets_all
    clocks = [OneClock(StoreBoard(store, "worker", rank=rank, size=2)) for rank in (0, 1)]
    for number in range(5):
        for rank, one in enumerate(clocks):
            one.post(7 + rank, [number if number != 3 else rank])
            assert one.is_whole == (rank == 1)
        assert all(one.is_whole for one in clocks)
        assert [one.next_session() for one in clocks] == ([None, None] if number != 3 else [9, 9])
    assert len(store.values) == 4
