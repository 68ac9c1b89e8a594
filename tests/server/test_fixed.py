"""What is not trained: the first worker's, kept by servers as it is, and given once to every start of a worker."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served_workers import Play, PlayedWorker, make_settings
from torch import Tensor

from weft.plan.partition.flat_buffers import ParameterSpec
from weft.plan.partition.served_wire import served_fixed_bytes
from weft.plan.plan import Axes, Comm, Data, Plan, Server
from weft.planning.server_memory import fixed_tensors_of, predict_server_memory
from weft.server import snapshot as snapshots
from weft.server.local_servers import LocalServers
from weft.server.protocol.client import ServerClient
from weft.server.protocol.message import Kind, Malformed, Message, pack_message
from weft.server.protocol.settings import Settings, difference, read_settings
from weft.server.server import ParameterServer
from weft.server.snapshot_file import read_snapshot, write_snapshot
from weft.sync.fixed_tensors import FixedTensors, fixed_of_all

BUCKET_BYTES = 96


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Of many kinds; what lies in them depends on the seed."""
    chance = torch.Generator().manual_seed(seed)
    numbers = torch.randn(7, 9, generator=chance)
    return {
        "frozen": numbers.double(),
        "transposed": numbers.clone().t(),
        "half": numbers[0].bfloat16(),
        "count": torch.tensor(3 + seed),
        "mask": numbers[1] > 0,
        "complex": torch.complex(numbers[2], numbers[3]),
        "none": torch.empty(0, 4),
        "bytes": torch.randint(0, 255, (200,), dtype=torch.uint8, generator=chance),
        "expanded": numbers[4:5, :1].clone().expand(3, 5),
    }


def settings_with(fixed: FixedTensors, **changes: Any) -> Settings:
    tensors, dtypes = fixed_of_all([fixed.rows()])
    return make_settings(fixed=tensors, fixed_dtypes=dtypes, bucket_bytes=BUCKET_BYTES, **changes)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.dtype == expected[name].dtype and torch.equal(one, expected[name]), name


class Counting(Play):
    """Counts bytes and messages of kinds, by worker and server."""

    def __init__(self, *arguments: Any) -> None:
        self.num_bytes: Counter[tuple[Kind, int, int]] = Counter()
        super().__init__(*arguments)

    def deliver(self, way: str, key: tuple[int, int]) -> None:
        if way != "across":
            message = (self.to_servers if way == "up" else self.to_workers)[key][0]
            self.num_bytes[message.kind, *key] += sum(map(len, pack_message(message)))
        super().deliver(way, key)


def begun(num_servers: int = 1, steps: int = 3) -> tuple[Counting, Settings, dict[int, FixedTensors]]:
    """Two workers that hold other values when they begin."""
    fixed = {number: FixedTensors(tensors_of(number)) for number in range(2)}
    settings = settings_with(fixed[0], num_servers=num_servers)
    made = Counting(settings, [PlayedWorker(number, settings, fixed=fixed[number]) for number in range(2)])
    for one in made.workers.values():
        made.hello(one)
    made.run(steps)
    return made, settings, fixed


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_all_workers_have_the_first_ones(num_servers: int) -> None:
    made, settings, fixed = begun(num_servers)
    assert [server.version for server in made.servers] == [3] * num_servers
    for one in fixed.values():
        assert_same_bits(one.tensors, tensors_of(0))
    for worker in range(2):
        wire = dict(num_servers=num_servers, bucket_bytes=BUCKET_BYTES, gives_first=worker == 0)
        for server, one in enumerate(served_fixed_bytes(settings.fixed, **wire)):  # type: ignore[arg-type]
            sent = sum(made.num_bytes[kind, worker, server] for kind in (Kind.INITIAL_FIXED, Kind.ASK_FIXED))
            assert (sent, made.num_bytes[Kind.FIXED, worker, server]) == (one.sent, one.received)


def test_servers_keep_what_is_predicted() -> None:
    made, settings, _ = begun(2)
    specs = [
        ParameterSpec(name=one.name, shape=(one.numel,), dtype=dtype)
        for one, dtype in zip(settings.fixed, settings.fixed_dtypes, strict=True)
    ]
    frozen, buffers = [replace(specs[0], trainable=False)], specs[1:]
    plan = Plan(
        axes=Axes(data=2), data=Data(sync="server"), server=Server(shards=2), comm=Comm(bucket_bytes=BUCKET_BYTES)
    )
    predicted = predict_server_memory(plan, frozen, buffers=buffers)
    for server, one in zip(made.servers, predicted, strict=True):
        assert server.store is not None
        assert sum(len(frame) for frames in server.store.fixed for frame in frames) == one.fixed
        assert one.total - one.fixed == one.weights + one.optimizer + one.gradients + one.update + one.copies
    half = ParameterSpec(name="frozen", shape=(10,), trainable=False)
    trained = ParameterSpec(name="trained", shape=(10,))
    narrow = replace(plan, precision=replace(plan.precision, compute="bf16"))
    assert [one.item_bytes for one in fixed_tensors_of(narrow, [half, trained])] == [2]


