"""Servers and workers that die at random moments, and are started again: nothing is lost, and nothing applied twice.

All updates are made a second time, from what workers have sent, and give the weights of the servers to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from dying_servers import Dying, EarlyWorker, ReusingWorker, applied_of, assert_same_bits, fresh_updates, noting_applied
from served_workers import first_weights, make_settings, optimizer_spec, part_of, play

from weft.errors import LaunchError
from weft.server.agreement import Decision
from weft.server.decisions import as_plain, read_decision
from weft.server.protocol.lost_gradients import LostGradients
from weft.server.protocol.message import Begin, Kind, Malformed, pack_message, pack_object
from weft.server.protocol.settings import require_readable
from weft.server.recovery import COMES_AGAIN_S, MOST_AHEAD
from weft.server.server import ParameterServer
from weft.server.snapshot import go_on, take
from weft.server.weights.updates import Said, Updates

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


@pytest.mark.parametrize("died", [0, 1])
@pytest.mark.parametrize("others", [0, 1])
def test_a_worker_and_a_server_that_die_together_where_a_gradient_was_not_finite(died: int, others: int) -> None:
    """Its update was left out everywhere, so the server that has lost what it was made of leaves it out, too, waits for
    no norm of it, and tells of it what the others were told. `others`: workers whose gradients are not lost."""
    settings = make_settings(num_workers=1 + others, num_servers=2, clip_norm=0.5)
    made = Dying(settings, seed=0)
    for worker in made.workers.values():
        worker.is_finite = lambda number, clock: (number, clock) != (others, 3)
    made.run(4)
    lasting = made.servers[1 - died]
    assert lasting.updates is not None and lasting.updates.last.is_skipped
    lost = made.workers.pop(others)
    made.by_peer = {peer: one for peer, one in made.by_peer.items() if one is not lost}
    made.to_workers.pop((0, died), None)  # what begins a step too many, before which nothing else passes
    made.kill_server(died)
    for queues in (made.to_servers, made.to_workers):
        for key in [one for one in queues if one[0] == lost.name]:
            del queues[key]
    server = made.servers[died]
    made.run(4)
    for made.now_s in (1.0, COMES_AGAIN_S + 2.0):
        for worker in made.workers.values():
            made.say(worker, [replace(worker.rank.alive(), server=number) for number in (0, 1)])
        made.run(4)
        for number in (0, 1):
            for reply in made.servers[number].tick(made.now_s):
                made.answer(number, reply)
        made.run(4)
    assert server.version == 4 and server.mode is not None and server.mode.num_lost == 4
    assert server.updates is not None and not server.mode.is_behind and not server.mode.is_in_update
    assert server.updates.last == lasting.updates.last and server.updates.num_skipped == lasting.updates.num_skipped
    assert (server.updates.step, server.updates.position) == (lasting.updates.step, lasting.updates.position)
    if others:
        made.run(6)
        assert {one.version for one in made.servers} == {6}
        begins = made.workers[0].rank.begins
        assert begins[died].num_lost == 4 and begins[1 - died].num_lost == 0


def test_lost_gradients_are_told_once_by_the_worker_that_leads(caplog: pytest.LogCaptureFixture) -> None:
    begin = Begin(index=0, num_workers=2, ticket=0, loss_sum=0.0, count=1.0, age=0)
    leads, follows = LostGradients(), LostGradients()
    for num_lost in (0, 3, 3, 5):
        leads.look({0: begin, 1: replace(begin, num_lost=num_lost)})
        follows.look({1: replace(begin, index=1, num_lost=num_lost)})
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 2 and "server 1 died together with workers" in said[0]
    assert "3 of their gradients" in said[0] and "5 of their gradients" in said[1] and "(3 before)" in said[1]


def test_what_was_said_of_an_update_comes_back_as_it_was() -> None:
    said = Said(loss_sum=math.inf, count=3.0, step=2, position=8, is_finite=False)
    decision = Decision(version=1, chosen=(0,), complete=(0,), members=(0,), norm=math.nan, said=said)
    read = read_decision(json.loads(json.dumps(as_plain(decision))))
    assert read.said == said and read.norm is not None and math.isnan(read.norm)
    for wrong in (None, 7, {"count": 3}, {"count": "x"}, {"is_finite": 1}):
        changed = {**as_plain(decision)["said"], **wrong} if isinstance(wrong, dict) else wrong
        plain = {**as_plain(decision), "said": changed}
        with pytest.raises(Malformed):
            read_decision(plain)


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


def test_the_longest_hello_is_not_longer_in_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is longer than that is refused where it would be said: servers do not answer it."""
    settings = make_settings(num_workers=1)
    snapshot = take(play(settings, 2).servers[0])
    longest = len(pack_object(settings.as_object()))
    monkeypatch.setattr("weft.server.protocol.message.OBJECT_BYTES", longest)
    require_readable(settings)
    go_on(again := ParameterServer(), snapshot)
    assert again.version == 2 and again.settings == settings
    monkeypatch.setattr("weft.server.protocol.message.OBJECT_BYTES", longest - 1)
    with pytest.raises(LaunchError, match=rf"of 3 tensors on 1 servers: an object of \[{longest}\] bytes; use fewer"):
        require_readable(settings)
