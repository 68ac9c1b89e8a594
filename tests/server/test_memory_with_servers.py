"""Ranks and servers of one host that share memory: the bits are those over sockets, whoever dies, and nothing stays."""

from __future__ import annotations

import gc
import mmap
import os
import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from dying_servers import Dying, EarlyWorker, ReusingWorker, applied_of, assert_same_bits, fresh_updates, noting_applied
from served_training import server_plan
from served_workers import Play, PlayedWorker, make_settings, play

from weft.comm.shared_memory import segments
from weft.hosts import host_id
from weft.plan.partition.flat_buffers import ParameterSpec
from weft.plan.partition.server_shards import ServedTensor
from weft.planning.server_memory import predict_server_memory
from weft.server.protocol import rank_share, shared_places
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Commit, Kind, Message, pack_message
from weft.server.protocol.shared_places import SharePlaces
from weft.server.protocol.worker_rank import State, WorkerRank
from weft.server.server import ParameterServer
from weft.server.weights.shared_weights import WeightMemory
from weft.server.weights.updates import Updates

HOST = "this one"


@pytest.fixture(autouse=True)
def also_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_places, "LEAST_BYTES", 0)


def num_shared(made: Play) -> int:
    return sum(message.kind == Kind.PUSH_SHARED for _, _, message in made.log)


MODES: list[dict[str, Any]] = [
    dict(),
    dict(num_servers=2, clip_norm=0.1, bucket_bytes=96),
    dict(backups=1, num_workers=3),
    dict(mode="async", num_workers=3),
    dict(mode="async", compensation=0.1, lr_scaling="staleness", num_workers=3),
    dict(mode="bounded", staleness=1, num_servers=2),
    dict(pull="bfloat16"),
    dict(pull="float16", mode="async", num_workers=3),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("changes", MODES)
def test_the_bits_are_those_over_sockets(changes: dict[str, Any], seed: int) -> None:
    """In the same order of arrival, whatever it is: also where one worker reads for long while others update."""
    settings = make_settings(**changes)
    expected = play(settings, 8, pick=random.Random(seed).randrange)
    made = play(settings, 8, pick=random.Random(seed).randrange, host=HOST)
    assert num_shared(made) > 0 == num_shared(expected)
    for number, worker in made.workers.items():
        assert worker.begun == expected.workers[number].begun
        assert all(torch.equal(one, worker.weights[name]) for name, one in expected.workers[number].weights.items())
    assert all(torch.equal(one, made.weights()[name]) for name, one in expected.weights().items())
    assert all(not server.refused for server in made.servers)


TIED: dict[str, tuple[int, ...]] = {"tied": (0, 1), "first": (0,), "last": (1,)}
"""A tensor of both ranks, and one of each."""


def two_ranks(
    host: str, num_clocks: int, holders: dict[str, tuple[int, ...]] = TIED
) -> tuple[list[dict[str, torch.Tensor]], Counter[Kind], ParameterServer]:
    """A worker of two ranks, by which tensors they hold: their weights, what the server got, and it."""
    tensors = tuple(ServedTensor(name=name, numel=30, item_bytes=8, holders=of) for name, of in holders.items())
    groups = [{"settings": {"lr": 0.5}, "tensors": list(holders)}]
    settings = make_settings(
        num_workers=1,
        num_ranks=2,
        tensors=tensors,
        optimizer={"class": "torch.optim.sgd.SGD", "groups": groups},
    )
    layout = ServerLayout.of(settings, 0)
    names = [tensors[part.tensor].name for part in layout.parts]
    held = [{name: torch.ones(30, dtype=torch.float64) for name in names if place in holders[name]} for place in (0, 1)]
    ranks = [
        WorkerRank(settings, [[mine.get(name) for name in names]], worker=0, start=1, place=place, host=host)
        for place, mine in enumerate(held)
    ]
    server, found = ParameterServer(0, host=host), Counter[Kind]()
    queue = deque((place, message) for place, rank in enumerate(ranks) for message in rank.hello())
    while queue:
        place, message = queue.popleft()
        found[message.kind] += 1
        for reply in server.receive(bytes([place]), pack_message(message), 0.0):
            (to,) = reply.peer
            queue.extend((to, answer) for answer in ranks[to].receive(reply.message))
            found[reply.message.kind] += 1
            if ranks[to].state == State.HERE and ranks[to].clock < num_clocks:
                queue.extend((to, said) for said in pushed(ranks[to], layout, names, held[to]))
    return held, found, server


def pushed(rank: WorkerRank, layout: ServerLayout, names: list[str], held: dict[str, torch.Tensor]) -> list[Message]:
    """What a rank says with gradients that are its weights, times the number of the clock."""
    made = []
    for bucket, parts in enumerate(layout.buckets):
        if layout.owners[bucket] == rank.place:
            gradients = [held[names[part]] * (rank.clock + 1) for part in parts]
            made.append(rank.push_gradients(0, bucket, gradients))
    said = Commit(count=2.0, loss_sum=0.0, scale=1.0, lr_factor=1.0, compute_s=0.0, num_buckets=0)
    return made + rank.commit(said)


def test_ranks_of_one_worker_have_memory_of_their_own() -> None:
    expected, by_socket, _ = two_ranks("", 4)
    found, shared, _ = two_ranks(HOST, 4)
    assert all(torch.equal(one, found[place][name]) for place in (0, 1) for name, one in expected[place].items())
    assert torch.equal(found[0]["tied"], found[1]["tied"]) and not found[0]["tied"].eq(1).any()
    assert (by_socket[Kind.PUSH], by_socket[Kind.PUSH_SHARED], shared[Kind.PUSH]) == (3 * 4, 0, 0)
    assert shared[Kind.PUSH_SHARED] == 3 * 4 and shared[Kind.WEIGHTS_SHARED] >= 4 * 4


def memories_of(server: ParameterServer) -> list[WeightMemory]:
    assert server.store is not None and server.store._shared is not None
    return server.store._shared._memories


def test_a_rank_that_holds_nothing_here_keeps_no_memory_busy() -> None:
    holders: dict[str, tuple[int, ...]] = {"first": (0,), "second": (0,), "third": (0,)}
    expected, _, _ = two_ranks("", 6, holders)
    found, shared, server = two_ranks(HOST, 6, holders)
    assert all(torch.equal(one, found[0][name]) for name, one in expected[0].items())
    assert shared[Kind.WEIGHTS_SHARED] >= 6 and server.shares.of(0, 1) is not None
    assert len(memories_of(server)) == 1  # every update is made in place


def test_a_rank_that_never_says_what_it_has_taken_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_share.RankShare, "took", lambda self, clock: None)
    made = play(make_settings(mode="async", num_workers=2), 12, host=HOST)
    assert made.servers[0].version == 24 and len(memories_of(made.servers[0])) <= 1 + 2
    expected = play(make_settings(mode="async", num_workers=2), 12)
    assert all(torch.equal(one, made.weights()[name]) for name, one in expected.weights().items())


