"""Wrong messages at every moment of a run, at every server, by every kind of peer: each is counted once, takes no
memory and changes nothing. After all of them the weights are those of a run without."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from served_workers import Play, PlayedWorker, make_settings
from test_fuzz import is_refused, may_be_a_worker, mutate

from weft.server.protocol.message import Kind, Malformed, Message, pack_message, read_message
from weft.server.server import ParameterServer

STEPS = 4
STRANGER = b"stranger"


class Watched(Play):
    """Remembers all messages, those between servers too, and lets something happen before each."""

    def __init__(self, *, mode: str, fuzzer: Fuzzer | None = None) -> None:
        settings = make_settings(
            num_workers=2, num_servers=2, mode=mode, bucket_bytes=96, clip_norm=0.5 if mode == "sync" else 0.0
        )
        self.seen: list[Message] = []
        self.fuzzer = fuzzer
        super().__init__(settings, [PlayedWorker(number, settings) for number in range(2)])
        for one in self.workers.values():
            self.hello(one)
        self.run(STEPS)

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        queues = {"across": self.between, "up": self.to_servers, "down": self.to_workers}
        self.seen.append(queues[way][key][0])
        if self.fuzzer is not None:
            self.fuzzer.strike(self)
        super().deliver(way, key)


class Fuzzer:
    """Sends wrong messages."""

    def __init__(self, known: list[Message], *, each: int) -> None:
        self._chance, self._known, self._each = random.Random(3), known, each
        self.kinds: Counter[str] = Counter()

    def strike(self, play: Play) -> None:
        for server in play.servers:
            for _ in range(self._each):
                self._send(server)

    def _send(self, server: ParameterServer) -> None:
        chance, message = self._chance, self._chance.choice(self._known)
        way = chance.choice(["mutated", "flipped", "huge", "stranger", "impostor", "replayed", "own"])
        frames, peer = [bytes(one) for one in pack_message(message)], STRANGER
        own = f"{message.worker}/1".encode()
        if way == "mutated":
            frames = mutate(chance, frames)
        elif way == "flipped":
            frames = flipped(chance, frames)
        elif way == "huge":
            wide = {"clock": 2**63, "bucket": 2**32 - 1, "session": 2**62, "version": 2**63}
            frames = [bytes(one) for one in pack_message(replace(message, **wide))]
        elif way == "impostor":  # of another job, start or worker, by the connection of one that is there
            changed = chance.choice([{"job": 7}, {"session": 77}, {"worker": 9}, {"place": 3}])
            frames, peer = [bytes(one) for one in pack_message(replace(message, **changed))], own
        elif way == "replayed":
            arrivals = server.arrivals.get(message.worker)
            if message.kind not in (Kind.PUSH, Kind.COMMIT) or arrivals is None:
                return
            if message.clock >= arrivals.next_clock or message.server != server.number:
                return
            peer = own
        elif way == "own":
            if not is_refused(frames := mutate(chance, frames)):
                return
            peer = own
        if is_harmless(frames):
            return
        before = counted(server)
        replies = server.receive(peer, frames, 0.0)
        assert counted(server) == before + 1, (way, frames[0] if frames else b"")
        # A goodbye by a connection that is not known is passed on, and changes nothing while its worker is there.
        assert all(one.message.kind in (Kind.GIVEN_UP, Kind.REFUSED, Kind.ENDED) for one in replies)
        self.kinds[way] += 1


def flipped(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    """A few bits of one frame turned over."""
    place = chance.randrange(len(frames))
    changed = bytearray(frames[place])
    for _ in range(chance.randrange(1, 9) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return [*frames[:place], bytes(changed), *frames[place + 1 :]]


def is_harmless(frames: list[bytes]) -> bool:
    """A message that anybody may send: a heartbeat, or a hello of this run or of a server."""
    try:
        return may_be_a_worker(frames) or read_message(frames).kind == Kind.SERVES
    except Malformed:
        return False


def counted(server: ParameterServer) -> int:
    """Messages that changed nothing: refused, or sent again."""
    return sum(server.refused.values()) + sum(one.num_repeated for one in server.arrivals.values())


@pytest.mark.long
def test_wrong_messages_take_no_memory() -> None:
    expected = Watched(mode="async")
    gc.collect()
    tracemalloc.start()
    Watched(mode="async", fuzzer=Fuzzer(expected.seen, each=2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20, "the second run itself takes some"


@pytest.mark.parametrize("count", [1_500, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_wrong_messages_at_every_moment(mode: str, count: int) -> None:
    expected = Watched(mode=mode)
    fuzzer = Fuzzer(expected.seen, each=-(-count // len(expected.seen)))  # two servers, and half are not sent
    made = Watched(mode=mode, fuzzer=fuzzer)
    assert sum(fuzzer.kinds.values()) >= count
    assert set(fuzzer.kinds) == {"mutated", "flipped", "huge", "stranger", "impostor", "replayed", "own"}
    for server, other in zip(made.servers, expected.servers, strict=True):
        assert server.version == other.version and server.members.workers == (0, 1)
        assert {"malformed", "stranger", "impostor"} <= set(server.refused)
    assert all(torch.equal(one, made.weights()[name]) for name, one in expected.weights().items())
