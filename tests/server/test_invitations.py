"""Numbers for workers that are started by themselves: worker 0, which gives the first weights, is always there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from served_workers import PlayedWorker, make_settings

from weft.errors import LaunchError
from weft.server.invitations import Invitations
from weft.server.listening import listen_at, read_address
from weft.server.protocol.keys import key_for, write_key
from weft.server.protocol.message import Kind, Message, pack_message, read_object
from weft.server.protocol.worker_rank import SESSION_BITS
from weft.server.server import ParameterServer
from weft.server.status import Status, status_of

FIELDS: Any = {"job": str, "worker": int, "is_settled": bool, "has_begun": bool}


class Run:
    """The first server of a run whose workers ask for their numbers."""

    def __init__(self, *, num_servers: int = 1, num_started: int = 0) -> None:
        invitations = Invitations(job="test", num_servers=num_servers, num_started=num_started)
        self.server = ParameterServer(0, invitations=invitations)
        self.settings = make_settings(num_servers=num_servers)

    def ask(self, asker: int, now_s: float) -> dict[str, Any]:
        (reply,) = self.server.receive(b"?", pack_message(Message(kind=Kind.ASK_RUN, session=asker)), now_s)
        said = read_object(reply.message, FIELDS)
        return {name: said[name] for name in FIELDS}

    def number(self, asker: int, now_s: float) -> int:
        return int(self.ask(asker, now_s)["worker"])

    def hello(self, number: int, now_s: float) -> PlayedWorker:
        worker = PlayedWorker(number, self.settings)
        self.say(worker, worker.rank.hello(), now_s)
        return worker

    def say(self, worker: PlayedWorker, messages: Any, now_s: float) -> None:
        for message in messages:
            for reply in self.server.receive(b"%d" % worker.rank.worker, pack_message(message), now_s):
                if reply.peer == b"%d" % worker.rank.worker:
                    self.say(worker, worker.rank.receive(reply.message), now_s)


def test_who_asks_first_is_worker_0_and_stays_it_while_it_asks() -> None:
    run = Run()
    assert run.number(7, 0.0) == 0
    assert [run.number(asker, 1.0) for asker in (8, 9)] == [1, 2]
    for now_s in (4.0, 8.0, 12.0):
        assert run.ask(7, now_s) == {"job": "test", "worker": 0, "is_settled": False, "has_begun": False}
    assert run.number(10, 13.0) == 3


def test_worker_0_that_ends_before_it_has_joined_makes_room_for_the_next() -> None:
    run = Run()
    assert (run.number(7, 0.0), run.number(8, 0.0)) == (0, 1)
    assert run.ask(9, 3.0)["job"] == ""  # it may be gone: ask again
    assert run.number(9, 6.0) == 0
    assert run.number(7, 6.5) == 2  # which was too late


def test_worker_0_that_dies_before_there_are_weights_makes_room_for_the_next() -> None:
    run = Run()
    run.number(7, 0.0)
    run.server.receive(b"0", pack_message(PlayedWorker(0, run.settings).rank.hello()[0]), 1.0)
    assert run.ask(7, 2.0)["is_settled"]
    assert run.number(8, 20.0) == 1  # it is there
    run.server.tick(20.0)
    assert run.number(9, 20.0) == 0


def test_with_weights_nobody_becomes_worker_0_again() -> None:
    run = Run()
    run.number(7, 0.0)
    run.hello(0, 0.0)
    run.server.tick(20.0)
    assert run.server.members.is_empty
    found = run.ask(8, 20.0)
    assert found["has_begun"] and found["worker"] == 1


def test_workers_that_are_started_with_the_servers_have_the_first_numbers() -> None:
    run = Run(num_started=2)
    assert [run.number(asker, 0.0) for asker in (7, 8)] == [2, 3]


def test_a_run_is_over_when_its_last_worker_has_said_so_and_not_when_it_died() -> None:
    run = Run()
    zero, one = run.hello(0, 0.0), run.hello(1, 0.0)
    status = status_of(run.server)
    assert status.has_begun and status.workers == (0, 1) and status.in_words == "version 0, 2 workers"
    run.say(zero, zero.rank.leave(), 1.0)
    assert status_of(run.server).workers == (1,) and not status_of(run.server).is_over
    run.server.tick(20.0)  # worker 1 has died
    status = status_of(run.server)
    assert not status.is_over and "no worker is there any more" in status.in_words
    again = run.hello(2, 21.0)
    run.say(again, again.rank.leave(), 22.0)
    assert status_of(run.server).is_over and status_of(run.server).in_words == "all workers have ended"
    del one


def test_a_farewell_that_another_server_has_told_before() -> None:
    members, start = Run().server.members, 5
    members.hello(0, 0, session=start << SESSION_BITS, peer=b"a", now_s=0.0)
    members.leave(0)
    assert not members.is_over
    assert members.said_goodbye(0, 4 << SESSION_BITS) and not members.is_over  # another start of it
    assert members.said_goodbye(0, (start << SESSION_BITS) + 3) and members.is_over
    assert not members.said_goodbye(0, start << SESSION_BITS)  # is known


def test_a_status_in_words_and_as_json() -> None:
    waiting = Status(version=0, step=0, workers=(), num_awaited=0, has_begun=False, ages=None, is_over=False)
    assert waiting.in_words == "no worker is there; the run begins when all are"
    stale = Status(version=9, step=4, workers=(0, 2), num_awaited=2, has_begun=True, ages=(1, 3), is_over=False)
    assert stale.in_words == "version 9, 2 workers, staleness 1 to 3"
    assert Status.of_object(json.loads(json.dumps(asdict(stale)))) == stale


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1", ("127.0.0.1", 0)), ("127.0.0.1:81", ("127.0.0.1", 81)), ("tcp://localhost:5", ("127.0.0.1", 5))],
)
def test_addresses_to_listen_at(text: str, found: tuple[str, int]) -> None:
    assert read_address(text) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0.0.0.0:5000", "stands for all of them"),
        ("*", "stands for all of them"),
        (":5000", "stands for all of them"),
        ("127.0.0.1:http", "give HOST or HOST:PORT"),
        ("127.0.0.1:70000", "a port up to 65535"),
        ("nobody.invalid", 'no IPv4 address is known of the host "nobody.invalid"'),
    ],
)
def test_what_is_no_address_to_listen_at(text: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=problem.replace("*", r"\*")):
        read_address(text)


def test_nothing_listens_beyond_this_host_without_a_key(tmp_path: Any) -> None:
    assert listen_at(None, tmp_path / "key") == {} and not (tmp_path / "key").exists()
    with pytest.raises(LaunchError, match=r"whoever reaches servers at 127\.0\.0\.1 needs the job's key"):
        listen_at("127.0.0.1", None)
    path = tmp_path / "new" / "key"
    assert listen_at("127.0.0.1:5", path) == {"tcp_host": "127.0.0.1", "port": 5, "key_file": path}
    assert path.stat().st_mode & 0o777 == 0o600
    made = path.read_text()
    listen_at("127.0.0.1", path)  # is used again
    assert path.read_text() == made
    path.chmod(0o604)
    with pytest.raises(LaunchError, match="can be read by others"):
        listen_at("127.0.0.1", path)


def test_the_key_for_an_address(tmp_path: Any) -> None:
    key = write_key(tmp_path / "key")
    assert key_for("ipc:///x", None) is None
    assert key_for("tcp://h:5", str(tmp_path / "key")) == key
    with pytest.raises(LaunchError, match="let nobody in without the job's key; copy the key file"):
        key_for("tcp://h:5", None)