def test_a_rank_closes_what_the_server_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While workers read several versions at once, and then fewer, again and again."""
    tokens, make = set(), WeightMemory.__init__

    def noted(self: WeightMemory, places: Any) -> None:
        make(self, places)
        tokens.add(self.handle.token)

    monkeypatch.setattr(WeightMemory, "__init__", noted)
    made = play(make_settings(mode="async", num_workers=4), 40, pick=random.Random(0).randrange, host=HOST)
    assert len(tokens) > 3 * (1 + 4)
    for worker in made.workers.values():
        share = worker.rank.shares.of(0)
        assert share is not None and len(share._weights) <= 1 + 4


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]


@pytest.mark.parametrize(
    ("changes", "kind"), [({}, EarlyWorker), ({"clip_norm": 0.5}, ReusingWorker), ({"backups": 1}, EarlyWorker)]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_synchronous_update_is_made_once_whoever_dies(
    seed: int, changes: dict[str, Any], kind: type[ReusingWorker]
) -> None:
    settings = make_settings(num_workers=3, num_servers=2, bucket_bytes=96, **changes)
    made = Dying(settings, seed=seed, kind=kind, host=HOST)
    made.play(20, servers=5, workers=2)
    made.require_all_ended()
    assert num_shared(made) > 20
    for number, server in enumerate(made.servers):
        assert server.version == 20
        store, again = fresh_updates(settings, number)
        for one in (one for one in made.decisions() if one.chosen):
            gradients = again.prepare([made.arrival(worker, one.version, number) for worker in one.chosen])
            again.make(gradients, norm=one.norm)
        assert_same_bits(server, store)


@pytest.mark.parametrize("kind", [ReusingWorker, EarlyWorker])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_asynchronous_update_that_was_told_is_made_once_whoever_dies(
    seed: int, kind: type[ReusingWorker]
) -> None:
    settings = make_settings(num_workers=3, num_servers=2, mode="async", bucket_bytes=96)
    with noting_applied():
        made = Dying(settings, seed=seed, kind=kind, host=HOST)
        made.play(20, servers=4, workers=2)
    made.require_all_ended()
    assert num_shared(made) > 20
    for number, server in enumerate(made.servers):
        applied = [arrival.said for _, arrival in applied_of(server)]
        assert len(set(applied)) == len(applied)
        for worker in made.all_workers():
            told = made.told.get((worker.name, worker.start, number), 0)
            for clock in [one for one in worker.pushed if one < told]:
                assert applied.count(made.arrival_of(worker, clock, number).said) == 1
        store, again = fresh_updates(settings, number)
        for worker_number, arrival in applied_of(server):
            Updates.by_one(again, worker_number, arrival)
        assert_same_bits(server, store)


def test_a_worker_that_was_given_up_gets_new_memory() -> None:
    settings = make_settings(num_workers=1, mode="async")
    made = play(settings, 3, host=HOST)
    server, worker = made.servers[0], made.workers[0]
    old = server.shares.of(0, 0)
    assert old is not None and not old.is_over
    for reply in server.tick(1000.0):
        made.answer(0, reply)
    assert old.is_over and server.shares.of(0, 0) is None
    made.now_s = 1000.0
    made.run(6)
    new = server.shares.of(0, 0)
    assert new is not None and new.token != old.token and worker.clock == 5
    expected = play(settings, 6)
    assert all(torch.equal(one, made.weights()[name]) for name, one in expected.weights().items())


def test_weights_that_change_while_they_are_read_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = play(make_settings(num_workers=1, mode="async"), 2, host=HOST)
    server, worker = made.servers[0], made.workers[0]
    made.steps_at_most = 3
    while "WEIGHTS_SHARED" not in {queue[0].kind.name for queue in made.to_workers.values() if queue}:
        made.deliver(*made.open()[0])
    assert server.store is not None and server.store._shared is not None
    memory = server.store._shared.current
    assert memory is not None
    memory.change()
    made.run(3)
    assert worker.clock == 2 and not any(worker.rank.has_bucket(0, bucket) for bucket in range(3))
    for reply in server.tick(1000.0):  # whose session is over, and who is told so
        made.answer(0, reply)
    made.now_s = 1000.0
    made.run(4)
    assert worker.clock == 3
    assert all(torch.equal(one, made.weights()[name]) for name, one in play(worker.settings, 4).weights().items())


@pytest.mark.parametrize("which", ["writes", "reads"])
def test_a_rank_that_cannot_open_the_memory_goes_on_with_frames(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = rank_share.open_segment

    def refuse(handle: segments.SegmentHandle, *, sealed: str) -> segments.Segment:
        if sealed == which:
            raise PermissionError("not you")
        return opened(handle, sealed=sealed)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_share, "open_segment", refuse)
    settings = make_settings(num_workers=1)
    made = play(settings, 5, host=HOST)
    # Weights that cannot be opened may be those of a server that has just died: they are asked for twice.
    assert num_shared(made) == (0 if which == "writes" else 3) and made.workers[0].clock == 4
    assert made.servers[0].shares.of(0, 0) is None
    assert all(torch.equal(one, made.weights()[name]) for name, one in play(settings, 5).weights().items())


def test_emulated_hosts_share_nothing() -> None:
    settings = make_settings()
    workers = [PlayedWorker(0, settings, host=f"{HOST}/1"), PlayedWorker(1, settings)]
    made = Play(settings, workers, host=f"{HOST}/2")
    for one in workers:
        made.hello(one)
    made.run(3)
    assert num_shared(made) == 0 and made.servers[0].version == 3
    kernel, network, processes = host_id().split("/")  # by which `weft lab` tells its hosts apart
    assert network == str(os.stat("/proc/self/ns/net").st_ino)


def test_its_size_is_what_is_predicted() -> None:
    """Shares hold the gradients of workers; places begin at whole lines, behind a few words and flags."""
    settings = make_settings(mode="async", num_workers=3, num_servers=2)
    made = play(settings, 5, pick=lambda count: count - 1, host=HOST)  # each worker reads its weights at once
    shapes = {one.name: (one.numel,) for one in settings.tensors}
    parameters = [ParameterSpec(name=name, shape=shape, dtype="float64") for name, shape in shapes.items()]
    plan = server_plan(3, shards=2, mode="async", bucket_bytes=settings.bucket_bytes)
    for server, predicted in zip(made.servers, predict_server_memory(plan, parameters), strict=True):
        assert server.layout is not None and server.store is not None and server.store._shared is not None
        rounding = (len(server.layout.parts) + 3) * shared_places.LINE_BYTES
        shares = [server.shares.of(number, 0) for number in range(3)]
        sizes = [one.handle["num_bytes"] for one in shares if one is not None]
        assert len(sizes) == 3 and 0 < sum(sizes) - predicted.gradients <= 3 * rounding
        memories = server.store._shared._memories
        assert 1 <= len(memories) <= 1 + 3  # each worker may read another version
        assert all(0 < one.handle.num_bytes - predicted.weights <= rounding for one in memories)


def test_nothing_of_it_stays() -> None:
    play(make_settings(mode="async"), 2, host=HOST)  # what is opened once
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mapped()
    made = play(make_settings(mode="async", num_servers=2, bucket_bytes=96), 5, host=HOST)
    assert mapped() > before[1]
    for server in made.servers:
        open_ones = len(os.listdir("/proc/self/fd"))
        for number in (0, 1):
            assert server.shares.of(number, 0) is not None
        assert len(os.listdir("/proc/self/fd")) == open_ones  # shares have no descriptor once they are open
    del made, server
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), mapped()) == before


def mapped() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:weft" in line for line in file)


def test_what_no_rank_says_of_shared_memory_changes_nothing() -> None:
    settings = make_settings(mode="async")
    made = play(settings, 2, host=HOST)
    server, worker = made.servers[0], made.workers[0]
    share = server.shares.of(0, 0)
    assert share is not None
    right = worker.message(Kind.PUSH_SHARED, clock=2, version=share.token)
    places = SharePlaces.of(worker.rank.layouts[0], 0)
    chance = random.Random(0)
    wrong: list[Message] = [
        replace(right, version=0),
        replace(right, version=share.token ^ 1),
        replace(right, bucket=3),
        replace(right, bucket=2**32 - 1),
        replace(right, frames=(b"x",)),
        *(replace(right, version=chance.getrandbits(64), bucket=chance.getrandbits(32)) for _ in range(1000)),
    ]
    before = server.refused.copy()
    for message in wrong:
        assert server.receive(b"0/1", pack_message(message), 0.0) == []
    share._memory[places.flags[0]] = 2
    assert server.receive(b"0/1", pack_message(right), 0.0) == []
    assert server.receive(b"1/1", pack_message(right), 0.0) == []  # of the other worker
    assert server.refused["malformed"] - before["malformed"] == len(wrong) + 1
    assert server.refused["impostor"] == before["impostor"] + 1
    assert not server.arrivals[0].is_open and server.version == made.servers[0].version
    share._memory[places.flags[0]] = 1
    server.receive(b"0/1", pack_message(right), 0.0)
    assert server.arrivals[0].is_open


def test_a_peer_can_neither_shorten_the_memory_nor_write_weights() -> None:
    owner = segments.SegmentOwner(10_000, "anonymous", sealed="reads")
    for num_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{owner.handle.fd}", num_bytes)
    with open(f"/proc/self/fd/{owner.handle.fd}", "r+b") as file, pytest.raises(PermissionError):
        mmap.mmap(file.fileno(), 0)
    segment = segments.open_segment(owner.handle, sealed="reads")
    owner.segment.part(0, 2)[:] = b"ok"
    assert bytes(segment.part(0, 2)) == b"ok"
    plain = segments.SegmentOwner(10_000, "anonymous")
    with pytest.raises(OSError, match="may change its size"):
        segments.open_segment(plain.handle, sealed="reads")
