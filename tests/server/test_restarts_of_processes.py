"""Server processes that are killed, and go on from their snapshots."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import counting_worker
import pytest
import torch
from counting_worker import NUM_CLOCKS, CountingRank, counting_settings
from served_relays import Relays
from served_workers import PlayedWorker, make_settings, play

from weft.errors import LaunchError
from weft.server.local_servers import LocalServers
from weft.server.protocol.client import ServerClient
from weft.server.protocol.keys import write_key
from weft.server.protocol.layout import ServerLayout
from weft.server.server import ParameterServer
from weft.server.snapshot import take
from weft.server.snapshot_file import SNAPSHOT, DecisionsFile, read_snapshot, write_snapshot
from weft.server.snapshot_keeper import SnapshotKeeper


@pytest.mark.timeout(240)
@pytest.mark.parametrize("every_s", [1000.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_updates_are_those_of_servers_that_live(every_s: float, caplog: pytest.LogCaptureFixture) -> None:
    """With the first snapshot alone, workers send all again; with many, hardly anything."""
    settings = make_settings(num_workers=1, num_servers=2, clip_norm=0.5)
    with LocalServers(2, most_frame_bytes=1 << 20, max_restarts=1, snapshot_every_s=every_s) as servers:

        def size(clock: int) -> int:
            if clock in (4, 8):
                os.kill(servers.pids[clock % 8 // 4], signal.SIGKILL)
            return 4

        worker = PlayedWorker(0, settings, size=size)
        with ServerClient(servers.addresses, None, worker.rank) as client:
            for _ in range(12):
                client.wait_for_weights(timeout_s=60)
                client._say(worker.step())
            client.wait_for_weights(timeout_s=60)
    expected = play(settings, 12).weights()
    assert all(torch.equal(worker.weights[name], one) for name, one in expected.items())
    for number in (0, 1):
        assert f"server {number} was killed by signal 9; it is started again" in caplog.text


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_is_killed_while_its_weights_arrive_and_are_used(mode: str, tmp_path: Path) -> None:
    """A synchronous one sends the rest of the same; where weights may be others, the step is left out."""
    settings = replace(counting_settings(num_servers=1, num_workers=1), mode=mode, bucket_bytes=1 << 13)
    last = len(ServerLayout.of(settings, 0).buckets) - 1
    key = write_key(tmp_path / "key")
    where = dict(tcp_host="127.0.0.1", key_file=tmp_path / "key")
    with (
        LocalServers(1, most_frame_bytes=1 << 20, max_restarts=1, snapshot_every_s=1000.0, **where) as servers,
        Relays(servers.addresses) as relays,
    ):
        worker = CountingRank(settings, 0, 0)
        with ServerClient(relays.addresses, key, worker.rank) as client:
            client.wait_for_weights(timeout_s=60)
            client.use_weights(timeout_s=60)
            torn = []
            while worker.rank.clock < 6:
                client.wait_for_all()
                is_killed = worker.rank.clock == 3
                if is_killed:
                    relays.let_through(12_000)
                if worker.rank.is_torn:
                    torn.append(worker.rank.clock)
                else:
                    worker.step(client)
                client.wait_for_clock(timeout_s=60)
                client.use_weights(timeout_s=60)
                if is_killed:
                    client.wait_for_buckets([(0, 0)])
                    assert not worker.rank.has_bucket(0, last)
                    os.kill(servers.pids[0], signal.SIGKILL)
                    relays.cut()  # with what it had sent
                    relays.let_through(None)
            client.wait_for_all()
            assert torn == ([] if mode == "sync" else [4])
    assert torch.equal(-worker.weights[:8], torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0]))


def test_a_server_whose_restarts_are_used_up(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.local_servers.COMES_BACK_S", 2.0)
    monkeypatch.setattr("weft.server.protocol.client.SILENT_AFTER_S", 1.0)
    monkeypatch.setattr("weft.server.local_servers.LocalServers._start_again", lambda *_: None)
    with LocalServers(1, most_frame_bytes=1 << 20, max_restarts=1) as servers:
        worker = PlayedWorker(0, make_settings(num_workers=1))
        with ServerClient(servers.addresses, None, worker.rank) as client:
            client.wait_for_weights(timeout_s=30)
            os.kill(servers.pids[0], signal.SIGKILL)
            client._say(worker.step())
            with pytest.raises(LaunchError, match=r"does not answer any more \(waited 2 s\)"):
                client.wait_for_weights(timeout_s=30)
    assert "waits for it to be started again, for 2 s at most" in caplog.text


def kept_server(folder: Path) -> tuple[ParameterServer, SnapshotKeeper]:
    server = ParameterServer(0, comes_back_s=1.0)
    return server, SnapshotKeeper(server, folder)


def test_files_of_a_server_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    made = play(make_settings(num_workers=1), 3)
    write_snapshot(tmp_path, take(made.servers[0]))
    decisions = DecisionsFile(tmp_path)
    decisions.add([{"number": 5}])
    with (tmp_path / "decisions").open("ab") as file:
        file.write(b'{"numb')
    (tmp_path / f"{SNAPSHOT}.being-written").write_bytes(b"half")
    assert decisions.read() == [{"number": 5}]
    found = read_snapshot(tmp_path)
    assert found is not None and found.plain["version"] == 3
    whole = (tmp_path / SNAPSHOT).read_bytes()
    for wrong in (b"", whole[:-1], whole[:9], b"\xff" * 8 + whole[8:]):
        (tmp_path / SNAPSHOT).write_bytes(wrong)
        with pytest.raises(LaunchError, match="is no whole snapshot of a server"):
            read_snapshot(tmp_path)
    decisions.close()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="server 0 cannot write its snapshots to"):
        kept_server(tmp_path / "file")


class Workers:
    """Two processes, each of which may be killed."""

    def __init__(self, folder: Path, addresses: tuple[str, ...]) -> None:
        self.folder, self._addresses = folder, addresses
        self._starts = [0, 0]
        self._processes = [self._start(number) for number in (0, 1)]

    def _start(self, number: int) -> Any:
        own = [str(number), str(self._starts[number]), str(self.file(number)), str(self.folder / "stop")]
        return subprocess.Popen([sys.executable, counting_worker.__file__, *own, *self._addresses])

    def file(self, number: int) -> Path:
        return self.folder / f"told-{number}"

    def told(self, number: int) -> list[int]:
        """Clocks that a worker was told are applied; the last line may be half of one."""
        if not self.file(number).exists():
            return []
        return [int(line) for line in self.file(number).read_text().split("\n")[:-1]]

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()
        self._starts[number] += 1
        self._processes[number] = self._start(number)

    def wait_until_all_go_on(self) -> None:
        before = [len(self.told(number)) for number in (0, 1)]
        deadline = time.monotonic() + 100
        while any(len(self.told(number)) < before[number] + 20 for number in (0, 1)):
            assert time.monotonic() < deadline, [self.told(number)[-3:] for number in (0, 1)]
            time.sleep(0.05)

    def end(self) -> None:
        (self.folder / "stop").touch()
        assert [one.wait(60) for one in self._processes] == [0, 0]

    def kill_all(self) -> None:
        for one in self._processes:
            one.kill()
            one.wait()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [4, 20])
def test_what_workers_were_told_is_applied_once_whoever_is_killed(num_kills: int, tmp_path: Path) -> None:
    chance = random.Random(num_kills)
    with LocalServers(2, most_frame_bytes=1 << 20, max_restarts=num_kills, snapshot_every_s=0.2) as servers:
        workers = Workers(tmp_path, servers.addresses)
        try:
            for _ in range(num_kills):
                workers.wait_until_all_go_on()
                time.sleep(1 + chance.random())
                if chance.random() < 0.5:
                    workers.kill(chance.randrange(2))
                else:
                    os.kill(servers.pids[chance.randrange(2)], signal.SIGKILL)
            workers.wait_until_all_go_on()
            workers.end()
            counts = counted(servers.addresses)
        finally:
            workers.kill_all()
    assert set(counts.flatten().tolist()) == {0.0, 1.0}
    for number in (0, 1):
        told = workers.told(number)
        assert len(told) == len(set(told)) > 20 * num_kills
        assert counts[told, number].eq(1).all()


def counted(addresses: tuple[str, ...]) -> torch.Tensor:
    """How often each clock of each worker is in the weights, as one more worker gets them."""
    one = CountingRank(counting_settings(num_servers=len(addresses), num_workers=2), 2, 0)
    with ServerClient(addresses, None, one.rank) as client:
        client.wait_for_weights(timeout_s=60)
        return -one.weights.view(NUM_CLOCKS, 2).clone()
