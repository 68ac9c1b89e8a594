"""The rules of a parameter server, against one process that computes by them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from served_workers import (
    SHAPES,
    Play,
    PlayedWorker,
    batch_of,
    first_weights,
    gradients_of,
    make_settings,
    optimizer_spec,
    play,
)

import weft.optim
from weft.plan.partition.server_shards import ServedTensor
from weft.server.protocol.message import Kind, pack_message
from weft.server.server import ParameterServer

ADAMW = optimizer_spec("torch.optim.adamw.AdamW", lr=0.05, weight_decay=0.1)


SINGLE = {
    "tensors": tuple(replace(one, item_bytes=4 if one.name == "head" else 8) for one in make_settings().tensors),
    "dtypes": ("float64", "float32", "float64"),
}


def sizes(clock: int) -> int:
    return (4, 7, 0, 2, 5)[clock % 5]


def in_one_process(
    steps: int, workers: tuple[int, ...], make: Any, *, clip_norm: float = 0.0
) -> dict[str, torch.Tensor]:
    """Whole batches of all workers, one after the other."""
    weights = first_weights()
    parameters = {name: torch.nn.Parameter(one) for name, one in weights.items()}
    optimizer = make(list(parameters.values()))
    for clock in range(steps):
        batches = [batch_of(worker, clock, sizes(clock + worker)) for worker in workers]
        count = sum(len(tokens) for tokens, _ in batches)
        found = [gradients_of({name: one.detach() for name, one in parameters.items()}, one)[0] for one in batches]
        for name, parameter in parameters.items():
            parameter.grad = sum(one[name] for one in found) / count
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip_norm)
        optimizer.step()
    return {name: one.detach() for name, one in parameters.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, within: float = 1e-12) -> None:
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=within, atol=within)


def uneven(number: int) -> Any:
    return lambda clock: sizes(clock + number)


def play_uneven(settings: Any, steps: int, pick: Any = lambda count: 0) -> Play:
    made = Play(settings, [PlayedWorker(n, settings, size=uneven(n)) for n in range(settings.num_workers)])
    for one in made.workers.values():
        made.hello(one)
    made.run(steps, pick=pick)
    return made


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_synchronous_updates_are_those_of_one_process_in_any_order_of_arrival(seed: int, num_servers: int) -> None:
    settings = make_settings(num_workers=3, optimizer=ADAMW, num_servers=num_servers)
    found = play_uneven(settings, 6, pick=random.Random(seed).randrange)
    expected = in_one_process(6, (0, 1, 2), lambda one: torch.optim.AdamW(one, lr=0.05, weight_decay=0.1))
    assert all(server.version == 6 for server in found.servers)
    assert_equal(found.weights(), expected)


def test_the_order_of_arrival_changes_no_bit_of_synchronous_updates() -> None:
    settings = make_settings(num_workers=3)
    first, *others = (play_uneven(settings, 5, pick=random.Random(seed).randrange).weights() for seed in range(4))
    for other in others:
        assert all(torch.equal(one, other[name]) for name, one in first.items())


def test_a_norm_of_all_gradients_is_clipped() -> None:
    found = play_uneven(make_settings(num_workers=2, clip_norm=0.3), 5)
    expected = in_one_process(5, (0, 1), lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9), clip_norm=0.3)
    assert_equal(found.weights(), expected)


def test_bounded_by_nothing_is_synchronous() -> None:
    settings = make_settings(num_workers=3, mode="bounded", staleness=0, optimizer=ADAMW)
    found = play_uneven(settings, 6, pick=random.Random(1).randrange)
    expected = in_one_process(6, (0, 1, 2), lambda one: torch.optim.AdamW(one, lr=0.05, weight_decay=0.1))
    assert_equal(found.weights(), expected)


@pytest.mark.parametrize("compensation", [0.0, 0.5])
def test_one_asynchronous_worker_is_plain_training(compensation: float) -> None:
    settings = make_settings(num_workers=1, mode="async", compensation=compensation, lr_scaling="staleness")
    found = play(settings, 7, size=lambda clock: 3)
    weights = {name: torch.nn.Parameter(one) for name, one in first_weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
    for clock in range(7):
        gradients, _ = gradients_of({name: one.detach() for name, one in weights.items()}, batch_of(0, clock, 3))
        for name, one in weights.items():
            one.grad = gradients[name] / 3
        optimizer.step()
    assert_equal(found.weights(), {name: one.detach() for name, one in weights.items()})
    assert found.servers[0].store is not None and found.servers[0].store.staleness == {0: 7}


@pytest.mark.parametrize(("mode", "staleness"), [("async", 0), ("bounded", 1), ("bounded", 3)])
@pytest.mark.parametrize("seed", range(4))
def test_clocks_are_never_further_apart_than_the_bound(mode: str, staleness: int, seed: int) -> None:
    settings = make_settings(num_workers=4, mode=mode, staleness=staleness)
    chance = random.Random(seed)
    # One worker's messages are hardly ever chosen, so that the others run ahead as far as they may.
    made = Play(settings, [PlayedWorker(n, settings) for n in range(4)])
    for one in made.workers.values():
        made.hello(one)
    made.steps_at_most = 12
    gaps = []
    while found := made.open():
        fast = [one for one in found if one[1][0] != 0]
        made.deliver(*chance.choice(fast if fast and chance.random() < 0.95 else found))
        computing = [one.clock for one in made.workers.values() if one.clock >= 0]
        if len(computing) == 4:
            gaps.append(max(computing) - min(computing))
    server = made.servers[0]
    assert server.store is not None and server.version == 4 * 12  # no update lost, none twice
    assert sum(server.store.staleness.values()) == 48
    if mode == "bounded":
        assert server.mode.clocks.largest_gap == staleness  # reached, and not exceeded
        # A worker that is told late may look behind by one more.
        assert max(gaps) <= staleness + 1
    else:
        assert server.mode.clocks.largest_gap > 3


def test_a_recorded_run_replays_to_the_same_bits() -> None:
    settings = make_settings(num_workers=4, mode="async", compensation=0.3, lr_scaling="staleness", optimizer=ADAMW)
    recorded = play(settings, 8, pick=random.Random(5).randrange)
    again = ParameterServer()
    for _, peer, message in recorded.log:
        again.receive(peer, pack_message(message), 0.0)
    assert again.store is not None and recorded.servers[0].store is not None
    pairs = zip(again.store.parameters, recorded.servers[0].store.parameters, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert max(again.store.staleness) > 1


def test_compensation_moves_a_gradient_to_the_weights_that_are_there() -> None:
    """Two workers begin at w0; the second one's gradient meets w1 = w0 − η g0."""
    settings = make_settings(num_workers=2, mode="async", compensation=0.7, optimizer=optimizer_spec(lr=0.1))
    found = play(settings, 1)
    w0 = first_weights()
    g0, g1 = ({name: one / 4 for name, one in gradients_of(w0, batch_of(worker, 0, 4))[0].items()} for worker in (0, 1))
    w1 = {name: one - 0.1 * g0[name] for name, one in w0.items()}
    expected = {name: w1[name] - 0.1 * (g1[name] + 0.7 * g1[name] ** 2 * (w1[name] - w0[name])) for name in w0}
    assert_equal(found.weights(), expected)