def test_a_later_session_leaves_buffers_as_they_are() -> None:
    """Running statistics are each worker's own; only another start of a worker takes the first ones again."""
    made, settings, fixed = begun()
    fixed[1].tensors["count"].fill_(77)
    worker = made.workers[1]
    made.say(worker, worker.rank.hello_anew())
    made.run(5)
    assert made.servers[0].version == 5 and fixed[1].tensors["count"].item() == 77
    for queues in (made.to_workers, made.to_servers):  # with the process that ends
        queues.pop((1, 0), None)
    del made.by_peer[worker.peers[0]]
    again = FixedTensors(tensors_of(1))
    made.workers[1] = PlayedWorker(1, settings, start=2, fixed=again)
    made.workers[1].rank._earlier_starts = [1]
    made.by_peer |= dict.fromkeys(made.workers[1].peers.values(), made.workers[1])
    made.hello(made.workers[1])
    made.run(8)
    assert made.servers[0].version == 8 and made.workers[1].begun
    assert_same_bits(again.tensors, tensors_of(0))


def test_a_server_that_is_started_again_has_them(tmp_path: Path) -> None:
    made, _, _ = begun()
    (server,) = made.servers
    (tmp_path / "fixed").write_bytes(b"of a process that died before its first snapshot")
    write_snapshot(tmp_path, snapshots.take(server))
    written = (tmp_path / "fixed").stat().st_mtime_ns
    write_snapshot(tmp_path, snapshots.take(server))
    assert (tmp_path / "fixed").stat().st_mtime_ns == written  # once
    found = read_snapshot(tmp_path)
    assert found is not None and server.store is not None
    again = ParameterServer(0, attempt=1, comes_back_s=60.0)
    snapshots.go_on(again, found)
    assert again.store is not None and again.store.fixed == server.store.fixed and again.version == 3


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_that_joins_after_all_servers_were_killed() -> None:
    fixed = {number: FixedTensors(tensors_of(number)) for number in range(2)}
    settings = settings_with(fixed[0], num_servers=2, num_workers=1, mode="async")
    with LocalServers(2, most_frame_bytes=1 << 20, max_restarts=1, snapshot_every_s=1000.0) as servers:
        workers = [PlayedWorker(number, settings, fixed=fixed[number]) for number in range(2)]
        with ServerClient(servers.addresses, None, workers[0].rank) as first:
            first.wait_for_weights(timeout_s=60)
            first._say(workers[0].step())
            for pid in list(servers.pids):
                os.kill(pid, signal.SIGKILL)
            first.wait_for_weights(timeout_s=60)
            with ServerClient(servers.addresses, None, workers[1].rank, join_timeout_s=60) as second:
                second.wait_for_weights(timeout_s=60)
    for one in fixed.values():
        assert_same_bits(one.tensors, tensors_of(0))


def test_what_is_not_as_it_should_be_changes_nothing() -> None:
    made, settings, _ = begun()
    (server,), worker = made.servers, made.workers[1]
    before = server.store.fixed if server.store is not None else None
    peer = worker.peers[0]
    frames = (b"x" * 16,)
    for kind, fields in (
        (Kind.INITIAL_FIXED, dict(bucket=0, frames=frames)),
        (Kind.FIXED, dict(bucket=0, frames=frames)),
        (Kind.ASK_FIXED, dict(place=1)),
    ):
        assert not server.receive(peer, pack_message(worker.message(kind, **fields)), 0.0)
    assert server.store is not None and server.store.fixed == before
    fresh = ParameterServer()
    unknown = Message(kind=Kind.ASK_FIXED, job=settings.digest)
    assert not fresh.receive(b"stranger", pack_message(unknown), 0.0) and fresh.refused["stranger"] == 1
    hello = PlayedWorker(0, settings, fixed=FixedTensors(tensors_of(0))).hello()
    fresh.receive(b"0", pack_message(hello), 0.0)
    mine = replace(hello, frames=())
    for kind, bucket, given in (
        (Kind.INITIAL_FIXED, 0, frames),
        (Kind.INITIAL_FIXED, 99, frames),
        (Kind.ASK_FIXED, 0, ()),
    ):
        assert not fresh.receive(b"0", pack_message(replace(mine, kind=kind, bucket=bucket, frames=given)), 0.0)
    assert fresh.refused["malformed"] == 3 and fresh.store is None


@pytest.mark.parametrize("wrong", [{"unknown": ["a", [], []]}, {"head": 5}, {"head": ["a", []]}, {"head": [1, [], []]}])
def test_places_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match="places of other tensors"):
        read_settings(PlayedWorker(0, make_settings(places=wrong)).hello())


def test_another_model_is_named() -> None:
    ours = settings_with(FixedTensors(tensors_of(0)))
    fewer = tensors_of(0)
    del fewer["mask"]
    other = settings_with(FixedTensors({**tensors_of(0), "bytes": torch.zeros(4)}))
    assert str(difference(ours, settings_with(FixedTensors(fewer)))) == (
        'the model is another one: "mask" is a frozen parameter or buffer in the run that is to be joined, and not here'
    )
    assert "is not a frozen parameter or buffer in the run" in str(difference(settings_with(FixedTensors(fewer)), ours))
    places = {"head": ["head", [6, 3], []]}
    first, second = (make_settings(places=one) for one in (places, {"head": ["head", [3, 6], []]}))
    assert '"head" has shape [3, 6] here and [6, 3] in the run' in str(difference(first, second))
    assert '"head" has shape None here and [6, 3] in the run' in str(difference(first, make_settings()))
    assert '"bytes" has 4 elements of float32 here and 200 of uint8' in str(difference(ours, other))
