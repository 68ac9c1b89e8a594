"""Several servers of a synchronous run: every update is made of the same gradients on all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from served_workers import (
    Play,
    PlayedWorker,
    batch_of,
    first_weights,
    gradients_of,
    make_settings,
    optimizer_spec,
    server_peer,
)

from weft.errors import LaunchError
from weft.server.agreement import Agreement, Decision
from weft.server.decisions import read_decision
from weft.server.invitations import Invitations
from weft.server.other_servers import TO_LEADER
from weft.server.protocol.message import Kind, Message, pack_message, pack_object, read_object
from weft.server.protocol.worker_rank import State
from weft.server.server import ParameterServer


class Recording(Play):
    """Notes what is decided, and loses connections."""

    def __init__(self, *args: object) -> None:
        self.decided: list[Decision] = []
        super().__init__(*args)  # type: ignore[arg-type]

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        if way == "across" and key == (0, 1) and (message := self.between[key][0]).kind == Kind.DECIDED:
            self.decided.append(read_decision(read_object(message, {})))
        super().deliver(way, key)

    def lose(self, number: int) -> None:
        """A worker's connections to all servers, with what is on its way; it says hello anew."""
        worker = self.workers[number]
        for server in worker.peers:
            self.to_servers.pop((number, server), None)
            self.to_workers.pop((number, server), None)
            worker.peers[server] = f"{number}/{worker.rank.session + 1}/{server}".encode()
            self.by_peer[worker.peers[server]] = worker
        self.say(worker, worker.rank.hello_anew())


@pytest.mark.parametrize("backups", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_updates_are_made_of_the_same_gradients_whatever_is_lost(seed: int, backups: int) -> None:
    """What was decided, made again in one process, gives the weights of all servers."""
    settings = make_settings(
        num_workers=3, backups=backups, num_servers=3, optimizer=optimizer_spec(lr=0.1), bucket_bytes=96, clip_norm=0.5
    )
    chance = random.Random(seed)
    made = Recording(settings, [PlayedWorker(number, settings) for number in range(3)])
    for one in made.workers.values():
        made.hello(one)
    made.steps_at_most = 8
    num_lost = 0
    while found := made.open():
        made.deliver(*chance.choice(found))
        if num_lost < 6 and chance.random() < 0.02:
            made.lose(chance.randrange(3))
            num_lost += 1
    versions = {server.version for server in made.servers}
    assert versions == {8}
    assert all(one.rank.state == State.SENT for one in made.workers.values()), "a worker waits for weights"
    updates = [one for one in made.decided if one.chosen]
    assert [one.version for one in updates] == list(range(8))
    weights = {name: torch.nn.Parameter(one) for name, one in first_weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    for one in updates:
        now = {name: value.detach() for name, value in weights.items()}
        gradients = [gradients_of(now, batch_of(worker, one.version, 4))[0] for worker in one.chosen]
        for name, value in weights.items():
            value.grad = sum(gradient[name] for gradient in gradients) / (4 * len(gradients))
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.5)
        optimizer.step()
    for name, value in made.weights().items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-12, atol=1e-12)
    assert num_lost


def test_a_worker_that_reached_some_servers_only_is_in_no_update() -> None:
    agreement = Agreement(num_servers=2, num_workers=2, backups=0)
    for server in (0, 1):
        for worker in (0, 1):
            agreement.joined(server, worker, session=7)
    assert agreement.decide() == Decision(version=0, chosen=(), complete=(), members=(0, 1))
    agreement.ready(0, 0, 7, clock=0)
    agreement.ready(0, 1, 7, clock=0)
    agreement.ready(1, 1, 7, clock=0)
    assert agreement.decide() is None
    assert not agreement.left(0, session=7)
    assert agreement.decide() == Decision(version=0, chosen=(1,), complete=(1,), members=(1,))


def test_a_worker_that_reached_all_servers_counts_though_it_is_gone() -> None:
    agreement = Agreement(num_servers=2, num_workers=2, backups=0)
    for server in (0, 1):
        for worker in (0, 1):
            agreement.joined(server, worker, session=7)
    agreement.decide()
    for server, worker in ((0, 0), (1, 0)):
        agreement.ready(server, worker, 7, clock=0)
    assert agreement.left(0, session=7)
    agreement.ready(0, 0, 7, clock=0)  # of a session that is gone
    agreement.ready(0, 1, 7, clock=0)
    agreement.ready(1, 1, 7, clock=0)
    assert agreement.decide() == Decision(version=0, chosen=(0, 1), complete=(0, 1), members=(1,))