def test_a_rate_is_divided_by_the_age_of_the_weights() -> None:
    settings = make_settings(num_workers=3, mode="async", lr_scaling="staleness", optimizer=optimizer_spec(lr=0.1))
    found = play(settings, 1)
    w0 = first_weights()
    expected = dict(w0)
    for worker, age in ((0, 0), (1, 1), (2, 2)):
        gradients, _ = gradients_of(w0, batch_of(worker, 0, 4))
        expected = {name: one - 0.1 / max(age, 1) * gradients[name] / 4 for name, one in expected.items()}
    assert_equal(found.weights(), expected)


def test_late_gradients_are_dropped_by_their_version() -> None:
    settings = make_settings(num_workers=3, backups=1, optimizer=optimizer_spec(lr=0.1))
    made = Play(settings, [PlayedWorker(n, settings, size=lambda clock: 4) for n in range(3)])
    for one in made.workers.values():
        made.hello(one)
    made.steps_at_most = 3
    chance = random.Random(3)
    while found := made.open():
        fast = [one for one in found if one[1][0] != 2]
        made.deliver(*chance.choice(fast or found))
    server = made.servers[0]
    # Workers 0 and 1 are done after 3 versions. Worker 2 sends its gradient of version 0 when all is over.
    assert server.version == 3 and server.mode.num_dropped == 1
    weights = {name: torch.nn.Parameter(one) for name, one in first_weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    for clock in range(3):
        now = {name: one.detach() for name, one in weights.items()}
        both = [gradients_of(now, batch_of(worker, clock, 4))[0] for worker in (0, 1)]
        for name, one in weights.items():
            one.grad = (both[0][name] + both[1][name]) / 8
        optimizer.step()
    assert_equal(made.weights(), {name: one.detach() for name, one in weights.items()})
    # and it goes on with the version of the others
    assert made.workers[2].clock in (0, 3)


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_a_worker_that_dies_is_given_up_and_the_others_go_on(mode: str) -> None:
    settings = make_settings(num_workers=3, mode=mode, staleness=1 if mode == "bounded" else 0)
    made = play(settings, 2)
    for number in (0, 1):  # heartbeats of two
        made.say(made.workers[number], [made.workers[number].message(Kind.ALIVE)])
    made.now_s = 4.0
    made.run(2)
    server = made.servers[0]
    assert server.tick(4.9) == [] and server.members.workers == (0, 1, 2)
    before = server.version
    made.by_peer.pop(made.workers[2].peers[0])
    for reply in server.tick(5.1):
        made.answer(0, reply)
    assert server.members.workers == (0, 1)
    made.now_s = 5.1
    # Those that are left have the weights of their third clock, or get them now.
    made.run(10)
    assert server.version > before


def test_a_worker_joins_a_running_job() -> None:
    settings = make_settings(num_workers=2)
    made = play(settings, 3)
    newcomer = PlayedWorker(-1, settings, start=9)
    made.workers[-1] = newcomer
    made.by_peer |= {peer: newcomer for peer in newcomer.peers.values()}
    made.hello(newcomer)
    made.deliver("up", (-1, 0))
    made.deliver("down", (-1, 0))
    assert newcomer.number == 2
    assert made.servers[0].members.workers == (0, 1, 2)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_norms_are_those_of_whole_tensors(name: str, num_servers: int) -> None:
    """Of all parts of a tensor, which are updated one by one."""
    kind = getattr(weft.optim, name)
    spec = optimizer_spec(f"{kind.__module__}.{name}", lr=0.05, weight_decay=0.1)
    settings = make_settings(optimizer=spec, num_servers=num_servers, splits=False, bucket_bytes=96)
    found = play_uneven(settings, 5)
    assert sum(len(server.store.parameters) for server in found.servers if server.store is not None) > len(SHAPES)
    expected = in_one_process(5, (0, 1), lambda one: kind(one, lr=0.05, weight_decay=0.1))
    assert_equal(found.weights(), expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_norm_over_several_servers_is_clipped(seed: int) -> None:
    settings = make_settings(num_workers=2, clip_norm=0.3, num_servers=3, bucket_bytes=96)
    found = play_uneven(settings, 5, pick=random.Random(seed).randrange)
    expected = in_one_process(5, (0, 1), lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9), clip_norm=0.3)
    assert all(server.version == 5 for server in found.servers)
    assert_equal(found.weights(), expected)


@pytest.mark.parametrize("pull", ["bfloat16", "float16"])
def test_workers_may_take_weights_in_16_bits(pull: str) -> None:
    """Gradients are those at rounded weights; the server's own are not rounded."""
    found = play(make_settings(num_workers=2, pull=pull, optimizer=optimizer_spec(lr=0.1)), 4)
    weights = first_weights()
    for clock in range(4):
        rounded = {name: one.to(getattr(torch, pull)).double() for name, one in weights.items()}
        gradients = [gradients_of(rounded, batch_of(worker, clock, 4))[0] for worker in (0, 1)]
        weights = {name: one - 0.1 * (gradients[0][name] + gradients[1][name]) / 8 for name, one in weights.items()}
    assert_equal(found.weights(), weights)


def test_compensation_is_for_the_weights_that_a_worker_had() -> None:
    """In 16 bits, where these were taken so."""
    settings = make_settings(
        num_workers=2, mode="async", compensation=0.7, optimizer=optimizer_spec(lr=0.1), pull="bfloat16"
    )
    found = play(settings, 1)
    w0 = first_weights()
    had = {name: one.bfloat16().double() for name, one in w0.items()}
    g0, g1 = ({name: one / 4 for name, one in gradients_of(had, batch_of(k, 0, 4))[0].items()} for k in (0, 1))
    w1 = {name: one - 0.1 * g0[name] for name, one in w0.items()}
    moved = {name: g1[name] + 0.7 * g1[name] ** 2 * (w1[name] - had[name]) for name in w0}
    assert_equal(found.weights(), {name: w1[name] - 0.1 * moved[name] for name in w0})


def test_norms_of_tensors_that_several_servers_hold_are_refused() -> None:
    spec = optimizer_spec(f"{weft.optim.LAMB.__module__}.LAMB", lr=0.05)
    made = play(make_settings(optimizer=spec, num_servers=2), 1)
    assert "needs norms of whole tensors, and these are cut over 2 servers" in str(made.workers[0].refused)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (optimizer_spec("torch.optim.adam.Adam", lr=0.1, betas=3), "cannot update on a server"),
        (optimizer_spec("torch.optim.adam.Adam", lr=-0.1), "does not take these settings"),
        (optimizer_spec("torch.optim.sparse_adam.SparseAdam", lr=0.1), "cannot update on a server"),
        (optimizer_spec("torch.optim.adam.Nothing", lr=0.1), "has no optimizer"),
        (optimizer_spec("torch.optim.adam.Tensor", lr=0.1), "is no optimizer"),
        (optimizer_spec("os.path", lr=0.1), "is no optimizer of torch.optim or weft.optim"),
    ],
)
def test_an_optimizer_that_a_server_cannot_have_is_refused_at_once(spec: dict[str, Any], expected: str) -> None:
    made = play(make_settings(num_workers=1, optimizer=spec), 1)
    assert expected in str(made.workers[0].refused)
    assert made.servers[0].settings is None


