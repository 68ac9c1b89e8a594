"""The time that a rank computes: its passes without its waits, per sample, told to all ranks in the gradients' tail."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from oracle import MLP, batch_of, cut, data_plan, make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks
from torch import nn

from weft.comm.group import Traffic
from weft.comm.stream_waits import StreamWaits, WaitWindow
from weft.sync.compute_clock import ComputeClock


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_waits_are_not_computed_time() -> None:
    now, data, world = Now(), Traffic(), Traffic()
    data.add(wait_s=50.0)
    clock = ComputeClock({"data": data, "world": world}, torch.device("cpu"), now_s=now)
    assert clock.own_s == 0
    for _ in range(2):
        clock.begin()
        now.s += 10.0
        data.add(wait_s=4.0)
        world.add(wait_s=3.0)  # a save in the background
        clock.end(num_samples=12)
        assert clock.own_s == 0.5
        data.add(wait_s=1.0)  # after the passes
        now.s += 1.0
    assert data.wait_s == 60.0


def test_a_rank_without_samples_has_no_time() -> None:
    now = Now()
    clock = ComputeClock({}, torch.device("cpu"), now_s=now)
    clock.begin()
    now.s += 1
    clock.end(num_samples=0)
    assert clock.own_s == 0
    clock.end(num_samples=1)  # not begun
    assert clock.own_s == 0


class Event:
    """An event of a GPU that is over when told so."""

    now_ms, is_over = 0.0, True

    def __init__(self, **_: object) -> None:
        self.at_ms = 0.0

    def record(self, *_: object) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return Event.is_over

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_a_gpu_is_read_later_and_its_waits_belong_to_their_step() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        Event.now_ms, Event.is_over = 0.0, False
        traffic = Traffic()
        clock = ComputeClock({"data": traffic}, torch.device("cuda"))
        for compute_ms, wait_ms in ((6000.0, 4000.0), (8000.0, 1000.0)):
            clock.begin()
            Event.now_ms += compute_ms
            with traffic.time_stream_wait():
                Event.now_ms += wait_ms
            clock.end(num_samples=2)
            with traffic.time_stream_wait():  # for the gradients, after the passes
                Event.now_ms += 500.0
            assert clock.own_s == 0, "no step is over yet"
        Event.is_over = True
        clock.begin()
        clock.end(num_samples=2)
        assert clock.own_s == 4.0, "the second step's, of 8 s on 2 samples"
        assert traffic.wait_s == 6.0


def test_a_wait_counts_in_the_window_it_began_in() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        Event.now_ms, Event.is_over = 0.0, True
        waits, first, second = StreamWaits(), WaitWindow(), WaitWindow()
        for window, wait_ms in ((first, 1000.0), (second, 2000.0), (None, 4000.0)):
            with waits.measure(window):
                Event.now_ms += wait_ms
        assert waits.take_finished_s() == 7.0
        assert (first.wait_s, second.wait_s) == (1.0, 2.0)


class Frozen(nn.Module):
    """A model whose second block has nothing to train, so that its stage exchanges no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks[1].requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def told(trainer: object, own_s: float) -> list[float]:
    """What all ranks are told in a step in which this one has this time."""
    seen: list[list[float]] = []
    clock = trainer.rank_speeds.clock
    clock.end = lambda num_samples: setattr(clock, "own_s", own_s)
    with mock.patch.object(trainer.rank_speeds.balance, "add", side_effect=seen.append):
        if isinstance(trainer.named_model, MLP | Frozen):
            trainer.step(*cut(batch_of(8), [4, 4])[trainer.data_rank])
        else:
            trainer.step(*cut(token_batch(4), [1] * 4)[trainer.data_rank])
    trainer.flush()  # the next trainer uses the same groups, on which gathers may be under way
    return seen[0]


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "optimizer", "parameters"])
def test_all_ranks_are_told_in_the_tail(shard: str) -> None:
    trainer = make_trainer(MLP(), data_plan(2, shard=shard))
    assert told(trainer, 0.5 + trainer.mesh.world.rank) == [0.5, 1.5]


@ranks(4)
def test_times_of_hybrid_shards_are_in_the_order_of_ranks() -> None:
    trainer = make_trainer(small_gpt(), data_plan(2, replicate=2, shard="optimizer"))
    assert told(trainer, 1.0 + trainer.mesh.world.rank) == [1.0, 2.0, 3.0, 4.0]
    assert trainer.balance.data_ranks == [0, 1, 2, 3]


@ranks(4)
def test_a_stage_without_gradients_is_told_too() -> None:
    trainer = make_trainer(Frozen(), pipeline_plan(2, data=2, cuts=(1,)), example=torch.zeros(4, 4).double())
    stage, data = trainer.mesh.index("pipeline"), trainer.mesh.index("data")
    assert told(trainer, 1.0 + 10 * stage + data) == [1.0 + 10 * stage, 2.0 + 10 * stage]
