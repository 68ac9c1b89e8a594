"""Who has ended, and who was given which number, as all servers know it: also those that a goodbye did not reach, and
those that were started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dying_servers import Dying
from served_workers import Play, PlayedWorker, make_settings, server_peer

from weft.errors import LaunchError
from weft.server.invitations import Invitations
from weft.server.other_servers import TO_LEADER
from weft.server.protocol.message import Kind, Message, pack_message, pack_object, read_object
from weft.server.server import ParameterServer
from weft.server.snapshot_keeper import SnapshotKeeper

MODES = [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}]


def pass_on(made: Play) -> None:
    """Deliver what servers say to each other."""
    while found := [one for one in made.open() if one[0] == "across"]:
        made.deliver(*found[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_goodbye_that_reaches_one_server_only(mode: dict[str, Any], reached: int) -> None:
    settings = make_settings(num_workers=1, num_servers=3, **mode)
    made = Play(settings, [PlayedWorker(0, settings)])
    worker = made.workers[0]
    made.hello(worker)
    made.run(3)
    goodbye = next(one for one in worker.rank.leave() if one.server == reached)
    made.say(worker, [goodbye])
    made.deliver("up", (0, reached))
    pass_on(made)
    for server in made.servers:
        for reply in server.tick(100.0):
            made.answer(server.number, reply)
    pass_on(made)
    assert [one.is_over and one.is_left for one in made.servers] == [True] * 3


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_that_dies_at_all_servers_does_not_end_the_run(mode: dict[str, Any]) -> None:
    settings = make_settings(num_workers=1, num_servers=2, **mode)
    made = Play(settings, [PlayedWorker(0, settings)])
    made.hello(made.workers[0])
    made.run(3)
    for server in made.servers:
        for reply in server.tick(100.0):
            made.answer(server.number, reply)
    pass_on(made)
    assert [(one.is_over, one.is_left) for one in made.servers] == [(False, True)] * 2


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("died", [0, 1])
def test_a_server_that_was_started_again_is_told_who_has_ended(mode: dict[str, Any], died: int) -> None:
    """And one that waits for workers to come again is not left."""
    made = Dying(make_settings(num_workers=2, num_servers=2, **mode), seed=1)
    made.run(3)
    made.begin_save(died)
    made.end_save(died)
    gone, stays = made.workers[0], made.workers[1]
    made.say(gone, gone.rank.leave())
    made.steps_at_most = 3
    while found := made.open():
        made.deliver(*found[0])
    made.to_servers.clear()
    made.kill_server(died)
    del made.workers[0]
    made.to_servers = {key: queue for key, queue in made.to_servers.items() if key[0] != 0}
    server = made.servers[died]
    assert not server.is_left and not server.is_over
    while found := made.open():
        made.deliver(*found[0])
    for reply in server.tick(made.now_s):
        made.answer(died, reply)
    assert server.members.workers == (1,) and 0 in server.members.ended
    made.say(stays, stays.rank.leave())
    while found := made.open():
        made.deliver(*found[0])
    assert [one.is_over for one in made.servers] == [True, True]


def introduction(number: int, *, session: int, attempt: int = 0) -> Message:
    said = pack_object({"address": f"ipc://{number}", "attempt": attempt, "num_known": 0})
    return Message(kind=Kind.SERVES, place=number, session=session, frames=(said,))


def test_a_server_beyond_the_plan_is_refused() -> None:
    first = ParameterServer(0, num_servers=2)
    for number, is_one in ((1, True), (2, False), (7, False)):
        (reply,) = first.receive(server_peer(number), pack_message(introduction(number, session=5)), 0.0)
        assert (reply.message.kind == Kind.KNOWN) == is_one
    why = read_object(reply.message, {"why": str})["why"]
    assert "server 7 is one too many: the plan of this run has [server] shards = 2, and its servers are 0 to 1" in why
    with pytest.raises(LaunchError, match="server 7 is one too many"):
        ParameterServer(7).receive(TO_LEADER, pack_message(reply.message), 0.0)
    assert first.others.addresses == ["", "ipc://1"]


def test_a_plan_that_is_known_by_a_hello_alone_says_how_many_servers_there_are() -> None:
    settings = make_settings(num_workers=1, num_servers=2)
    made = Play(settings, [PlayedWorker(0, settings)])
    made.hello(made.workers[0])
    made.run(1)
    (reply,) = made.servers[0].receive(b"new", pack_message(introduction(2, session=5)), 0.0)
    assert "server 2 is one too many" in read_object(reply.message, {"why": str})["why"]


class Leader:
    """A first server with its files, which may be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, -1
        self.start_again()

    def start_again(self) -> None:
        self.attempt += 1
        invitations = Invitations(job="test", num_servers=2, num_started=0)
        self.server = ParameterServer(
            0, invitations=invitations, num_servers=2, attempt=self.attempt, comes_back_s=60.0
        )
        self.server.others.address = "ipc://0"
        self.keeper = SnapshotKeeper(self.server, self.folder)

    def hear(self, message: Message, now_s: float) -> dict[str, Any]:
        (reply,) = self.server.receive(b"peer", pack_message(message), now_s)
        self.keeper.before_speaking()
        return read_object(reply.message, {})

    def number_for(self, asker: int, now_s: float) -> int:
        return int(self.hear(Message(kind=Kind.ASK_RUN, session=asker), now_s)["worker"])


def test_a_leader_that_is_started_again_gives_no_number_twice(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.hear(introduction(1, session=3), 0.0)
    given = [leader.number_for(asker, 1.0) for asker in (11, 12, 13)]
    assert given == [0, 1, 2]
    leader.start_again()
    # The other server need not have come again, and the number 0 is that of whoever has it, until it is silent.
    given += [leader.number_for(14, 100.0)]
    assert leader.number_for(11, 101.0) == 0
    leader.start_again()
    given += [leader.number_for(15, 200.0)]
    assert len(set(given)) == len(given) == 5
    assert leader.number_for(16, 210.0) == 0, "who had it has ended"


def test_a_leader_that_is_started_again_knows_the_other_servers(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.hear(introduction(1, session=3, attempt=1), 0.0)
    leader.start_again()
    why = leader.hear(introduction(1, session=4), 1.0)["why"]
    assert "there is a server 1 already, and two servers of one shard cannot be" in why
    assert "decisions" in leader.hear(introduction(1, session=3, attempt=1), 1.0)
