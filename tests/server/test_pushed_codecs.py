"""Workers that compress what they push, against one process that computes by the rules of codecs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from served_rules import OneProcess, some_codec
from served_workers import Play, PlayedWorker, add_noise, coded_settings, optimizer_spec

from weft.plan.exchange.push_format import STEP_BYTES
from weft.plan.partition import server_shards
from weft.plan.plan import CODECS
from weft.server.all_together import AllTogether
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Kind, Message, pack_message
from weft.server.protocol.settings import Settings
from weft.server.workers.arrivals import Arrivals

STEPS = 6
SGD = optimizer_spec(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.fixture(autouse=True)
def cut_small_tensors() -> Any:
    """Tensors of tests are cut over servers, too."""
    with mock.patch.object(server_shards, "LEAST_PART_BYTES", 64):
        yield


def size_of(worker: int, clock: int) -> int:
    return (4, 7, 0, 2, 5)[(worker + clock) % 5]


def make_play(settings: Settings) -> Play:
    def of(worker: int) -> Callable[[int], int]:
        return lambda clock: size_of(worker, clock)

    made = Play(settings, [PlayedWorker(n, settings, size=of(n)) for n in range(settings.num_workers)])
    for one in made.workers.values():
        one.spoil = add_noise
        made.hello(one)
    return made


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {}) for name in CODECS]
    + [(name, dict(warmup_steps=3)) for name in ("topk", "onebit", "sign", "powersgd")]
    + [("topk", dict(bits=8)), ("dgc", dict(bits=2, masking=False)), ("onebit", dict(memory=0.5))],
)
def test_updates_are_those_of_one_process(name: str, changes: dict[str, Any], num_servers: int) -> None:
    """Uneven batches, some empty, divided by other numbers in every step, in an order by chance."""
    settings = coded_settings(some_codec(name, **changes), num_workers=3, num_servers=num_servers, optimizer=SGD)
    made = make_play(settings)
    made.run(STEPS, pick=random.Random(1).randrange)
    alone = OneProcess(settings)
    for clock in range(STEPS):
        alone.step(clock, range(3), size_of)
    assert all(server.version == STEPS for server in made.servers)
    assert_equal(made.weights(), alone.found())
    parts = [len(server.layout.parts) for server in made.servers if server.layout is not None]
    assert sum(parts) > 3  # some tensors are cut


@pytest.mark.parametrize("name", ["onebit", "qsgd", "powersgd"])
def test_servers_clip_what_was_sent(name: str) -> None:
    settings = coded_settings(some_codec(name), num_workers=2, num_servers=2, clip_norm=0.2, optimizer=SGD)
    made, alone = make_play(settings), OneProcess(settings)
    made.run(STEPS)
    for clock in range(STEPS):
        alone.step(clock, range(2), size_of)
    assert_equal(made.weights(), alone.found())


@pytest.mark.parametrize("name", [one for one in CODECS if one != "sign"])
def test_one_asynchronous_worker_is_one_process(name: str) -> None:
    settings = coded_settings(some_codec(name), num_workers=1, num_servers=2, mode="async", optimizer=SGD)
    made, alone = make_play(settings), OneProcess(settings)
    made.run(STEPS)
    for clock in range(STEPS):
        if size_of(0, clock):
            alone.step(clock, [0], size_of)
    assert_equal(made.weights(), alone.found())


@pytest.mark.parametrize("name", ["topk", "dgc", "onebit", "powersgd"])
def test_a_step_that_is_skipped_leaves_nothing_in_codecs(name: str) -> None:
    settings = coded_settings(some_codec(name), num_workers=2, num_servers=2, optimizer=SGD)
    made, alone = make_play(settings), OneProcess(settings)

    def spoil(worker: int, clock: int, gradients: dict[str, torch.Tensor]) -> None:
        add_noise(worker, clock, gradients)
        if clock == 3:
            gradients["embedding"][7] = torch.nan

    made.workers[1].spoil = spoil
    made.run(STEPS)
    for clock in range(STEPS):
        if clock != 3:
            alone.step(clock, range(2), size_of)
    assert all(server.updates is not None and server.updates.num_skipped == 1 for server in made.servers)
    assert_equal(made.weights(), alone.found())


@pytest.mark.parametrize("name", ["topk", "dgc", "powersgd"])
@pytest.mark.parametrize("seed", range(2))
def test_of_gradients_that_come_too_late_nothing_is_left(name: str, seed: int) -> None:
    """What a worker kept of earlier steps is not lost with them."""
    settings = coded_settings(some_codec(name), num_workers=3, num_servers=2, backups=1, optimizer=SGD)
    chosen: dict[int, tuple[int, ...]] = {}
    apply = AllTogether._carry_out

    def note(mode: AllTogether, decision: Any) -> None:
        if decision.chosen:
            chosen[decision.version] = decision.chosen
        apply(mode, decision)

    with mock.patch.object(AllTogether, "_carry_out", note):
        made = make_play(settings)
        made.run(12, pick=random.Random(seed).randrange)
    alone = OneProcess(settings)
    for version in range(made.servers[0].version):
        alone.step(version, chosen[version], size_of)
    assert_equal(made.weights(), alone.found())
    mode = made.servers[0].mode
    assert isinstance(mode, AllTogether) and mode.num_dropped > 3
    assert len(set(chosen.values())) > 1


def test_what_a_worker_can_send_again_was_not_used() -> None:
    """Also if the others have made that version before it comes again."""
    settings = coded_settings(some_codec("topk"), num_workers=2)
    layout = ServerLayout.of(settings, 0)
    arrivals = {0: Arrivals(num_ranks=1, pushes=layout.pushes, owners=layout.owners)}
    mode = AllTogether(number=0, settings=settings, arrivals=arrivals)
    mode.join(0, session=1, first=0)
    arrivals[0].begin_with(1)
    assert mode.used(0) == 0


@pytest.mark.parametrize("name", ["topk", "qsgd", "powersgd"])
def test_what_is_sent_again_is_what_was_sent(name: str) -> None:
    settings = coded_settings(some_codec(name), num_workers=1, num_servers=2, optimizer=SGD)
    undisturbed = make_play(settings)
    undisturbed.run(STEPS)
    made = make_play(settings)
    worker, lost, made.steps_at_most = made.workers[0], set[int](), STEPS
    while found := made.open():
        if (clock := worker.clock) in (1, 4) and clock not in lost and len(made.to_servers.get((0, 1), ())) == 1:
            lost.add(clock)  # one server has all, the other one all but the commit
            made.to_servers[0, 1].clear()
            made.say(worker, worker.rank.hello_anew())
        else:
            made.deliver(*found[0])
    assert lost == {1, 4}
    pushes = [message for _, peer, message in made.log if message.kind == Kind.PUSH and peer == worker.peers[0]]
    twice = [one for one in pushes if sum(same_place(one, other) for other in pushes) > 1]
    assert twice and all(one.frames == other.frames for one in twice for other in twice if same_place(one, other))
    assert all(torch.equal(one, undisturbed.weights()[name]) for name, one in made.weights().items())


def same_place(one: Message, other: Message) -> bool:
    return (one.clock, one.server, one.bucket) == (other.clock, other.server, other.bucket)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_a_push_are_those_of_its_format(name: str) -> None:
    changes = {} if name == "half" else dict(warmup_steps=2)
    settings = coded_settings(some_codec(name, **changes), num_workers=1, num_servers=2)
    made = make_play(settings)
    made.run(5)
    lengths = set()
    for server, _, message in made.log:
        if message.kind == Kind.PUSH:
            layout = made.servers[server].layout
            assert layout is not None
            found = tuple(map(len, message.frames))
            assert found == layout.pushes[message.bucket].frame_bytes(message.clock)
            lengths.add((server, message.bucket, sum(found)))
    num_buckets = sum(len(one.layout.buckets) for one in made.servers if one.layout is not None)
    assert len(lengths) > num_buckets or name == "half"  # a warm-up sends more


def test_a_push_of_other_lengths_is_refused() -> None:
    settings = coded_settings(some_codec("topk", warmup_steps=4), num_workers=1)
    made = make_play(settings)
    made.run(1)
    server, worker = made.servers[0], made.workers[0]
    good = next(one for one in worker.sent[0] if one.kind == Kind.PUSH)
    head, *rest = (bytes(one) for one in good.frames)
    ways = [
        (head, *rest[:-1]),
        (head, *rest, b""),
        (head, rest[0] + b"x", *rest[1:]),
        (head, b"", *rest[1:]),
        (head[:-1], *rest),
        (b"\xff" * STEP_BYTES + head[STEP_BYTES:], *rest),
        (head[:STEP_BYTES] + b"\x02" * (len(head) - STEP_BYTES), *rest),
        (bytes([9]) + head[1:], *rest),  # after the warm-up less is sent
        tuple(rest),
        (),
    ]
    for frames in ways:
        said = worker.message(Kind.PUSH, clock=1, bucket=good.bucket, frames=frames)
        assert server.receive(worker.peers[0], pack_message(said), 0.0) == []
    assert server.refused["malformed"] == len(ways)


@pytest.mark.parametrize("name", CODECS)
def test_messages_of_noise_do_no_harm_but_to_weights(name: str) -> None:
    """Of the right lengths they are a worker's gradient, whatever it has computed."""
    settings = coded_settings(some_codec(name), num_workers=1)
    made = make_play(settings)
    made.run(1)
    server, worker, chance = made.servers[0], made.workers[0], random.Random(0)
    for message in worker.sent[0]:
        if message.kind == Kind.PUSH:
            head, *rest = message.frames
            frames = (head, *(chance.randbytes(len(one)) for one in rest))
            said = worker.message(Kind.PUSH, clock=1, bucket=message.bucket, frames=frames)
            server.receive(worker.peers[0], pack_message(said), 0.0)
    commit = worker.sent[0][-1]
    assert commit.kind == Kind.COMMIT
    said = worker.message(Kind.COMMIT, clock=1, frames=commit.frames)
    server.receive(worker.peers[0], pack_message(said), 0.0)
    assert server.version == 2 and not server.refused