def test_a_model_whose_messages_a_server_does_not_let_in_is_refused() -> None:
    settings = make_settings(num_workers=1)
    server = ParameterServer(most_frame_bytes=100)
    (reply,) = server.receive(b"peer", pack_message(PlayedWorker(0, settings).hello()), 0.0)
    assert b"and this server takes up to 100; start it with the same plan" in bytes(reply.message.frames[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket_bytes": 1, "tensors": (ServedTensor(name="a", numel=1 << 49, item_bytes=8),), "dtypes": ("float64",)},
        {"num_servers": 1 << 30},
        {"num_ranks": 1 << 40},
    ],
)
def test_no_memory_is_taken_for_what_a_hello_claims(changes: dict[str, Any]) -> None:
    server = ParameterServer()
    settings = make_settings(num_workers=1, optimizer={"class": "torch.optim.sgd.SGD", "groups": []}, **changes)
    worker = PlayedWorker(0, make_settings(num_workers=1))
    worker.rank.settings = settings
    assert server.receive(b"peer", pack_message(worker.hello()), 0.0) == []
    assert server.refused["malformed"] == 1 and server.settings is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_whose_connection_was_lost_comes_again(mode: str) -> None:
    """It says hello by a new connection, gets the weights of its clock anew, and sends that clock whole."""
    settings = make_settings(num_workers=2, mode=mode)
    made = play(settings, 2)
    server, worker = made.servers[0], made.workers[0]
    before = server.version
    # The first bucket of a clock has come by the old connections; what else was on its way is lost.
    made.steps_at_most = 3
    while down := [one for one in made.open() if one[0] == "down"]:
        made.deliver(*down[0])
    made.deliver("up", (0, 0))
    assert worker.clock == 2 and made.to_servers[0, 0]
    made.to_servers.clear()
    for one in made.workers.values():
        one.peers[0] = f"{one.number} by another connection".encode()
        made.by_peer[one.peers[0]] = one
        made.say(one, one.rank.hello_anew())
    made.run(5)
    assert server.members.workers == (0, 1)
    assert server.version > before and not server.refused["malformed"]
    assert worker.clock == 4


