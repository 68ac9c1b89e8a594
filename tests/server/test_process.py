"""Servers as processes, and what reaches them through sockets."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from served_relays import Relays
from served_workers import PlayedWorker, first_weights, make_settings, play

from weft.errors import LaunchError
from weft.server.local_servers import LocalServers
from weft.server.process import MOST_FILES, ServerLoop, ServerOptions, allow_connections
from weft.server.protocol.client import ServerClient
from weft.server.protocol.connection import ServerConnection
from weft.server.protocol.keys import make_key, read_key, write_key
from weft.server.protocol.message import Kind, Message, pack_message
from weft.server.server import ParameterServer
from weft.server.workers.members import DEAD_AFTER_S


def train(worker: PlayedWorker, addresses: tuple[str, ...], steps: int, key: Any = None) -> dict[str, torch.Tensor]:
    """Take a few steps; returns the weights after the last one."""
    with ServerClient(addresses, key, worker.rank) as client:
        for _ in range(steps):
            client.wait_for_weights(timeout_s=30)
            client._say(worker.step())
        client.wait_for_weights(timeout_s=30)
        return {name: one.clone() for name, one in worker.weights.items()}


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_worker_trains_through_sockets_as_without(num_servers: int) -> None:
    settings = make_settings(num_workers=1, num_servers=num_servers)
    with LocalServers(num_servers, most_frame_bytes=1 << 20) as servers:
        found = train(PlayedWorker(0, settings), servers.addresses, 4)
    expected = play(settings, 4).weights()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert not torch.equal(found["head"], first_weights()["head"])


def test_a_worker_trains_over_tcp_with_the_key(tmp_path: Path) -> None:
    settings = make_settings(num_workers=1)
    key = write_key(tmp_path / "key")
    with LocalServers(1, most_frame_bytes=1 << 20, tcp_host="127.0.0.1", key_file=tmp_path / "key") as servers:
        assert servers.addresses[0].startswith("tcp://127.0.0.1:")
        found = train(PlayedWorker(0, settings), servers.addresses, 3, key)
    expected = play(settings, 3).weights()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_worker_goes_on_when_its_connections_are_lost(num_servers: int, tmp_path: Path) -> None:
    """A relay between worker and servers is cut twice, in the middle of what passes."""
    settings = make_settings(num_workers=1, num_servers=num_servers)
    key = write_key(tmp_path / "key")
    options = dict(most_frame_bytes=1 << 20, tcp_host="127.0.0.1", key_file=tmp_path / "key")
    with LocalServers(num_servers, **options) as servers:  # type: ignore[arg-type]
        with Relays(servers.addresses) as relays:
            worker = PlayedWorker(0, settings, size=lambda clock: relays.cut_at(clock))
            found = train(worker, relays.addresses, 8, key)
            assert relays.num_cut == 2
    expected = play(settings, 8).weights()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_server_that_nobody_answers_for() -> None:
    worker = PlayedWorker(0, make_settings(num_workers=1))
    with pytest.raises(LaunchError, match=r"no server of this run answers at tcp://127\.0\.0\.1:9 \(waited 0\.3 s\)"):
        ServerClient(("tcp://127.0.0.1:9",), None, worker.rank, join_timeout_s=0.3)


def test_what_is_no_address() -> None:
    worker = PlayedWorker(0, make_settings(num_workers=1))
    with pytest.raises(LaunchError, match="nonsense is no address of a server.*give tcp://HOST:PORT"):
        ServerClient(("nonsense",), None, worker.rank)
    with pytest.raises(LaunchError, match=r"0 addresses of servers for \[server\] shards = 1"):
        ServerClient((), None, worker.rank)


def test_servers_in_another_order() -> None:
    settings = make_settings(num_workers=1, num_servers=2)
    with LocalServers(2, most_frame_bytes=1 << 20) as servers:
        with pytest.raises(LaunchError, match=r"is server (0|1) of the run, not server (?!\1)\d; give the addr"):
            ServerClient(servers.addresses[::-1], None, PlayedWorker(0, settings).rank)


def test_a_refusal_is_an_error_with_its_reason() -> None:
    with LocalServers(1, most_frame_bytes=1 << 20) as servers:
        with ServerClient(servers.addresses, None, PlayedWorker(0, make_settings(num_workers=1)).rank):
            other = PlayedWorker(1, make_settings(num_workers=1, job="another"))
            with pytest.raises(LaunchError, match='this server is of job "test", not of "another"'):
                ServerClient(servers.addresses, None, other.rank)


def test_a_server_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.protocol.client.SILENT_AFTER_S", 2.0)
    servers = LocalServers(1, most_frame_bytes=1 << 20)
    worker = PlayedWorker(0, make_settings(num_workers=1))
    try:
        with ServerClient(servers.addresses, None, worker.rank) as client:
            client.wait_for_weights(timeout_s=30)
            os.kill(servers.pids[0], signal.SIGKILL)
            client._say(worker.step())
            with pytest.raises(LaunchError, match=r"the server at ipc://.*/0 does not answer any more"):
                client.wait_for_weights(timeout_s=30)
    finally:
        servers.close()


def test_two_servers_cannot_have_one_address(loop: Any) -> None:
    server, key = loop
    options = ServerOptions(
        number=1,
        bind=tuple(server.addresses),
        key_file=None,
        leader=None,
        most_frame_bytes=1,
        dead_after_s=5.0,
        num_threads=1,
    )
    with pytest.raises(LaunchError, match=r"server 1 cannot listen at tcp://127\.0\.0\.1:\d+: Address already in use"):
        ServerLoop(ParameterServer(1), options, key)


def test_servers_end_with_who_started_them() -> None:
    servers = LocalServers(1, most_frame_bytes=1 << 20)
    (pid,) = servers.pids
    servers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


@pytest.fixture
def loop(tmp_path: Path) -> Any:
    key = make_key()
    options = ServerOptions(
        number=0,
        bind=("tcp://127.0.0.1:0",),
        key_file=None,
        leader=None,
        most_frame_bytes=1 << 20,
        dead_after_s=5.0,
        num_threads=1,
    )
    made = ServerLoop(ParameterServer(), options, key)
    yield made, key
    made.close()


def turn_until(loop: ServerLoop, condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        loop.turn(20)
        if condition():
            return True
    return False


def test_who_has_not_the_key_never_reaches_the_server(loop: Any) -> None:
    server, key = loop
    other = make_key()
    half = type(key)(
        server_public=key.server_public,
        server_secret=other.server_secret,
        worker_public=other.worker_public,
        worker_secret=other.worker_secret,
    )
    hello = PlayedWorker(0, make_settings(num_workers=1)).hello()
    strangers = [ServerConnection(server.addresses, one) for one in (other, half, None)]
    for one in strangers:
        one.send(hello)
    assert not turn_until(server, lambda: server.server.settings is not None, 1.0)
    member = ServerConnection(server.addresses, key)
    member.send(hello)
    assert turn_until(server, lambda: server.server.settings is not None, 5.0)
    welcome = member.receive(1.0)
    assert isinstance(welcome, Message) and welcome.kind == Kind.WELCOME
    assert all(one.receive(0.0) is None for one in strangers)
    for one in (*strangers, member):
        one.close()


@pytest.mark.timeout(30)
def test_who_is_refused_before_it_speaks_does_not_wait_for_a_way_to_send(loop: Any) -> None:
    server, _ = loop
    stranger = ServerConnection(server.addresses, None)
    assert turn_until(server, lambda: not stranger._sockets[0].poll(0, zmq.POLLOUT), 10.0), "it was not refused"
    stranger.send(PlayedWorker(0, make_settings(num_workers=1)).hello())
    assert stranger.sent_bytes == [0]
    stranger.close()


def test_a_frame_longer_than_any_ends_the_connection(loop: Any) -> None:
    server, key = loop
    member = ServerConnection(server.addresses, key)
    hello = PlayedWorker(0, make_settings(num_workers=1)).hello()
    member._sockets[0].send_multipart([pack_message(hello)[0], bytes(17 << 20)])
    member.send(hello)
    assert turn_until(server, lambda: server.server.settings is not None, 5.0)  # by the new connection
    assert not server.server.refused["malformed"]
    member.close()


def test_addresses_that_others_reach_need_a_key() -> None:
    options = ServerOptions(
        number=0,
        bind=("tcp://127.0.0.1:0",),
        key_file=None,
        leader=None,
        most_frame_bytes=1,
        dead_after_s=5.0,
        num_threads=1,
    )
    with pytest.raises(LaunchError, match="needs the job's key"):
        ServerLoop(ParameterServer(), options, None)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    read_key(path)
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"mode 640 instead of 600.*chmod 600"):
        read_key(path)
    with pytest.raises(LaunchError, match="exists already"):
        write_key(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server_public": 3}', "\x00"])
def test_a_file_that_is_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(LaunchError, match="is no key of a job"):
        read_key(path)


def test_no_key_is_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot read the job's key"):
        read_key(tmp_path / "key")


def test_fuzzed_frames_through_a_socket(tmp_path: Path) -> None:
    """What is not a message is counted, and the server goes on."""
    chance = random.Random(1)
    address = f"ipc://{tmp_path}/server"
    options = ServerOptions(
        number=0,
        bind=(address,),
        key_file=None,
        leader=None,
        most_frame_bytes=1 << 20,
        dead_after_s=60.0,
        num_threads=1,
    )
    server = ServerLoop(ParameterServer(), options, None)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    for _ in range(500):
        socket.send_multipart([chance.randbytes(chance.randrange(80)) for _ in range(chance.randrange(1, 5))])
    assert turn_until(server, lambda: sum(server.server.refused.values()) == 500, 10.0)
    assert server.server.refused["malformed"] == 500
    socket.close()
    context.term()
    server.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_is_killed_is_noticed_within_5_seconds(mode: str, tmp_path: Path) -> None:
    """A real process; the other one goes on, and has the whole batch from then on."""
    settings = make_settings(num_workers=2, mode=mode)
    with LocalServers(1, most_frame_bytes=1 << 20) as servers:
        script = tmp_path / "worker.py"
        script.write_text(
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "import served_workers as made; from weft.server.protocol.client import ServerClient\n"
            f"worker = made.PlayedWorker(1, made.make_settings(num_workers=2, mode={mode!r}))\n"
            f"with ServerClient(({servers.addresses[0]!r},), None, worker.rank) as client:\n"
            "    while True:\n"
            "        client.wait_for_weights(timeout_s=60); client._say(worker.step())\n"
        )
        other = subprocess.Popen([sys.executable, script])
        worker = PlayedWorker(0, settings)
        try:
            with ServerClient(servers.addresses, None, worker.rank) as client:
                for _ in range(5):
                    client.wait_for_weights(timeout_s=60)
                    client._say(worker.step())
                assert worker.begun[-1].num_workers == 2
                other.kill()
                died_s = time.monotonic()
                while worker.begun[-1].num_workers == 2:
                    client.wait_for_weights(timeout_s=30)
                    client._say(worker.step())
                    assert time.monotonic() < died_s + DEAD_AFTER_S + 2.0
                    time.sleep(0.01)
        finally:
            other.kill()
            other.wait()
    assert worker.begun[-1].index == 0 and worker.begun[-1].num_workers == 1


def test_a_server_takes_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_connections()
        expected = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