def test_what_is_said_of_an_earlier_session_changes_nothing() -> None:
    agreement = Agreement(num_servers=2, num_workers=1, backups=0)
    for server in (0, 1):
        agreement.joined(server, 0, session=7)
    agreement.decide()
    agreement.left(0, session=7)
    agreement.ready(1, 0, 7, clock=0)
    for server in (0, 1):
        agreement.joined(server, 0, session=8)
    assert agreement.decide() == Decision(version=0, chosen=(), complete=(), members=(0,))
    agreement.ready(0, 0, 8, clock=0)
    assert agreement.decide() is None
    assert not agreement.left(0, session=7)
    agreement.ready(1, 0, 8, clock=0)
    assert agreement.decide() == Decision(version=0, chosen=(0,), complete=(0,), members=(0,))


def introduction(number: int, *, session: int, attempt: int = 0) -> Message:
    said = pack_object({"address": f"ipc://{number}", "attempt": attempt, "num_known": 0})
    return Message(kind=Kind.SERVES, place=number, session=session, frames=(said,))


def test_who_joins_is_told_of_a_run_once_it_is_whole() -> None:
    def ask() -> dict[str, Any]:
        (reply,) = first.receive(b"new", pack_message(Message(kind=Kind.ASK_RUN)), 0.0)
        assert reply.message.kind == Kind.RUN
        said = read_object(reply.message, {"job": str, "addresses": list, "worker": int})
        return {name: said[name] for name in ("job", "addresses", "worker")}

    first = ParameterServer(0, invitations=Invitations(job="test", num_servers=2, num_started=2))
    first.others.address = "ipc://0"
    assert ask()["job"] == ""
    first.receive(b"server", pack_message(introduction(1, session=3)), 0.0)
    assert ask() == {"job": "test", "addresses": ["ipc://0", "ipc://1"], "worker": 2}
    assert ask()["worker"] == 3  # each number is given once
    worker = PlayedWorker(0, make_settings(job="another", num_workers=2, num_servers=2))
    (reply,) = first.receive(b"0/0", pack_message(worker.rank.hello()[0]), 0.0)
    assert "was started for another run" in read_object(reply.message, {"why": str})["why"]


def test_two_servers_of_one_shard() -> None:
    first = ParameterServer(0)
    for _ in range(2):  # the same one, connected again
        message = introduction(1, session=5)
        (reply,) = first.receive(b"a", pack_message(message), 0.0)
        assert reply.message.kind == Kind.KNOWN
    for number, session in ((1, 6), (0, 5)):
        message = introduction(number, session=session)
        (reply,) = first.receive(b"b", pack_message(message), 0.0)
        why = read_object(reply.message, {"why": str})["why"]
        assert reply.peer == b"b" and f"there is a server {number} already" in why
        with pytest.raises(LaunchError, match="has a number of its own, from 0 to"):
            ParameterServer(1).receive(TO_LEADER, pack_message(reply.message), 0.0)
    (reply,) = first.receive(b"b", pack_message(introduction(1, session=7, attempt=1)), 0.0)  # started again
    assert reply.message.kind == Kind.KNOWN and first.others.peer_of(1) == b"b"


def test_only_servers_speak_for_servers() -> None:
    settings = make_settings(num_workers=2, num_servers=2)
    made = Play(settings, [PlayedWorker(number, settings) for number in range(2)])
    for one in made.workers.values():
        made.hello(one)
    made.run(2)
    first, second = made.servers
    ready = Message(kind=Kind.READY, place=1, worker=0, session=1, clock=2)
    for peer in (b"stranger", b"0/1"):
        assert first.receive(peer, pack_message(ready), 0.0) == []
    gone = Message(kind=Kind.GONE, place=0, server=1, worker=0, session=1)
    assert second.receive(b"0/1", pack_message(gone), 0.0) == []
    assert second.receive(TO_LEADER, pack_message(replace(gone, place=1)), 0.0) == []
    assert first.refused["malformed"] == 2 and second.refused["malformed"] == 2
    assert second.members.workers == (0, 1)
    # and a server that is known says only what servers say to the first one
    decided = Message(kind=Kind.NORM, place=1, frames=(b"12345678",))
    assert first.receive(server_peer(1), pack_message(decided), 0.0) == []
    assert first.refused["malformed"] == 3
