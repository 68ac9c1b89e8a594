"""Weights that arrive while the next forward pass has begun: it needs the first layers only, and every use of any other
parameter, by any code, waits for it."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from held_weights import HeldWeights, holding_weights, trickling_weights
from listed_weights import ListedWeights
from oracle import MLP, SGD, batch_of, cut, cut_evenly, make_trainer, small_gpt, token_batch, train_alone
from ranks import ranks
from served_in_threads import servers_in_threads
from served_training import leave_group, served, server_plan
from served_workers import make_settings
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from weft.errors import LaunchError
from weft.plan.plan import Axes, Codec, Plan, Precision, Recompute
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Begin, Kind, Message, pack_begin
from weft.server.protocol.worker_rank import WorkerRank
from weft.sync.served import ServedSync
from weft.sync.served_clock import ServedClock
from weft.training.trainer import Trainer

FIRST_LAYER = 2
"""Buckets with `MLP.first`, of one server with 200 bytes each."""
BEGIN = Begin(index=0, num_workers=1, ticket=0, loss_sum=1.0, count=1.0, age=0)
BATCHES = [batch_of(4, seed) for seed in range(4)]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-10, atol=1e-12)


def let_go_after(layer: nn.Module, held: HeldWeights, seen: list[bool]) -> None:
    """Note for each pass of a layer whether later weights were still to come; they come after it."""

    def note(*_: object) -> None:
        seen.append(held.is_holding)
        held.let_go()

    layer.register_forward_hook(note)


@pytest.mark.parametrize(
    ("plan", "seen_per_step"),
    [
        (server_plan(1), 1),
        (server_plan(1, clip_norm=0.05), 1),
        (server_plan(1, microbatches=2), 2),
        (server_plan(1, mode="async"), 1),
        (replace(server_plan(1), codec=Codec(name="topk", density=1.0, dense_below=1)), 1),
    ],
)
def test_the_first_layer_computes_before_others_are_here(plan: Plan, seen_per_step: int) -> None:
    """All others are sent when it has done so: a step that waited for them would never end."""
    model = MLP()
    expected = train_alone(copy.deepcopy(model), BATCHES, clip_norm=plan.step.clip_norm)
    seen: list[bool] = []
    with holding_weights(FIRST_LAYER) as held:
        with served(model, plan) as trainer:
            let_go_after(model.first, held, seen)
            losses = [float(trainer.step(*batch)) for batch in BATCHES]
            held.let_all_go()
            assert_equal(weights_of(model), expected[-1].weights)
    assert losses == pytest.approx([one.loss for one in expected], rel=1e-10)
    of_step = [seen[start : start + seen_per_step] for start in range(0, len(seen), seen_per_step)]
    late = [False] * (seen_per_step - 1)
    assert of_step == [[False, *late], *[[True, *late]] * 3]


def test_weights_in_a_list_are_there_before_the_model_is_called() -> None:
    """Functions of the user's own take a parameter as it is: torch does not ask its class."""
    model = ListedWeights()
    expected = train_alone(copy.deepcopy(model), BATCHES)
    with trickling_weights(), served(model, server_plan(1)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in BATCHES]
        assert_equal(weights_of(model), expected[-1].weights)
    assert losses == pytest.approx([one.loss for one in expected], rel=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision=Precision(compute="bf16")),
        dict(recompute=Recompute(policy="full")),
        dict(precision=Precision(compute="bf16"), recompute=Recompute(policy="full")),
    ],
)
def test_blocks_of_a_language_model_wait_for_their_own_weights(changes: dict[str, Any]) -> None:
    """The head is the embedding; copies in 16 bits are made as masters come."""
    torch.manual_seed(0)
    model = small_gpt()
    unserved = make_trainer(copy.deepcopy(model), Plan(**changes))
    batches = [token_batch(4, seed=seed) for seed in range(3)]
    expected = [float(unserved.step(*batch)) for batch in batches]
    plan = replace(server_plan(1, bucket_bytes=512), **changes)
    seen: list[bool] = []
    with holding_weights(num_buckets_before(model, "blocks.1", 512)) as held:
        with served(model, plan) as trainer:
            let_go_after(model.get_submodule("blocks.0"), held, seen)
            losses = [float(trainer.step(*batch)) for batch in batches]
            held.let_all_go()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [one for one in seen if one] == [True, True] and not seen[0]


