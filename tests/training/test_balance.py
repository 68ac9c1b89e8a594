"""`[data] balance`: microbatches by speed give the same answer as one process; shares follow speeds, and come back.

Times are given by the tests, never measured.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import verify
from oracle import (
    ADAMW,
    MLP,
    batch_of,
    data_plan,
    image_batch,
    make_trainer,
    pipeline_plan,
    small_convnet,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks
from torch import nn

from weft.plan.check import check
from weft.plan.plan import Axes, Data, Pipeline, Plan, Step
from weft.sync.compute_clock import ComputeClock
from weft.training.data import balance as balance_file
from weft.training.data.balance import Balance
from weft.training.data.batches import batches
from weft.training.data.trees import split_tree
from weft.training.run.job import Job, Part, Steps
from weft.training.run.loop import train
from weft.training.stragglers import Straggler
from weft.training.trainer import Trainer

LONG = pytest.mark.long
Speeds = Callable[[int], Sequence[float]]


def balanced(plan: Plan) -> Plan:
    return dataclasses.replace(plan, data=dataclasses.replace(plan.data, balance=True))


@contextmanager
def times(seconds_of: Speeds, *, at_once: bool = False) -> Iterator[list[tuple[int, ...]]]:
    """Context in which global ranks take so many seconds per sample in each step (counted from 0); yields the shares of
    every step. `at_once`: shares are decided after every step, of one time."""
    seen: list[tuple[int, ...]] = []

    def end(self: ComputeClock, num_samples: int) -> None:
        self.num_samples = num_samples
        self.own_s = float(seconds_of(len(seen))[dist.get_rank()]) if num_samples else 0.0

    end_step = Balance.end_step

    def note(self: Balance, steps_done: int) -> None:
        seen.append(self.shares)
        end_step(self, steps_done)

    soon = {name: 1 if at_once else getattr(balance_file, name) for name in ("DECIDE_EVERY", "FEWEST_STEPS")}
    with (
        mock.patch.object(ComputeClock, "end", end),
        mock.patch.object(Balance, "end_step", note),
        mock.patch.multiple(balance_file, **soon),
    ):
        yield seen


def verify_uneven(model: nn.Module, plan: Plan, batch: Callable[..., Any], slow: Sequence[float], shares: Any) -> None:
    """A balanced plan against one process, while shares go from even ones to these."""
    sizes = (16, 16, 16, 13, 16)
    steps = [batch(size, seed=seed) for seed, size in enumerate(sizes)]
    with times(lambda step: slow, at_once=True) as seen:
        verify(model, balanced(plan), loss="cross-entropy", optimizer=ADAMW, batches=steps, device="cpu").require()
    even = (plan.step.microbatches,) * plan.axes.data_ranks
    assert seen == [even, even, *[shares] * 3]


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "optimizer", pytest.param("gradients", marks=LONG), "parameters"])
def test_uneven_shares_equal_one_process(shard: str) -> None:
    plan = data_plan(2, microbatches=4, shard=shard, clip_norm=0.5)
    verify_uneven(small_gpt(), plan, token_batch, [1, 3], (6, 2))


@pytest.mark.long
@ranks(2)
def test_parameters_that_are_gathered_for_each_microbatch() -> None:
    plan = data_plan(2, microbatches=4, shard="parameters", reshard="microbatch")
    verify_uneven(small_gpt(), plan, token_batch, [3, 1], (2, 6))


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", pytest.param("parameters", marks=LONG)])
def test_batch_statistics_are_of_the_ranks_that_have_a_microbatch(shard: str) -> None:
    verify_uneven(small_convnet(), data_plan(2, microbatches=4, shard=shard), image_batch, [1, 3], (6, 2))


@ranks(4)
@pytest.mark.parametrize("slow", [[1, 1, 1, 3], pytest.param([1, 1, 3, 1], marks=LONG)])
def test_tensor_ranks_follow_the_slowest_of_them(slow: list[float]) -> None:
    plan = tensor_plan(2, data=2, microbatches=4)
    verify_uneven(small_gpt(), plan, token_batch, slow, (6, 2))


@pytest.mark.long
@pytest.mark.sampled(1, long=3)
@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "chunks", "shard"),
    [
        ("1f1b", 1, "nothing"),
        ("interleaved", 2, "parameters"),
        pytest.param("1f1b", 1, "parameters", marks=LONG),
        pytest.param("interleaved", 2, "nothing", marks=LONG),
        pytest.param("zero-bubble", 1, "optimizer", marks=LONG),
        pytest.param("gpipe", 1, "gradients", marks=LONG),
    ],
)
def test_pipelines_are_balanced_as_a_whole(schedule: str, chunks: int, shard: str) -> None:
    plan = pipeline_plan(2, data=2, microbatches=4, schedule=schedule, chunks=chunks, shard=shard)
    # Ranks 0 and 2 are the stages of one pipeline, ranks 1 and 3 of the other; the last ones are slow.
    verify_uneven(small_gpt(num_layers=4), plan, token_batch, [1, 1, 2, 3], (5, 3))


@ranks(2)
def test_dropout_does_not_depend_on_shares() -> None:
    def losses(slow: Sequence[float]) -> list[float]:
        torch.manual_seed(5)
        trainer = make_trainer(small_gpt(dropout=0.3), balanced(data_plan(2, microbatches=4)))
        with times(lambda step: slow, at_once=True):
            return [step_on_part(trainer, token_batch(16, seed=seed)) for seed in range(5)]

    assert losses([1, 3]) == pytest.approx(losses([1, 1]), rel=1e-5)


def step_on_part(trainer: Trainer, batch: Any) -> float:
    part = split_tree(batch, *trainer.batch_range(len(batch[0])))
    return float(trainer.step(*part))


@ranks(4)
def test_a_slow_rank_gets_less_and_its_share_back_within_10_steps() -> None:
    slow_from, slow_to = 7, 23

    def seconds_of(step: int) -> Sequence[float]:
        return [1.0, 1.0, 3.0 if slow_from <= step < slow_to else 1.0, 1.0]

    trainer = make_trainer(MLP(), balanced(data_plan(4, microbatches=4)))
    with times(seconds_of) as seen:
        for number in range(40):
            step_on_part(trainer, batch_of(32, seed=number))
    even, uneven = (4, 4, 4, 4), (5, 5, 1, 5)
    assert set(seen) == {even, uneven}
    first = seen.index(uneven)
    back = seen.index(even, first)
    assert slow_from < first <= slow_from + 7 and slow_to < back <= slow_to + 7
    assert seen[back:] == [even] * (40 - back), "and keeps it"


@ranks(2)
def test_batches_are_cut_by_the_shares_of_their_step() -> None:
    dataset = [(torch.full((4,), float(index)).double(), index % 3) for index in range(64)]
    trainer = make_trainer(MLP(), balanced(data_plan(2, microbatches=4)))
    given: list[list[int]] = []
    with times(lambda step: [1, 3] if step < 2 else [3, 1], at_once=True) as seen:
        for inputs, targets in batches(dataset, trainer, global_batch=8):
            start, stop = trainer.batch_range(8)
            assert len(inputs) == stop - start, "the batch was fetched a step early, for this very step"
            given.append(inputs[:, 0].int().tolist())
            trainer.step(inputs, targets)
    # After two steps of either kind their medians are equal.
    assert seen == [(4, 4)] * 2 + [(6, 2)] * 3 + [(4, 4)] + [(2, 6)] * 2
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, given)
    joined = [first + second for first, second in zip(*everyone, strict=True)]
    assert joined == [list(range(8 * step, 8 * step + 8)) for step in range(8)], "every sample once, in order"
    held_out = [len(inputs) for inputs, _ in batches(dataset, trainer, global_batch=8).from_start()]
    assert held_out == [4] * 8, "evaluation does not depend on shares"


@ranks(2)
def test_a_resume_goes_on_with_the_shares_as_they_were(tmp_path: Path) -> None:
    def new(plan: Plan) -> Trainer:
        torch.manual_seed(0)
        return make_trainer(MLP(), plan)

    def train(trainer: Trainer, first: int, last: int) -> list[float]:
        return [step_on_part(trainer, batch_of(16, seed=number)) for number in range(first, last)]

    plan = balanced(data_plan(2, microbatches=4))
    with times(lambda step: [1, 3]) as seen:
        trainer = new(plan)
        train(trainer, 0, 3)
        assert (trainer.shares, trainer.balance.next_shares) == ((4, 4), (6, 2)), "decided, and not yet in force"
        trainer.save(tmp_path / "saved")
        unbroken = train(trainer, 3, 8)
        shares = seen[3:8]
        weights = [parameter.clone() for parameter in trainer.model.parameters()]
    with times(lambda step: [1, 3]) as seen:
        trainer = new(plan)
        trainer.load(tmp_path / "saved")
        assert train(trainer, 3, 8) == unbroken
        assert seen == shares == [(4, 4), *[(6, 2)] * 4]
        assert all(map(torch.equal, trainer.model.parameters(), weights))
    other = new(data_plan(2, microbatches=4))
    other.load(tmp_path / "saved")
    assert other.shares == (4, 4), "another plan does not balance"


@contextmanager
def warnings_of_weft() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("weft").removeHandler(handler)


@ranks(2)
@pytest.mark.parametrize("every", [0, 4])
def test_the_first_rank_warns_of_a_slow_one(every: int) -> None:
    """Also of a slow replica, which tells its time when it exchanges."""
    plan, since, recovered_at = data_plan(2), 3, 33
    if every:
        plan, since, recovered_at = Plan(axes=Axes(data=2), data=Data(sync="local", every=every)), 1, 32
    trainer = make_trainer(MLP(), plan)
    with warnings_of_weft() as lines, times(lambda step: [1, 2 if step < (28 if every else 30) else 1]):
        for number in range(36):
            step_on_part(trainer, batch_of(4, seed=number))
    if dist.get_rank() == 0:
        slow, recovered = lines
        assert slow.startswith("rank 1 takes 2.0 times as long as the median rank") and f"since step {since};" in slow
        assert recovered.startswith(f"rank 1 has recovered at step {recovered_at}")
    else:
        assert lines == []
    worst = trainer.rank_speeds.worst_straggler()
    assert worst is not None and (worst.rank, worst.since_step) == (1, since)
    # 1 s per sample more, on 2 samples, in 28 steps: of the first ones without an exchange two are not known to be slow
    assert worst.cost_s == 2.0 * 28


class Rows:
    """A dataset for `MLP`."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch_of(1, seed=index)
        return inputs[0], targets[0]


