"""Servers and workers that die at random moments, and are started again: nothing is lost, and nothing applied twice.

All updates are made a second time, from what workers have sent, and give the weights of the servers to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from dying_servers import Dying, EarlyWorker, ReusingWorker, applied_of, assert_same_bits, fresh_updates, noting_applied
from served_workers import first_weights, make_settings, optimizer_spec, part_of, play

from weft.server.protocol.message import Kind, pack_message
from weft.server.recovery import COMES_AGAIN_S, MOST_AHEAD
from weft.server.weights.updates import Updates

KINDS: Sequence[type[ReusingWorker]] = (ReusingWorker, EarlyWorker)
RUNS = [
    (0, ReusingWorker),
    (1, EarlyWorker),
    *(pytest.param(seed, KINDS[seed % 2], marks=pytest.mark.long) for seed in range(2, 20)),
]
"""Seeds, and how workers take their weights."""
ADAMW = optimizer_spec("torch.optim.adamw.AdamW", lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize(
    ("num_servers", "changes"),
    [
        (1, {}),
        (3, {}),
        (5, {}),  # of three tensors, so that two servers have none
        (3, {"clip_norm": 0.5}),
        (2, {"backups": 1, "clip_norm": 0.5}),
        (2, {"optimizer": ADAMW}),
    ],
)
@pytest.mark.parametrize(("seed", "kind"), RUNS)
def test_every_synchronous_update_is_made_once(
    seed: int, num_servers: int, changes: dict[str, Any], kind: type[ReusingWorker]
) -> None:
    settings = make_settings(num_workers=3, num_servers=num_servers, bucket_bytes=96, **changes)
    made = Dying(settings, seed=seed, kind=kind)
    made.play(20, servers=5, workers=2)
    made.require_all_ended()
    assert made.num_left <= 3
    assert {server.version for server in made.servers} == {20}
    updates = [one for one in made.decisions() if one.chosen]
    assert [one.version for one in updates] == list(range(20))
    for number, server in enumerate(made.servers):
        assert server.mode is not None and server.mode.num_lost == 0
        store, again = fresh_updates(settings, number)
        for one in updates:
            gradients = again.prepare([made.arrival(worker, one.version, number) for worker in one.chosen])
            again.make(gradients, norm=one.norm)
        assert_same_bits(server, store)
    require_computed_with_these(made, updates)


def require_computed_with_these(made: Dying, updates: list[Any]) -> None:
    """The last gradients are those at the weights before them."""
    version = updates[-1].version
    weights = first_weights()
    for number in range(len(made.servers)):
        store, again = fresh_updates(made.settings, number)
        for one in updates[:-1]:
            gradients = again.prepare([made.arrival(worker, one.version, number) for worker in one.chosen])
            again.make(gradients, norm=one.norm)
        layout = made.workers[0].rank.layouts[number]
        for part, value in enumerate(store.parameters):
            part_of(layout, part, weights).copy_(value.detach())
    for worker in updates[-1].chosen:
        one = ReusingWorker(worker, made.settings)
        one.weights, one.rank.clock = weights, version
        one.rank.begins = made.workers[worker].rank.begins
        expected = {(m.server, m.bucket): m.frames for m in one.step() if m.kind == Kind.PUSH}
        for number in range(len(made.servers)):
            sent = made.arrival(worker, version, number).buckets
            assert {bucket: tuple(map(bytes, frames)) for bucket, frames in sent.items()} == {
                bucket: tuple(map(bytes, frames)) for (server, bucket), frames in expected.items() if server == number
            }


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize(("seed", "kind"), RUNS)
def test_every_asynchronous_update_that_was_told_is_made_once(
    seed: int, mode: str, num_servers: int, kind: type[ReusingWorker]
) -> None:
    settings = make_settings(
        num_workers=3, num_servers=num_servers, mode=mode, staleness=3 if mode == "bounded" else 0, bucket_bytes=96
    )
    with noting_applied():
        made = Dying(settings, seed=seed, kind=kind)
        made.play(20, servers=4, workers=2)
    made.require_all_ended()
    assert made.num_left <= 3
    for number, server in enumerate(made.servers):
        applied = [arrival.said for _, arrival in applied_of(server)]
        assert len(set(applied)) == len(applied)  # each has a loss of its own
        for worker in made.all_workers():
            told = made.told.get((worker.name, worker.start, number), 0)
            for clock in [one for one in worker.pushed if one < told]:
                said = made.arrival_of(worker, clock, number).said
                assert applied.count(said) == 1, f"worker {worker.name}, clock {clock}"
        store, again = fresh_updates(settings, number)
        for worker, arrival in applied_of(server):
            Updates.by_one(again, worker, arrival)
        assert_same_bits(server, store)


def test_a_worker_that_does_not_come_again_is_given_up() -> None:
    """It died with the server, before a snapshot: its gradients are lost, and counted; those of the others are not."""
    settings = make_settings(num_workers=2)
    made = Dying(settings, seed=0)
    made.run(4)
    made.kill_server(0)
    made.to_workers.clear()
    other = made.workers.pop(1)
    made.to_servers = {key: queue for key, queue in made.to_servers.items() if key[0] == 0}
    server, worker = made.servers[0], made.workers[0]
    made.run(6)
    assert server.version == 0 and worker.clock == 3  # it waits
    assert server.tick(made.now_s) == []
    server.receive(b"another connection", pack_message(other.rank.alive()), 20.0)  # it computes
    for made.now_s in (COMES_AGAIN_S + 1, COMES_AGAIN_S + 21):
        assert server.version == 0
        made.say(worker, [worker.rank.alive()])
        made.run(6)
        replies = server.tick(made.now_s)
    for reply in replies:
        made.answer(0, reply)
    assert server.version == 4 and server.mode is not None and server.mode.num_lost == 4
    made.run(6)
    assert server.version == 6 and worker.clock == 5


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_are_never_far_ahead_of_a_snapshot(mode: str) -> None:
    """They keep what is not in one, and cannot keep everything."""
    made = Dying(make_settings(num_workers=1, mode=mode), seed=0)
    worker = made.workers[0]
    made.run(MOST_AHEAD + 5)
    assert worker.clock == MOST_AHEAD - 1 and len(worker.rank.kept.clocks) == MOST_AHEAD
    made.begin_save(0)
    made.end_save(0)
    made.run(MOST_AHEAD + 5)
    assert worker.clock == MOST_AHEAD + 4 and len(worker.rank.kept.clocks) == 5


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_kept_where_servers_are_not_started_again(mode: str) -> None:
    made = play(make_settings(num_workers=2, mode=mode, num_servers=2), 5)
    for worker in made.workers.values():
        assert worker.rank.kept.clocks == [worker.clock]
    if mode == "sync":
        assert len(made.servers[0].mode.decisions.as_records()) <= 4


def test_decisions_are_kept_until_all_servers_have_saved_them() -> None:
    made = Dying(make_settings(num_workers=2, num_servers=2), seed=0)
    made.run(6)
    leader = made.servers[0].mode
    assert [one["number"] for one in leader.decisions.as_records()] == list(range(7))
    for number in (1, 0):
        made.begin_save(number)
        made.end_save(number)
    assert len(leader.decisions.as_records()) == 7  # it hears of the other one's with the next gradients
    made.run(7)
    made.begin_save(0)
    made.end_save(0)
    assert [one["number"] for one in leader.decisions.as_records()] == [7]
