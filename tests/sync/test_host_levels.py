"""Codecs on several hosts: ranks of one host are summed as they are, each gets a slice, and hosts exchange through the
codec; on ranks that take themselves for several hosts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from meshes import kept_mesh
from oracle import cut_evenly, make_trainer, small_gpt, token_batch
from ranks import gathered, ranks
from strict_nccl.mode import StrictMode
from strict_plans import verify_over_strict
from torch import Tensor

from weft.codecs.base import Bucket
from weft.codecs.base import Codec as CodecOfBucket
from weft.codecs.make import make_codec
from weft.mesh import Mesh, make_mesh
from weft.plan.exchange.coded_tensor import CodedTensor, coded_tensors, slice_of
from weft.plan.exchange.compression import between_replicas, dense_bytes
from weft.plan.exchange.messages import messages_of
from weft.plan.partition.groups import plan_groups
from weft.plan.partition.host_levels import (
    BETWEEN_HOSTS,
    IN_HOSTS,
    HostPlace,
    find_host_place,
    level_groups,
    ranks_of_level,
    split_level,
    uneven_hosts,
)
from weft.plan.partition.wire import sent_bytes
from weft.plan.plan import Axes, Codec, Comm, Data, Plan, Precision
from weft.sync.exchange.compressed_exchange import CodedBucket, CompressedExchange
from weft.sync.in_process import exchange_in_process
from weft.sync.make import codec_groups
from weft.training.exchanged_bytes import sent_bytes_of_step
from weft.training.trainer import Trainer
from weft.verification.verify import verify
from weft.world import join_world

pytestmark = pytest.mark.long

EVEN, INTERLEAVED, UNEVEN = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)
POWERSGD = Codec(name="powersgd", rank=2)
SETTINGS: dict[str, dict[str, float]] = {"powersgd": {"rank": 2}, "dgc": {"density": 0.1}}
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def plan_of(codec: Codec = POWERSGD, section: Data | None = None, **axes: int) -> Plan:
    return Plan(axes=Axes(**(axes or {"data": 4})), codec=codec, data=section or Data())  # type: ignore[arg-type]


def test_which_plans_have_levels() -> None:
    in_hosts, between = ("data in hosts", "gradients"), ("data between hosts", "gradients")
    assert level_groups(plan_of(), EVEN) == level_groups(plan_of(), INTERLEAVED) == (in_hosts, between)
    assert plan_groups(plan_of(), batch_norms=False, hosts=EVEN)[-2:] == (in_hosts, between)
    for hosts in (UNEVEN, (0, 0, 0, 0), (0, 1, 2, 3), ()):
        assert level_groups(plan_of(), hosts) == ()
        assert plan_groups(plan_of(), batch_norms=False, hosts=hosts) == plan_groups(plan_of(), batch_norms=False)
    assert level_groups(plan_of(Codec()), EVEN) == ()
    assert level_groups(plan_of(data=2, ring=2), EVEN) == ()  # which are summed first anyway
    assert level_groups(plan_of(data=2, tensor=2), EVEN) == ()  # each data rank is alone on its host
    assert level_groups(plan_of(data=2, tensor=2), INTERLEAVED) == ()  # all are on one
    local, sharded = Data(sync="local", every=2), Data(shard="parameters")
    assert level_groups(plan_of(POWERSGD, local), EVEN) == ()
    assert level_groups(plan_of(POWERSGD, sharded, data=2, replicate=2), EVEN) == ()
    assert level_groups(plan_of(POWERSGD, sharded, data=1, replicate=4), EVEN)[0] == ("replicate in hosts", "gradients")


def test_ranks_of_levels_and_what_is_told_of_uneven_hosts() -> None:
    groups = [(0, 2, 4, 6), (1, 3, 5, 7)]
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    assert ranks_of_level(groups, hosts, IN_HOSTS) == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert ranks_of_level(groups, hosts, BETWEEN_HOSTS) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert split_level("data+ring in hosts") == ("data+ring", IN_HOSTS) and split_level("data") == ("data", "")
    place = HostPlace(places=((0, 2), (1, 3)), host=1, index=1)
    assert find_host_place(plan_of(), INTERLEAVED, 3) == place and find_host_place(plan_of(), UNEVEN, 3) is None
    told = uneven_hosts(plan_of(), UNEVEN)
    assert told is not None and '4 ranks along "data" are unevenly on hosts (3, 1)' in told
    for hosts in (EVEN, (0, 0, 0, 0), (0, 1, 2, 3)):
        assert uneven_hosts(plan_of(), hosts) is None
    assert uneven_hosts(plan_of(Codec()), UNEVEN) is None


def mesh_on(hosts: tuple[int, ...], plan: Plan) -> Mesh:
    world = replace(join_world("cpu"), hosts=hosts)
    return make_mesh(plan, world, sharing=kept_mesh(plan, world))


def given_by(rank: int, numel: int, step: int, bucket: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + bucket)
    return torch.randn(numel, dtype=torch.float64, generator=generator)


# The second rank of a host has no full row of "b", and nothing of the last bucket.
BUCKETS = [
    coded_tensors([("a", (30, 20), 600), ("b", (10, 41), 410)]),
    coded_tensors([("c", (40, 30), 1200)]),
    coded_tensors([("d", (3, 401), 1203)]),
]


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.parametrize("hosts", [EVEN, INTERLEAVED], ids=str)
@pytest.mark.parametrize("codec", [POWERSGD, Codec(name="topk"), Codec(name="onebit")], ids=lambda codec: codec.name)
def test_hosts_exchange_slices_of_their_sums(codec: Codec, hosts: tuple[int, ...]) -> None:
    mesh = mesh_on(hosts, plan_of(codec))
    inside, across = codec_groups(mesh)
    rank, by_host = mesh.world.rank, [[r for r in range(4) if hosts[r] == host] for host in range(2)]
    assert (inside.axis, inside.size, across.axis, across.size) == ("data in hosts", 2, "data between hosts", 2)
    sizes = [1010, 1200, 2600]  # the last bucket ends in a gap
    buckets = [CodedBucket(tensors=t, numel=n, dtype=torch.float64) for t, n in zip(BUCKETS, sizes, strict=True)]
    exchange = CompressedExchange(buckets, codec, inside=inside, across=across, device=inside.device, can_fail=True)
    play = {(b, s): _codecs(codec, BUCKETS[b], sizes[b], s) for b in range(3) for s in range(2)}
    for step in range(3):
        values = [given_by(rank, numel, step, number) for number, numel in enumerate(sizes)]
        exchange.begin(step)
        for number, flat in enumerate(values):
            exchange.start(number, flat)
        exchange.finish()
        exchange.end(is_made=True)
        for number, (flat, numel) in enumerate(zip(values, sizes, strict=True)):
            end = BUCKETS[number][-1].offset + BUCKETS[number][-1].numel
            assert torch.equal(flat[end:], given_by(rank, numel, step, number)[end:]), "a gap was changed"
            sums = [sum(given_by(r, numel, step, number) for r in ranks_here) for ranks_here in by_host]
            for place, slices in enumerate(zip(*(total.chunk(2) for total in sums), strict=True)):
                expected = [one.clone() for one in slices]
                exchange_in_process(play[number, place], expected, step=step)
                for one in slice_of(BUCKETS[number], place * numel // 2, (place + 1) * numel // 2):
                    part = flat.chunk(2)[place][one.offset : one.offset + one.numel]
                    assert torch.allclose(part, expected[0][one.offset : one.offset + one.numel], rtol=0, atol=1e-12)
    assert exchange.not_finite.item() == 0
    expected_bytes = _predicted(codec, sizes, inside.index)
    assert [mesh.traffic[group.axis].sent_bytes for group in (inside, across)] == [3 * one for one in expected_bytes]


def _codecs(codec: Codec, tensors: tuple[CodedTensor, ...], numel: int, place: int) -> list[CodecOfBucket]:
    """The codecs of both hosts for the slices of a place."""
    half = numel // 2
    return [
        make_codec(
            Bucket(
                codec=codec,
                tensors=slice_of(tensors, place * half, (place + 1) * half),
                numel=half,
                dtype=torch.float64,
                device=torch.device("cpu"),
                replica=host,
                num_replicas=2,
            )
        )
        for host in range(2)
    ]


def _predicted(codec: Codec, sizes: list[int], place: int) -> tuple[int, int]:
    """Bytes that a rank sends in one exchange inside its host, and between hosts."""
    between = 0
    for tensors, numel in zip(BUCKETS, sizes, strict=True):
        mine = slice_of(tensors, place * numel // 2, (place + 1) * numel // 2)
        forms = messages_of(codec, mine, "float64", num_replicas=2, step=0)
        between += sum(form.sent_bytes(2) for form in forms)
    return sum(2 * sent_bytes("all-gather", numel * 8, 2) for numel in sizes), between


PLANS = {
    "all-reduce": Plan(axes=Axes(data=4)),
    "masters": Plan(axes=Axes(data=4), precision=Precision(compute="bf16")),
    "replicate": Plan(axes=Axes(replicate=4), data=Data(shard="gradients")),
}


@contextmanager
def on_hosts(hosts: tuple[int, ...]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.world.number_hosts", lambda locations: hosts)
        yield


@pytest.mark.sampled(long=3)
@ranks(4)
@pytest.mark.parametrize("name", ["powersgd", pytest.param("dgc", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "hosts"), [("all-reduce", INTERLEAVED), pytest.param("replicate", EVEN, marks=pytest.mark.long)]
)
def test_training_on_several_hosts_obeys_the_rule_of_its_codec(name: str, kind: str, hosts: tuple[int, ...]) -> None:
    plan = replace(PLANS[kind], codec=Codec(name=name, dense_below=300, **SETTINGS[name]), comm=Comm(bucket_bytes=6000))
    batches = [token_batch(8, seed=seed) for seed in range(4)]
    with on_hosts(hosts):
        verify(small_gpt(), plan, loss="cross-entropy", optimizer=SGD, batches=batches).require()


@pytest.mark.long
@ranks(4)
def test_hosts_keep_nccls_rules() -> None:
    plan = replace(PLANS["all-reduce"], codec=replace(POWERSGD, dense_below=300), comm=Comm(bucket_bytes=6000))
    batches = [token_batch(8, seed=seed) for seed in range(3)]
    mode = StrictMode(one_stream=True)
    with on_hosts(EVEN):
        verify_over_strict(
            small_gpt(), plan, mode, loss="cross-entropy", optimizer=SGD, batches=batches, dtype=torch.float64
        ).require()


@ranks(4)
@pytest.mark.parametrize(
    "kind", ["all-reduce", *(pytest.param(k, marks=pytest.mark.long) for k in ("masters", "replicate"))]
)
def test_steps_on_several_hosts_send_what_is_predicted(kind: str) -> None:
    codec = Codec(name="powersgd", dense_below=300, rank=2)
    plan = replace(
        PLANS[kind], codec=codec, comm=Comm(bucket_bytes=6000), data=replace(PLANS[kind].data, check_every=0)
    )
    tokens = token_batch(8)
    with on_hosts(EVEN), make_trainer(small_gpt(), plan, example=tokens[0][:1]) as trainer:
        for _ in range(3):  # the order of buckets is agreed after the first
            before = {axis: one.sent_bytes for axis, one in trainer.mesh.traffic.items()}
            trainer.step(*cut_evenly(tokens, trainer.data_size)[trainer.data_rank])
        found = {axis: one.sent_bytes - before[axis] for axis, one in trainer.mesh.traffic.items()}
        predicted = sent_bytes_of_step(trainer.parts, step=2)
        axis = "replicate" if kind == "replicate" else "data"
        for name in (axis, f"{axis} in hosts", f"{axis} between hosts"):
            assert found[name] == predicted[name] > 0
        assert between_replicas(predicted, plan) == predicted[axis] + predicted[f"{axis} between hosts"]
    assert dense_bytes(1000, plan, num_steps=1, hosts=EVEN) == sent_bytes("all-reduce", 2000, 2)


def not_sent(trainer: Trainer) -> dict[str, Tensor]:
    """The sum over hosts of what was not sent of each tensor."""
    exchange, found = trainer.sync.compressed, {}
    assert exchange is not None
    kept, ranges = exchange.tensors(), exchange.ranges()
    for name in sorted(exchange.names):
        whole = torch.zeros(trainer.model.get_parameter(name).numel())
        if name in ranges:
            whole[slice(*ranges[name])] = kept[f"residual/{name}"]
        found[name] = sum(gathered(whole))
    return found


@ranks(4)
@pytest.mark.parametrize("hosts", [EVEN, pytest.param(INTERLEAVED, marks=pytest.mark.long)], ids=str)
def test_what_was_not_sent_goes_on_on_other_hosts(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    plan = replace(plan_of(Codec(name="topk", dense_below=300)), comm=Comm(bucket_bytes=6000))
    batches = [token_batch(8, seed=seed) for seed in range(3)]
    with on_hosts(EVEN), make_trainer(small_gpt(), plan, example=batches[0][0][:1]) as trainer:
        for batch in batches:
            trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
        trainer.save(tmp_path / "saved")
        expected = not_sent(trainer)
    for now in (hosts, (0, 0, 0, 0)):
        with on_hosts(now), make_trainer(small_gpt(), plan, example=batches[0][0][:1]) as trainer:
            trainer.load(tmp_path / "saved")
            for name, total in not_sent(trainer).items():
                torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-7)
                assert total.abs().max() > 0


@ranks(4)
def test_uneven_hosts_have_one_level_and_one_rank_says_so() -> None:
    mesh, told = mesh_on(UNEVEN, plan_of()), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.sync.make.log.warning", lambda text, *values: told.append(text % values))
        inside, across = codec_groups(mesh)
    assert (inside.size, across.size, across.axis) == (1, 4, "data")
    assert ["unevenly" in one for one in told] == [True] * (mesh.world.rank == 0)