def num_buckets_before(model: nn.Module, block: str, bucket_bytes: int) -> int:
    """Messages that hold all weights before a block, of one server."""
    found = 0
    for name, one in model.named_parameters():
        if name.startswith(block):
            break
        found += -(-one.nbytes // bucket_bytes)
    return found


def saved_and_loaded(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found: dict[str, Tensor] = torch.load(file)
    return found


def in_another_thread(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    threads = [threading.Thread(target=lambda: found.update(weights_of(model))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def as_one_vector(model: nn.Module) -> dict[str, Tensor]:
    vector = nn.utils.parameters_to_vector(model.parameters())
    parts = vector.split([one.numel() for one in model.parameters()])
    named = zip(model.named_parameters(), parts, strict=True)
    return {name: part.view(one.shape).detach() for (name, one), part in named}


@pytest.mark.parametrize(
    "read",
    [
        weights_of,
        in_another_thread,
        as_one_vector,
        saved_and_loaded,
        lambda model: {name: one.data.clone() for name, one in model.named_parameters()},
        lambda model: {name: torch.from_numpy(one.detach().numpy().copy()) for name, one in model.named_parameters()},
        lambda model: {name: one.clone() for name, one in model.state_dict().items()},
        lambda model: weights_of(copy.deepcopy(model)),
        lambda model: {name: torch.tensor(one.tolist(), dtype=one.dtype) for name, one in model.named_parameters()},
    ],
)
def test_reading_weights_between_steps_gives_new_values(read: Callable[[nn.Module], dict[str, Tensor]]) -> None:
    model = MLP()
    expected = train_alone(copy.deepcopy(model), BATCHES)
    with holding_weights(FIRST_LAYER, goes_when_waited=True) as held, served(model, server_plan(1)) as trainer:
        for batch, one in zip(BATCHES, expected, strict=True):
            trainer.step(*batch)
            assert held.is_holding
            assert_equal(read(model), one.weights)
            assert all(type(one) is nn.Parameter for one in model.parameters())


def test_memory_that_is_kept_has_new_values_when_a_step_ends() -> None:
    """It can be read without a use of the parameter; the other layers still come while the next step has begun."""
    model = MLP()
    expected = train_alone(copy.deepcopy(model), BATCHES)
    with holding_weights(FIRST_LAYER, goes_when_waited=True) as held, served(model, server_plan(1)) as trainer:
        trainer.step(*BATCHES[0])
        assert type(model.last.weight) is not nn.Parameter
        kept = model.last.weight.detach()
        for batch, one in zip(BATCHES[1:], expected[1:], strict=True):
            trainer.step(*batch)
            assert not held.is_holding and type(model.last.weight) is nn.Parameter
            assert type(model.second.weight) is not nn.Parameter
            torch.testing.assert_close(kept, one.weights["last.weight"], rtol=1e-10, atol=1e-12)


def evaluate(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    trainer.evaluate([BATCHES[0]])
    return weights_of(trainer.named_model)


def save(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    trainer.save(folder / "checkpoint")
    other = MLP()
    make_trainer(other, Plan()).load(folder / "checkpoint")
    return weights_of(other)


def close(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    trainer.close()
    return weights_of(trainer.named_model)


@pytest.mark.parametrize("use", [evaluate, save, close])
def test_what_a_trainer_does_beside_steps(use: Callable[[Trainer, Path], dict[str, Tensor]], tmp_path: Path) -> None:
    model = MLP()
    expected = train_alone(copy.deepcopy(model), BATCHES)
    with holding_weights(FIRST_LAYER, goes_when_waited=True), served(model, server_plan(1)) as trainer:
        for batch in BATCHES:
            trainer.step(*batch)
        assert type(model.last.weight) is not nn.Parameter
        assert_equal(use(trainer, tmp_path), expected[-1].weights)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.long
@pytest.mark.parametrize("compiled", [functools.partial(torch.compile, backend="eager"), compiled_in_place])
def test_a_model_that_is_compiled_as_a_whole(compiled: Callable[[nn.Module], nn.Module]) -> None:
    """With the hooks inside, it needs all weights before it begins."""
    model = MLP()
    expected = train_alone(copy.deepcopy(model), BATCHES)
    with holding_weights(FIRST_LAYER, goes_when_waited=True), served(compiled(model), server_plan(1)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in BATCHES]
    assert losses == pytest.approx([one.loss for one in expected], rel=1e-10)
    assert_equal(weights_of(model), expected[-1].weights)


def test_a_graph_of_earlier_weights_is_refused() -> None:
    model = MLP()
    with servers_in_threads(), served(model, server_plan(1)) as trainer:
        trainer.step(*BATCHES[0])
        loss = model(BATCHES[1][0]).sum()
        trainer.step(*BATCHES[1])
        trainer.sync.settle()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_that_do_not_come() -> None:
    """Whoever uses a parameter learns why, and nobody reads what is in its place."""
    model = MLP()
    with holding_weights(FIRST_LAYER):
        with pytest.raises(LaunchError, match="waited too long for the weights after its step 2"):
            with served(model, server_plan(1)) as trainer:
                assert isinstance(trainer.sync, ServedSync)
                trainer.sync.take_part()
                trainer.sync._clock._timeout_s = 0.5  # type: ignore[union-attr]
                trainer.step(*BATCHES[0])
                for _ in range(2):
                    with pytest.raises(LaunchError, match="a server that has begun to send them"):
                        model.last.weight.sum()
                trainer.step(*BATCHES[1])
    assert type(model.last.weight) is not nn.Parameter


def test_an_error_between_two_steps() -> None:
    """It ends the worker, which waits for nothing any more."""
    model = MLP()
    with holding_weights(FIRST_LAYER):
        with pytest.raises(KeyError, match="the user's"), served(model, server_plan(1)) as trainer:
            trainer.step(*BATCHES[0])
            raise KeyError("the user's")
        with pytest.raises(LaunchError, match="has left its run before all weights came"):
            model.last.weight.sum()


def test_optimizers_and_gradients_are_not_waited_for() -> None:
    """What a loop does between two steps without looking at weights."""
    model = MLP()
    with holding_weights(FIRST_LAYER) as held, served(model, server_plan(1), optimizer=SGD) as trainer:
        trainer.step(*BATCHES[0])
        trainer.optimizer.zero_grad(set_to_none=True)
        for parameter in model.parameters():
            assert parameter.grad is None and parameter.requires_grad and parameter.dtype == torch.float64
        assert held.is_holding
        held.let_all_go()


@ranks(2)
@pytest.mark.sampled(3, long=12)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("pull", ["master", "bf16"])
@pytest.mark.parametrize("codec", [Codec(), Codec(name="topk", density=0.3, dense_below=1)])
@pytest.mark.parametrize(
    "changes", [dict(), dict(microbatches=2, clip_norm=0.05), dict(mode="bounded"), dict(microbatches=2)]
)
def test_workers_whose_weights_come_bucket_by_bucket(
    shards: int, pull: str, codec: Codec, changes: dict[str, Any]
) -> None:
    """They compute what workers compute that have all of them before they begin, to the bit; one has no samples."""
    plan = replace(server_plan(2, shards=shards, pull=pull, **changes), codec=codec)
    first = MLP()
    steps = [cut(batch_of(6, seed), sizes) for seed, sizes in enumerate([[4, 2], [6, 0], [1, 5], [3, 3]])]
    found = []
    for sending in (servers_in_threads, trickling_weights):
        model = copy.deepcopy(first)
        with sending(), served(model, plan) as trainer:
            if sending is servers_in_threads:
                wait_for_all_after_each_step(trainer)
            steps = [
                cut(batch_of(sum(sizes), seed), sizes) for seed, sizes in enumerate([[4, 2], [6, 0], [1, 5], [3, 3]])
            ]
            losses = [float(trainer.step(*parts[trainer.data_rank])) for parts in steps]
        found.append((losses, weights_of(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, found[1][1][name]) for name, one in found[0][1].items())
    if pull == "master" and codec == Codec():
        whole = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]
        expected = train_alone(first, whole, clip_norm=plan.step.clip_norm)
        assert found[1][0] == pytest.approx([one.loss for one in expected], rel=1e-10)
        assert_equal(found[1][1], expected[-1].weights)


def wait_for_all_after_each_step(trainer: Trainer) -> None:
    end_step = trainer.sync.end_step

    def settled(loss: Tensor) -> Tensor:
        trainer.sync.settle()
        return end_step(loss)

    trainer.sync.end_step = settled  # type: ignore[method-assign]


@ranks(4, fresh=True)
@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        (dict(pipeline=2), dict(recompute=Recompute(policy="full"))),
        pytest.param(dict(tensor=2), dict(), marks=pytest.mark.long),
        pytest.param(dict(ring=2), dict(), marks=pytest.mark.long),
        pytest.param(dict(ulysses=2), dict(), marks=pytest.mark.long),
        pytest.param(dict(pipeline=2), dict(), marks=pytest.mark.long),
        pytest.param(dict(tensor=2), dict(recompute=Recompute(policy="full")), marks=pytest.mark.long),
    ],
)
def test_each_rank_of_a_worker_waits_for_its_own_layers(axes: dict[str, int], changes: dict[str, Any]) -> None:
    leave_group()
    torch.manual_seed(0)
    model = small_gpt().double()
    whole = copy.deepcopy(model)
    plan = server_plan(2, bucket_bytes=2048, shards=2, microbatches=2)
    plan = replace(plan, axes=Axes(data=2, **axes), **changes)
    steps = [cut_evenly(token_batch(8, seed=step), 2) for step in range(3)]
    with trickling_weights(), served(model, plan, example=token_batch(2)[0]) as trainer:
        losses = [float(trainer.step(*parts[trainer.data_rank])) for parts in steps]
        held_out = trainer.evaluate([token_batch(4, seed=9)])
    batches = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]
    assert losses == pytest.approx([seen.loss for seen in train_alone(whole, batches)], rel=1e-10)
    inputs, targets = token_batch(4, seed=9)
    loss = nn.functional.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
    assert held_out == pytest.approx(loss.item(), rel=1e-9)


def say_hello_anew(patch: pytest.MonkeyPatch, *, clock: int, bucket: int) -> None:
    """Let this worker lose its connections in the middle of a clock's weights, once."""
    receive, lost = WorkerRank.receive, []

    def receive_and_lose(self: WorkerRank, message: Message) -> list[Message]:
        answers = receive(self, message)
        if (message.kind, message.clock, message.bucket) == (Kind.WEIGHTS, clock, bucket) and not lost:
            lost.append(True)
            return [*answers, *self.hello_anew()]
        return answers

    patch.setattr(WorkerRank, "receive", receive_and_lose)


@pytest.mark.parametrize("codec", [Codec(), Codec(name="topk", density=1.0, dense_below=1)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_connection_is_lost_while_weights_arrive(
    mode: str, codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A synchronous server sends the same again. Others may have made updates by then, so the gradient is dropped."""
    model = MLP()
    batches = [batch_of(4, seed) for seed in range(6)]
    used = batches if mode == "sync" else batches[:2] + batches[3:]
    expected = train_alone(copy.deepcopy(model), used)
    say_hello_anew(monkeypatch, clock=2, bucket=1)
    plan = replace(server_plan(1, mode=mode), codec=codec)
    with servers_in_threads(), served(model, plan) as trainer:
        for batch in batches:
            trainer.step(*batch)
        assert trainer.steps_done == 6
        assert_equal(weights_of(model), expected[-1].weights)
    told = "lost a connection while weights were arriving, and goes on without the gradient of step 3"
    assert (told in caplog.text) == (mode == "async")


@ranks(2)
def test_a_worker_that_was_given_up_while_its_weights_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have made the update without it; it goes on with them, and its gradient is in none."""
    rank, store = dist.get_rank(), _get_default_store()
    model = MLP()
    alone = copy.deepcopy(model)
    steps = [cut_evenly(batch_of(4, seed), 2) for seed in range(5)]
    num_forward = []

    def wait_until_it_is_back(*_: object) -> None:
        num_forward.append(1)
        if len(num_forward) == 3:
            store.wait(["back"])

    if rank == 1:
        say_hello_anew(monkeypatch, clock=2, bucket=1)
        welcome = WorkerRank._welcome

        def say_it_is_back(self: WorkerRank, message: Message) -> list[Message]:
            if self.clock == 2:
                store.set("back", "")
            return welcome(self, message)

        monkeypatch.setattr(WorkerRank, "_welcome", say_it_is_back)
    else:
        model.first.register_forward_hook(wait_until_it_is_back)
    with servers_in_threads(), served(model, server_plan(2)) as trainer:
        losses = [float(trainer.step(*parts[rank])) for parts in steps]
        assert trainer.steps_done == 5
    whole = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]
    expected = train_alone(alone, [*whole[:2], steps[2][0], *whole[3:]])
    assert losses == pytest.approx([one.loss for one in expected], rel=1e-10)
    assert_equal(weights_of(model), expected[-1].weights)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_among_others_that_loses_its_connection_ends_the_worker(mode: str) -> None:
    """Others of its worker may have all weights. Where the same weights come again, nothing is lost."""
    settings = make_settings(num_workers=1, num_ranks=2, mode=mode)
    weights = [torch.zeros(one.numel, dtype=torch.float64) for one in settings.tensors]
    views: list[list[Tensor | None]] = [[weights[one.tensor] for one in ServerLayout.of(settings, 0).parts]]
    rank = WorkerRank(settings, views, worker=0, start=1)
    client, arriving = mock.Mock(rank=rank), mock.Mock()

    def begin() -> None:
        begins = rank._message(Kind.BEGIN, 0, clock=3, frames=(pack_begin(BEGIN),))
        rank.receive(replace(begins, session=rank.session))

    begin()
    client.use_weights = lambda timeout_s: rank.use()
    clock = ServedClock(client, arriving, timeout_s=1.0)
    rank.hello_anew()
    begin()
    if mode == "sync":
        assert not clock.is_torn()
    else:
        with pytest.raises(LaunchError, match="rank 0 of worker 0 lost a connection while weights were arriving"):
            clock.is_torn()