def test_a_worker_that_was_given_up_is_told_to_come_again() -> None:
    settings = make_settings(num_workers=2, mode="async")
    made = play(settings, 2)
    server = made.servers[0]
    made.now_s = 6.0
    server.tick(6.0)  # and what it tells its workers is lost
    assert server.members.workers == ()
    made.run(4)  # each learns it when it has sent a clock, which is sent again
    assert server.members.workers == (0, 1) and server.refused["stranger"]
    assert server.version == 2 * 4 and [one.clock for one in made.workers.values()] == [3, 3]


def test_a_server_answers_heartbeats() -> None:
    made = play(make_settings(num_workers=1), 1)
    (reply,) = made.servers[0].receive(b"other", pack_message(made.workers[0].message(Kind.ALIVE)), 0.0)
    assert reply.peer == b"other" and reply.message.kind == Kind.ALIVE


def test_what_comes_twice_is_applied_once() -> None:
    settings = make_settings(num_workers=2, mode="async")
    made = play(settings, 3)
    server = made.servers[0]
    before, version = {name: one.clone() for name, one in made.weights().items()}, server.version
    for worker in made.workers.values():
        for clock in range(3):
            made.say(worker, worker.sent[clock])
    made.run(3)
    assert server.version == version
    assert all(torch.equal(one, made.weights()[name]) for name, one in before.items())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"job": "other"}, 'this server is of job "test", not of "other"'),
        ({"weft": "1"}, "runs weft 0, you run 1"),
        ({"mode": "async"}, "mode is 'async' here and 'sync' in the run"),
        (SINGLE, '"head" has 18 elements of float32 here and 18 of float64'),
        ({"optimizer": ADAMW}, "the optimizer is 'torch.optim.adamw.AdamW' here"),
        ({"optimizer": optimizer_spec(lr=0.2)}, "the optimizer's lr (parameter group 0) is 0.2 here and 0.1 in"),
    ],
)
def test_a_worker_of_another_job_is_refused_with_the_difference(changes: dict[str, Any], expected: str) -> None:
    settings = make_settings(num_workers=2)
    made = Play(settings, [PlayedWorker(0, settings), PlayedWorker(1, make_settings(**changes))])
    for one in made.workers.values():
        made.hello(one)
    made.run(1)
    assert made.workers[0].refused is None
    assert made.workers[1].refused is not None and expected in made.workers[1].refused
    assert made.servers[0].mode is not None and not made.servers[0].mode.has_begun


def test_a_second_worker_of_one_number_is_refused() -> None:
    settings = make_settings(num_workers=1)
    made = play(settings, 1)
    second = PlayedWorker(0, settings, start=2)
    replies = made.servers[0].receive(b"other", pack_message(second.hello()), 0.0)
    assert [one.message.kind for one in replies] == [Kind.REFUSED]
    second.receive(replies[0].message)
    assert second.refused is not None and "worker 0 is there already" in second.refused