def test_what_is_said_of_a_straggler() -> None:
    straggler = Straggler(rank=3, factor=2.94, since_step=120, num_steps=800, cost_s=60.0)
    assert straggler.in_words(500.0) == (
        "rank 3 was slow for 800 steps from step 120 on: it took 2.9 times as long as the median rank for the same "
        "number of samples, and the others waited 1 min 0 s for it, 12 % of this run"
    )


@ranks(2)
def test_a_run_names_the_slow_rank(tmp_path: Path) -> None:
    job = Job(
        model=Part(name=f"{__name__}:MLP"),
        loss="cross-entropy",
        dataset=Part(name=f"{__name__}:Rows"),
        optimizer=Part(name="adamw", settings={"lr": 0.01}),
        schedule=Part(name="constant"),
        steps=Steps(total=12, global_batch=16, save_every=0),
        plan=balanced(data_plan(2, microbatches=4)),
    )
    with times(lambda step: [1, 3]):
        summary = train(job, directory=tmp_path / "run")
    assert summary.straggler is not None
    assert (summary.straggler.rank, summary.straggler.since_step, summary.straggler.factor) == (1, 3, 3.0)
    # 24 s on 8 samples against 8 s, in two steps; then the shares are such that both take 12 s
    assert summary.straggler.cost_s == 2 * 16.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["shares"] for line in lines] == [[4, 4]] * 4 + [[6, 2]] * 8
    assert lines[5]["straggler"] is None
    assert lines[6]["straggler"] == {"rank": 1, "factor": 3.0, "since_step": 3, "num_steps": 5, "cost_s": 32.0}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            Plan(axes=Axes(data=2), data=Data(balance=True)),
            "[data] balance = true has no effect with [step] microbatches = 1; leave it out (each rank computes one at "
            "least, so none is left for a faster rank), or set [step] microbatches to 2 or more",
        ),
        (
            Plan(axes=Axes(data=2), step=Step(microbatches=2), data=Data(sync="local", every=4, balance=True)),
            '[data] balance = true gives a slow replica fewer samples, and where [data] sync = "local" averages '
            'replicas it would count as much as one with more; set [data] sync = "all-reduce", or leave balance out',
        ),
        (
            Plan(
                axes=Axes(data=2, pipeline=2),
                step=Step(microbatches=2),
                pipeline=Pipeline(schedule="2bw"),
                data=Data(balance=True),
            ),
            "[data] balance = true changes the number of microbatches from step to step, and [pipeline] schedule = "
            '"2bw" has those of several steps in flight, with weight versions for a fixed number; leave balance out, '
            'or use "1f1b"',
        ),
    ],
)
def test_balance_that_cannot_be(plan: Plan, words: str) -> None:
    assert check(plan, num_ranks=plan.axes.num_ranks) == [words]
