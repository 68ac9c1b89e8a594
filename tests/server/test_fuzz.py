"""A server in the middle of a run that is sent what no worker sends: truncated, changed, repeated, foreign messages.

After all of it the weights are those of a run without."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from served_workers import Play, PlayedWorker, make_settings, play

from weft.server.protocol import shared_places
from weft.server.protocol.message import HEADER_BYTES, Kind, Malformed, Message, pack_message, read_message
from weft.server.protocol.settings import read_settings


def mutate(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    """One of the ways in which a message may be wrong."""
    frames = [bytes(one) for one in frames]
    way = chance.randrange(8)
    if way == 0:  # truncated
        return [one[: chance.randrange(len(one) + 1)] for one in frames]
    if way == 1:  # a byte of the header changed
        place = chance.randrange(HEADER_BYTES)
        return [frames[0][:place] + chance.randbytes(1) + frames[0][place + 1 :], *frames[1:]]
    if way == 2:  # frames missing, or too many
        return frames[: chance.randrange(len(frames))] if chance.random() < 0.5 else frames * 2
    if way == 3:  # noise
        return [chance.randbytes(len(one)) for one in frames]
    if way == 4:  # payload that is longer
        return [frames[0], *(one + chance.randbytes(chance.randrange(1, 9)) for one in frames[1:])]
    if way == 5:  # another kind
        return [frames[0][:4] + bytes([chance.randrange(256)]) + frames[0][5:], *frames[1:]]
    if way == 6:  # an object that is another
        place = chance.randrange(len(frames[-1]) or 1)
        return [*frames[:-1], frames[-1][:place] + chance.randbytes(3) + frames[-1][place + 3 :]]
    return []


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
@pytest.mark.parametrize(("mode", "host"), [("sync", ""), ("async", ""), ("async", "this one")])
def test_what_no_worker_sends_changes_nothing(
    mode: str, host: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_places, "LEAST_BYTES", 0)
    settings = make_settings(num_workers=2, mode=mode)
    expected = play(settings, 6, host=host)
    made = Play(settings, [PlayedWorker(n, settings, host=host) for n in range(2)], host=host)
    for one in made.workers.values():
        made.hello(one)
    known: list[list[bytes]] = [[bytes(one) for one in pack_message(message)] for _, _, message in expected.log]
    chance = random.Random(7)
    server, peers, each = made.servers[0], [b"0/1", b"1/1", b"stranger"], count // 60
    made.steps_at_most = 6
    num_sent = 0
    while found := made.open():
        made.deliver(*found[0])
        for _ in range(each if num_sent < count else 0):
            frames, peer = chance.choice(known), peers[2]
            # From a worker's own connection only what cannot be taken for its next message by chance.
            wrong = mutate(chance, frames)
            if chance.random() < 0.5 and is_refused(wrong):
                peer = chance.choice(peers)
            elif may_be_a_worker(wrong):
                continue
            server.receive(peer, wrong, 0.0)
            num_sent += 1
    assert num_sent >= count * 0.8
    assert sum(server.refused.values()) >= num_sent * 0.9
    assert server.version == expected.servers[0].version
    assert all(torch.equal(one, made.weights()[name]) for name, one in expected.weights().items())


def may_be_a_worker(frames: list[bytes]) -> bool:
    """Not wrong enough: a heartbeat, or the hello of a worker of this run that has lost its connection."""
    try:
        message = read_message(frames)
        return message.kind == Kind.ALIVE or (message.kind == Kind.HELLO and bool(read_settings(message)))
    except Malformed:
        return False


def is_refused(frames: list[bytes]) -> bool:
    try:
        read_message(frames)
    except Malformed:
        return True
    return False


def test_no_memory_is_taken_for_what_a_header_claims() -> None:
    settings = make_settings(num_workers=1)
    made = play(settings, 1)
    worker, server = made.workers[0], made.servers[0]
    huge = worker.message(Kind.PUSH, clock=2**40, bucket=2**31, frames=(b"x",))
    wide = replace(huge, clock=1, bucket=2**31)
    tracemalloc.start()
    for _ in range(100):
        for message in (huge, wide):
            server.receive(b"0/1", pack_message(message), 0.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert server.refused == Counter(malformed=200)
    assert peak < 1 << 20


def test_messages_of_another_job_session_or_worker_are_dropped() -> None:
    settings = make_settings(num_workers=2, mode="async")
    made = play(settings, 1)
    server, worker = made.servers[0], made.workers[0]
    version = server.version
    for message in worker.sent[0]:
        again = replace(message, clock=1)
        for other in (replace(again, job=5), replace(again, worker=1), replace(again, session=77)):
            assert server.receive(b"0/1", pack_message(other), 0.0) == []
        answers = server.receive(b"nobody", pack_message(again), 0.0)
        # A worker that was given up is told once per clock, and says hello again.
        assert [one.message.kind for one in answers] == ([Kind.GIVEN_UP] if again.kind == Kind.COMMIT else [])
    assert server.version == version
    assert server.refused["impostor"] == 3 * len(worker.sent[0]) and server.refused["stranger"] == len(worker.sent[0])


def test_a_message_is_what_was_packed() -> None:
    message = Message(
        kind=Kind.PUSH,
        job=2**64 - 1,
        session=3,
        worker=4,
        place=5,
        server=6,
        clock=7,
        version=8,
        bucket=9,
        frames=(b"a", b""),
    )
    assert read_message(pack_message(message)) == message
