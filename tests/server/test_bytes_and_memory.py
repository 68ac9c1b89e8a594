"""What passes between workers and servers, to the byte, and what a server keeps, as predicted."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import SGD, small_gpt, token_batch
from ranks import ranks
from served_in_threads import servers_in_threads
from served_training import server_plan
from served_workers import Play, PlayedWorker, make_settings, optimizer_spec

import weft
from weft.errors import PlanError
from weft.plan.partition.flat_buffers import ParameterSpec
from weft.plan.partition.served_wire import BEGIN_BYTES, COMMIT_BYTES, HEADER_BYTES, served_step_bytes
from weft.plan.partition.server_shards import ServedTensor
from weft.plan.plan import Plan
from weft.planning.server_memory import predict_server_memory, served_tensors_of
from weft.server.protocol import message, shared_places
from weft.sync.served import SERVERS, ServedSync


def test_what_is_predicted_of_a_message_is_what_is_packed() -> None:
    assert HEADER_BYTES == message.HEADER_BYTES
    sizes = [one.size for one in (message._COMMIT, message._BEGIN) if isinstance(one, struct.Struct)]
    assert [COMMIT_BYTES, BEGIN_BYTES] == sizes


def test_two_ranks_that_hold_some_tensors_both() -> None:
    """By hand: in float32 a tied embedding of 10 × 4 on both ranks, a layer of 30 on each."""
    tensors = [
        ServedTensor(name="tied", numel=40, item_bytes=4, holders=(0, 1)),
        ServedTensor(name="first", numel=30, item_bytes=4, holders=(0,)),
        ServedTensor(name="last", numel=30, item_bytes=4, holders=(1,)),
    ]
    ends = HEADER_BYTES + COMMIT_BYTES, HEADER_BYTES + BEGIN_BYTES
    for place, sent in ((0, 2 * HEADER_BYTES + 160 + 120), (1, HEADER_BYTES + 120)):
        (found,) = served_step_bytes(tensors, num_servers=1, bucket_bytes=10_000, place=place)
        assert found.sent == ends[0] + sent
        assert found.received == ends[1] + 2 * HEADER_BYTES + 160 + 120
    (halved,) = served_step_bytes(tensors, num_servers=1, bucket_bytes=10_000, pull_item_bytes=2, unused=["tied"])
    assert halved.sent == ends[0] + HEADER_BYTES + 120 and halved.received == ends[1] + 2 * HEADER_BYTES + 140


def specs_of(model: torch.nn.Module) -> list[ParameterSpec]:
    return [
        ParameterSpec(name=name, shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))
        for name, one in model.named_parameters()
    ]


@ranks(2)
@pytest.mark.parametrize(
    ("plan", "transport"),
    [
        (server_plan(2, shards=2, bucket_bytes=1000), "auto"),
        (server_plan(2, shards=3, bucket_bytes=100_000, microbatches=2, clip_norm=0.1), "c10d"),
        (server_plan(2, shards=1, mode="async", bucket_bytes=1000), "auto"),
    ],
)
def test_bytes_of_a_step_are_those_predicted(plan: Plan, transport: str) -> None:
    """Whether they pass through sockets or shared memory."""
    plan = replace(plan, comm=replace(plan.comm, transport=transport))
    model = small_gpt().double()
    tensors = served_tensors_of(plan, specs_of(model))
    predicted = served_step_bytes(tensors, num_servers=plan.server.shards, bucket_bytes=plan.comm.bucket_bytes)
    least = mock.patch.object(shared_places, "LEAST_BYTES", 0)
    with least, servers_in_threads():
        trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=SGD, device="cpu")
    with least, trainer:
        sync = trainer.sync
        assert isinstance(sync, ServedSync)
        sync.take_part()
        for seed in range(3):
            before, sent_before = sync.exchanged_bytes, trainer.mesh.traffic[SERVERS].sent_bytes
            trainer.step(*token_batch(4, seed=seed))
            passed = [
                (sent - sent_then, received - received_then)
                for (sent, received), (sent_then, received_then) in zip(sync.exchanged_bytes, before, strict=True)
            ]
            assert passed == [(one.sent, one.received) for one in predicted]
            sent = trainer.mesh.traffic[SERVERS].sent_bytes - sent_before
            assert sent == sum(one.sent for one in predicted)
        assert sync._client is not None
        assert all(bool(one) == (transport == "auto") for one in sync._client.rank.shares.read_bytes)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        (optimizer_spec("torch.optim.adamw.AdamW", lr=0.1), 8.0),
        (optimizer_spec(lr=0.1, momentum=0.9), 4.0),
        (optimizer_spec(lr=0.1), 0.0),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_server_holds_what_is_predicted(shards: int, optimizer: dict[str, Any], moments: float) -> None:
    """When gradients of all workers but the last have come."""
    settings = make_settings(num_workers=3, num_servers=shards, optimizer=optimizer)
    made = Play(settings, [PlayedWorker(number, settings) for number in range(3)])
    for one in made.workers.values():
        made.hello(one)
    made.run(2)
    made.steps_at_most = 3
    while found := [one for one in made.open() if one[1][0] != 2 or one[0] == "across"]:
        made.deliver(*found[0])
    shapes = {one.name: (one.numel,) for one in settings.tensors}
    parameters = [ParameterSpec(name=name, shape=shape, dtype="float64") for name, shape in shapes.items()]
    plan = server_plan(3, shards=shards, bucket_bytes=settings.bucket_bytes)
    predicted = predict_server_memory(plan, parameters, optimizer_bytes_per_parameter=moments)
    assert len(predicted) == shards
    for server, one in zip(made.servers, predicted, strict=True):
        assert server.store is not None
        weights = sum(value.untyped_storage().nbytes() for value in server.store.parameters)
        states = [state for held in server.store.optimizer.state.values() for state in held.values()]
        moved = [state for state in states if isinstance(state, torch.Tensor) and state.dim()]
        assert weights == one.weights and one.copies == 0
        assert sum(state.untyped_storage().nbytes() for state in moved) == one.optimizer
        waiting = [
            len(frame)
            for arrivals in server.arrivals.values()
            for arrival in arrivals._clocks.values()
            for frames in arrival.buckets.values()
            for frame in frames
        ]
        assert sum(waiting) == one.gradients * 2 // 3
        assert one.update >= one.weights


def test_copies_are_counted_where_updates_are_compensated() -> None:
    parameters = [ParameterSpec(name="weight", shape=(1000,))]
    (plain,) = predict_server_memory(server_plan(4, mode="async"), parameters)
    (compensated,) = predict_server_memory(server_plan(4, mode="async", compensation=0.1), parameters)
    assert (plain.copies, compensated.copies) == (4000, 16000)
    assert plain.gradients == 16000 and plain.optimizer == 8000


def test_there_are_no_servers() -> None:
    with pytest.raises(PlanError, match=r"has no servers; set \[data\] sync"):
        predict_server_memory(Plan(), [])
